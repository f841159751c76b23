"""The kinds of weights that are read, and which of them a directory holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdp_tune.manifest import Manifest
from fsdp_tune.merge.dcp import METADATA_NAME
from fsdp_tune.merge.layout import INDEX_NAME, SINGLE_NAME
from fsdp_tune.run_dir import SHARD_FOLDER

PICKLE_NAME = "pytorch_model_fsdp.bin"
PEFT_NAME = "adapter_model.safetensors"
PEFT_PICKLE_NAME = "adapter_model.bin"


class Format(StrEnum):
    DCP = "dcp"
    SAFETENSORS = "safetensors"
    PICKLE = "pickle"
    PEFT = "peft"
    PEFT_PICKLE = "peft pickle"


# The file that makes a directory one of these; DCP has `.metadata` instead.
FILE_OF = {
    Format.SAFETENSORS: SINGLE_NAME,
    Format.PICKLE: PICKLE_NAME,
    Format.PEFT: PEFT_NAME,
    Format.PEFT_PICKLE: PEFT_PICKLE_NAME,
}


@dataclass(frozen=True, slots=True)
class Weights:
    """One set of weights. `root` holds the files; `manifest` lists them relative to `checkpoint`, where there is one."""

    root: Path
    format: Format
    checkpoint: Path
    step: int | None = None
    manifest: Manifest | None = None


def find_weights(folder: Path) -> tuple[Path, Format] | None:
    """(directory of the files, format) of the one model under `folder`, by what is there and not by its name."""
    shards = folder / SHARD_FOLDER
    if (folder / METADATA_NAME).is_file():
        return folder.resolve(), Format.DCP
    if shards.is_dir() or folder.name == SHARD_FOLDER:
        return (shards if shards.is_dir() else folder).resolve(), Format.DCP
    if (folder / INDEX_NAME).is_file():
        return folder.resolve(), Format.SAFETENSORS
    for kind, name in FILE_OF.items():
        if (folder / name).is_file():
            return folder.resolve(), kind
    return None
