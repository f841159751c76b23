"""Autocast on the fake device. torch leaves the list of operations to each backend; this is CUDA's (`autocast_mode.h`).

Plain DDP computes in half precision by autocast: matrices are cast, a weight once for each forward (autocast's own cache),
and norms and sums run in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import library

from fsdp_tune.planner.trace.device import DEVICE

# AT_FORALL_LOWER_PRECISION_FP, those that language models use; `cuda_kernels` handles attention.
_LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "conv1d", "prelu")
# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE.
_FP32 = (
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "rms_norm",
    "softmax.int",
    "log_softmax.int",
    "nll_loss",
    "cross_entropy_loss",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "exp",
    "log",
    "log1p",
    "expm1",
    "rsqrt",
    "reciprocal",
    "softplus",
    "logsumexp",
    "sum",
    "sum.dim_IntList",
    "cumsum",
    "cumprod",
    "prod",
)
_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@functools.cache
def install() -> list[library.Library]:
    """Install autocast for the fake device, once per process; the returned objects must stay alive."""
    fallback = library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(library.fallthrough_kernel)
    casts = library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _LOWER:
        casts.impl(name, functools.partial(_run, _overload(name), None))
    for name in _FP32:
        casts.impl(name, functools.partial(_run, _overload(name), torch.float32))
    return [fallback, casts]


def forget_weights() -> None:
    """Empty the cache of cast weights, as leaving an autocast context does."""
    _weights.clear()


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _run(operation: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    wanted = dtype or torch.get_autocast_dtype(DEVICE)
    torch.set_autocast_enabled(DEVICE, False)  # otherwise the operation would be dispatched here again
    try:
        return operation(*_cast(args, wanted), **{name: _cast(value, wanted) for name, value in kwargs.items()})
    finally:
        torch.set_autocast_enabled(DEVICE, True)


def _cast(leaf: Any, wanted: torch.dtype) -> Any:
    if isinstance(leaf, list | tuple):
        return [_cast(each, wanted) for each in leaf]
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point() or leaf.dtype in (wanted, torch.float64):
        return leaf
    if wanted == torch.float32 or not (leaf.is_leaf and leaf.requires_grad and leaf.dtype == torch.float32):
        return leaf.to(wanted)
    if id(leaf) not in _weights:
        _weights[id(leaf)] = (leaf, leaf.to(wanted))
    return _weights[id(leaf)][1]
