"""Loading straight from safetensors: each rank reads the bytes of its own shard, and nobody holds the whole model.

Possible where the file's tensors are the model's parameters one to one, by name and shape. Checkpoints that transformers
converts while loading (renamed prefixes, fused experts) go through rank 0 instead.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from fsdp_tune.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """tensor name → file that holds it, and → shape."""

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]


def find_weight_files(recipe: Recipe) -> WeightFiles | None:
    """The safetensors files of `model.name_or_path`, downloaded if need be; None where it has none."""
    name, revision = str(recipe.model.name_or_path), recipe.model.revision

    def file(filename: str) -> Path | None:
        found = cached_file(name, filename, revision=revision, _raise_exceptions_for_missing_entries=False)
        return Path(found) if found is not None else None

    index = file(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        single = file(SAFE_WEIGHTS_NAME)
        paths = {single} if single is not None else set()
    else:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = {path for path in map(file, sorted(names)) if path is not None}
    if not paths:
        return None
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(paths):
        for tensor, entry in _header(path).items():
            files[tensor], shapes[tensor] = path, tuple(entry["shape"])
    return WeightFiles(files, shapes)


def _header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header


def fits(model: nn.Module, weights: WeightFiles) -> bool:
    """Whether every parameter and persistent buffer stands in the files under its own name, in its own shape."""
    persistent = set(model.state_dict())
    wanted = {name: tuple(t.shape) for name, t in _unique_tensors(model) if name in persistent}
    return all(weights.shapes.get(name) == shape for name, shape in wanted.items())


def _unique_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


@torch.no_grad()
def read_slices(model: nn.Module, weights: WeightFiles) -> None:
    """Fills the (sharded) parameters and persistent buffers of a wrapped model with this rank's part of the files.

    Sorted by file and name, so that a disk is read from front to back; a tensor is converted to the parameter's dtype.
    """
    persistent = set(model.state_dict())
    targets = {name: tensor for name, tensor in _unique_tensors(model) if name in persistent}
    by_file: dict[Path, list[str]] = {}
    for name in sorted(targets):
        by_file.setdefault(weights.files[name], []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                _fill(targets[name], file.get_slice(name))


def _fill(target: torch.Tensor, source: Any) -> None:
    if not isinstance(target, DTensor):
        target.copy_(source[...] if target.ndim else source[:])
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = target.to_local()
    if local.numel() == 0:
        return
    place = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
    local.copy_(source[place])


def first_on_each_machine(act: Callable[[], WeightFiles | None], local_rank: int) -> WeightFiles | None:
    """Lets one rank of a machine download before the others look into the same cache."""
    found = act() if local_rank == 0 else None
    dist.barrier()
    return act() if local_rank != 0 else found
