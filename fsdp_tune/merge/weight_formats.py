"""The formats of weights that can be merged, and which one a file or a directory holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdp_tune.core.errors import Where, failed_error
from fsdp_tune.core.files import read_regular
from fsdp_tune.core.tensors.dcp_metadata import METADATA_NAME
from fsdp_tune.core.tensors.peft_config import WEIGHTS_FILE
from fsdp_tune.core.tensors.weight_files import (
    CONFIG,
    INDEX,
    MAX_INDEX_BYTES,
    SINGLE,
    UnusableIndexError,
    first_file,
)
from fsdp_tune.run.directory import SHARD_FOLDER
from fsdp_tune.run.manifest import Manifest

SINGLE_NAME, INDEX_NAME = SINGLE, INDEX
PICKLE_NAME = "pytorch_model_fsdp.bin"
OLD_PICKLE_NAME = "pytorch_model.bin"  # transformers before safetensors
PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")
PEFT_PICKLE_NAME = "adapter_model.bin"
HF_SHARD = re.compile(r"shard-(\d+)-model-\d+-of-\d+\.safetensors")
"""A rank's file of torch's HuggingFaceStorageWriter."""
_OF_ONE_RANK = re.compile(r".*_rank\d+|(?P<family>(model|optim|extra_state)_world_size_\d+_rank_\d+)")


class Format(StrEnum):
    DCP = "dcp"
    SAFETENSORS = "safetensors"
    HF_SHARDS = "sharded safetensors"
    PICKLE = "pickle"
    PEFT = "peft"
    PEFT_PICKLE = "peft pickle"


# The file that identifies each format; DCP has `.metadata` instead.
FILE_OF = {
    Format.SAFETENSORS: SINGLE_NAME,
    Format.PICKLE: PICKLE_NAME,
    Format.PEFT: WEIGHTS_FILE,
    Format.PEFT_PICKLE: PEFT_PICKLE_NAME,
}


@dataclass(frozen=True, slots=True)
class Weights:
    """One set of weights and its checkpoint; `file` in `root` is opened first. `manifest` lists the
    checkpoint's files, if it has one."""

    root: Path
    format: Format
    file: str
    checkpoint: Path
    step: int | None = None
    manifest: Manifest | None = None


def is_of_one_rank(file: Path) -> bool:
    """Return whether a file is one rank's part of a model, by the names of Accelerate (LOCAL_STATE_DICT) or
    of verl."""
    return _OF_ONE_RANK.fullmatch(file.stem) is not None


def is_of_verl(file: Path) -> bool:
    """Return whether a file is one rank's part of a model as verl and its relatives save it
    (`model_world_size_2_rank_0.pt`)."""
    match = _OF_ONE_RANK.fullmatch(file.stem)
    return match is not None and match["family"] is not None


def find_weights(place: Path) -> Weights | None:
    """Return the weights at `place`, as a checkpoint of its own: a directory is identified by its contents, a
    file by its suffix."""
    if place.is_file():
        kind = next((kind for kind, name in FILE_OF.items() if name == place.name), None)
        if kind is None and place.suffix in PICKLE_ENDINGS and not is_of_one_rank(place):
            kind = Format.PICKLE
        return _weights_in(place.parent, kind, place.name) if kind is not None else None
    shards = place / SHARD_FOLDER
    if (place / METADATA_NAME).is_file():
        return _weights_in(place, Format.DCP, METADATA_NAME)
    if shards.is_dir() or place.name == SHARD_FOLDER:
        return _weights_in(shards if shards.is_dir() else place, Format.DCP, METADATA_NAME)
    if (first := _first_file(place)) is not None:
        return _weights_in(place, Format.SAFETENSORS, first)
    for kind, name in (*FILE_OF.items(), (Format.PICKLE, OLD_PICKLE_NAME)):
        if (place / name).is_file():
            return _weights_in(place, kind, name)
    shards = (
        sorted(path.name for path in place.iterdir() if HF_SHARD.fullmatch(path.name))
        if place.is_dir()
        else []
    )
    return _weights_in(place, Format.HF_SHARDS, shards[0]) if shards else None


def _first_file(folder: Path) -> str | None:
    """Return the safetensors file of a model directory that is read first: the only one, or the index.
    Raises: FailedError."""
    config = folder / CONFIG
    try:
        return first_file(
            lambda name: (folder / name).is_file(),
            read_regular(config, most_bytes=MAX_INDEX_BYTES) if config.is_file() else None,
            pickled=False,
        )
    except UnusableIndexError as error:
        raise failed_error(
            "merge-path-traversal" if error.leaves_directory else "merge-config",
            str(error),
            where=Where(str(config)),
        ) from error


def _weights_in(folder: Path, kind: Format, file: str) -> Weights:
    root = folder.resolve()
    return Weights(root, kind, file, checkpoint=root)
