"""This rank's part of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_tune.model.kernels.float8_weights import plain


def local_part(tensor: torch.Tensor) -> Any:
    """Return this rank's part, unwrapped from DTensor and torchao's fp8 weights, sharing its memory. It may still be a tensor subclass
    of a library."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
