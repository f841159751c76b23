"""The tensors of a base whose weights are pickled (`pytorch_model.bin`, or its shards): names, types and
shapes, for the account of it.

transformers loads such files in the process of rank 0, if they have no safetensors beside them. Nothing is
decoded there: quantised weights are refused by the types of their codes, whatever config.json says.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.serialization import skip_data

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.tensors.dtypes import DTYPES
from fsdp_tune.core.tensors.quantised_weight import StoredType
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
        found = {
            name: StoredType(_name_of(each.dtype), tuple(each.shape))
            for name, each in read_state(path, values=False).items()
        }
        types |= found
        files |= dict.fromkeys(found, path)
    return BaseTensors(types, files, {}) if paths else None


def read_state(path: Path, *, values: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of `torch.save` by name, in mapped memory: tensors that share elements
    have one address.

    Files from before zip archives cannot be mapped. They are read in full with `values`; without, their
    elements are left out.
    Raises: usage error for a file that torch does not read.
    """
    is_mapped = zipfile.is_zipfile(path)
    try:
        with nullcontext() if is_mapped or values else skip_data():
            state: object = torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True)
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
        raise _damaged(
            path, f"torch cannot read the weights as tensors alone ({type(error).__name__}: {reason})"
        ) from error
    found = state.items() if isinstance(state, dict) else ()
    tensors = {str(name): value for name, value in found if isinstance(value, torch.Tensor)}
    if not is_mapped and (size_bytes := _stored_bytes(tensors.values())) > path.stat().st_size:
        raise _damaged(path, f"it is {path.stat().st_size:,} bytes long, and its tensors have {size_bytes:,}")
    return tensors


def _stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, each once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _damaged(path: Path, message: str) -> FsdpTuneError:
    hint = (
        "download or copy the file again, or convert it to safetensors with a tool that you trust to run "
        "its code"
    )
    return usage_error("model-weights-damaged", message, where=Where(str(path)), hint=hint)


def _name_of(dtype: torch.dtype) -> str:
    """Return safetensors' name of a type, or torch's if it has none."""
    name = str(dtype).removeprefix("torch.")
    return DTYPES[name].safetensors if name in DTYPES else name
