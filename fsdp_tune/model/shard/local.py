"""What of a tensor lies on this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_tune.model.kernels.float8_weights import plain


def local_part(tensor: torch.Tensor) -> Any:
    """The piece that this rank holds, without DTensor and torchao's fp8 weights around it: the same memory, a plain tensor or one of
    a library's own kinds."""
    return plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
