"""The tensors of a base whose weights are pickled (`pytorch_model.bin`, or its shards): names, types and
shapes, for the account of it.

transformers loads such files in the process of rank 0, if they have no safetensors beside them. Nothing is
decoded there: quantised weights are refused by the types of their codes, whatever config.json says.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.core.tensors.dtypes import DTYPES
from fsdp_tune.core.tensors.encoded import StoredType
from fsdp_tune.model.loading.stored_tensors import Find, list_weights
from fsdp_tune.model.loading.tensor_account import BaseTensors


def pickled_paths(find: Find) -> list[Path]:
    """Return the files of `torch.save` that hold a model's weights; [] if others do, or if one of them is
    missing.

    Raises: FailedError for an unusable index.
    """
    listed = list_weights(find)
    if listed is None or not listed.is_pickled:
        return []
    paths = [find(file) for file in listed.files]
    return [path for path in paths if path is not None] if None not in paths else []


def read_pickled(paths: Sequence[Path]) -> BaseTensors | None:
    """Return the tensors of pickled files; None of no file. Raises: usage error for a file that torch does
    not read.

    Of a name in two shards the later shard counts, as it does where transformers loads them.
    """
    types: dict[str, StoredType] = {}
    files: dict[str, Path] = {}
    for path in paths:
        found = _types(path)
        types |= found
        files |= dict.fromkeys(found, path)
    return BaseTensors(types, files, {}) if paths else None


def _types(path: Path) -> dict[str, StoredType]:
    try:
        state = _state(path)
    except (
        OSError,
        RuntimeError,
        ValueError,
        EOFError,
        KeyError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        reason = next(iter(str(error).splitlines()), "")
        message = f"torch cannot read the weights as tensors alone ({type(error).__name__}: {reason})"
        hint = (
            "download or copy the file again, or convert it to safetensors with a tool that you trust to "
            "run its code"
        )
        raise usage_error("model-weights-damaged", message, where=Where(str(path)), hint=hint) from error
    tensors = (
        {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        if isinstance(state, dict)
        else {}
    )
    return {
        str(name): StoredType(_name_of(value.dtype), tuple(value.shape)) for name, value in tensors.items()
    }


def _state(path: Path) -> object:
    """Return what a file holds, without the elements of its tensors. Files from before zip archives cannot be
    mapped and are read."""
    return torch.load(path, map_location="meta", mmap=zipfile.is_zipfile(path), weights_only=True)


def _name_of(dtype: torch.dtype) -> str:
    """Return safetensors' name of a type, or torch's if it has none."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES[name].safetensors if name in DTYPES else name
