"""This rank's part of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_tune.model.kernels.float8_weights import plain


def local_part(tensor: torch.Tensor) -> Any:
    """Return this rank's part, unwrapped from DTensor and torchao's fp8 weights, sharing its memory. It may still be a tensor subclass
    of a library."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


@torch.no_grad()
def copy_part(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy this rank's part of `whole` into `target`, without communication."""
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        whole = whole[tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))]
    local_part(target).copy_(whole)
