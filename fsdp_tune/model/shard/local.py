"""This rank's part of a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_tune.model.kernels.float8_weights import plain


def local_part(tensor: torch.Tensor) -> Any:
    """Return this rank's part, unwrapped from DTensor and torchao's fp8 weights, sharing its memory. It may still be a tensor subclass
    of a library."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is divided: along one dimension, over the ranks of a group."""

    dim: int
    group: dist.ProcessGroup


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """Return how a tensor is divided; None if this rank has all of it."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for index, placement in enumerate(tensor.placements):
            if placement.is_shard() and mesh.size(index) > 1:
                return Sharding(placement.dim, mesh.get_group(index))  # type: ignore[attr-defined]
    return None


@torch.no_grad()
def copy_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of `whole` into `target`, without communication."""
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        whole = whole[tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))]
    local_part(target).copy_(whole)
