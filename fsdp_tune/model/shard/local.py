"""This rank's part of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_tune.model.torchao_tensors import plain


def local_part(tensor: torch.Tensor) -> Any:
    """Return this rank's part, unwrapped from DTensor and torchao's fp8 weights, sharing its memory. It may still be a tensor subclass
    of a library."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def compute_device(tensor: torch.Tensor) -> torch.device:
    """Return where a tensor is computed with: with `offload_params` its part is in host memory, and the mesh is one of GPUs."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is divided: along one dimension, over the ranks of a group."""

    dim: int
    group: dist.ProcessGroup
    device: torch.device
    """Where the group communicates."""


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """Return how a tensor is divided; None if this rank has all of it."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for index, placement in enumerate(tensor.placements):
            if placement.is_shard() and mesh.size(index) > 1:
                return Sharding(placement.dim, mesh.get_group(index), compute_device(tensor))  # type: ignore[attr-defined]
    return None


def offset_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the index of the first element of this rank's part in the full tensor, one number for each dimension.

    As `Shard` divides, by `torch.chunk`: parts of equal length, then a shorter one and empty ones.
    """
    offset, lengths = [0] * tensor.ndim, list(tensor.shape)
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for index, placement in enumerate(tensor.placements):
            if placement.is_shard():
                dim: int = placement.dim  # type: ignore[attr-defined]
                part = -(-lengths[dim] // mesh.size(index))
                start = min(lengths[dim], mesh.get_local_rank(index) * part)
                offset[dim], lengths[dim] = offset[dim] + start, min(part, lengths[dim] - start)
    return tuple(offset)


def wraps_others(kind: type) -> bool:
    """Return whether tensors of a class consist of others (DTensor, torchao's blocks), by the protocol of torch's tensor subclasses."""
    return issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


@torch.no_grad()
def copy_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of `whole` into `target`, without communication."""
    if isinstance(target, DTensor):
        parts = zip(offset_of(target), target.to_local().shape, strict=True)
        whole = whole[tuple(slice(start, start + length) for start, length in parts)]
    local_part(target).copy_(whole)
