"""Refuse quantised weights in files of `torch.save`: transformers would cast their codes to floats, and training would start from those.

Quantised weights are decoded from safetensors files alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import torch

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.core.tensors.encoded import StoredType
from fsdp_tune.core.tensors.encodings import find_encodings, method_of, settings_of_files
from fsdp_tune.model.loading.stored_tensors import DTYPES, Find, list_weights, read_objects
from fsdp_tune.model.loading.tensor_account import IN_16_BITS, unread_problems

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pickled_paths(find: Find) -> list[Path]:
    """Return the files of `torch.save` that hold a model's weights; [] if others do. Raises: FailedError for an unusable index."""
    listed = list_weights(find)
    return [path for path in map(find, listed.files) if path is not None] if listed is not None and listed.is_pickled else []


def refuse_pickled_codes(name: str, find: Find, paths: Sequence[Path] = ()) -> None:
    """Refuse a model without safetensors files that is quantised, by its settings or by the types of its tensors. Raises: usage error.

    `paths`: its files on this machine.
    """
    found = {tensor: (path, stored) for path in paths for tensor, stored in _types_in(path).items()}
    types = {tensor: stored for tensor, (_, stored) in found.items()}
    if settings := settings_of_files(read_objects(find), types):
        what = f"in {paths[0].name}" if paths else "not in safetensors files"
        message = f"the weights of {name} are quantised ({method_of(settings)}) and {what}: they are decoded from safetensors files alone"
        where = Where(str(paths[0]) if paths else None, key="model.name_or_path")
        raise usage_error("model-quantised", message, where=where, hint=IN_16_BITS)
    if problems := unread_problems(find_encodings(types, {}).unread, {tensor: path for tensor, (path, _) in found.items()}):
        raise FsdpTuneError(*problems)


def _types_in(path: Path) -> dict[str, StoredType]:
    """Return types and shapes of the tensors of a file; {} of one that is damaged, or from before zip archives."""
    try:
        state = torch.load(path, map_location="meta", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError):
        return {}  # transformers reads it, or reports it
    if not isinstance(state, dict):
        return {}
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: StoredType(_NAMES.get(value.dtype, str(value.dtype)), tuple(value.shape)) for name, value in tensors.items()}
