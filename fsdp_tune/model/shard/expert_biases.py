"""Biases of stacked experts in half precision, whose gradients are summed over rows in fp32.

transformers' `grouped_mm` indexes biases by the expert of each row, and the backward of an index adds the
rows in the dtype of what is indexed: of the thousands of rows of a micro-batch, bf16 loses some per cent, and
most of a sum whose addends have one sign. Here that backward is a product with ones and zeros, which is
summed in fp32 and as fast. `eager` adds one bias to all rows of its expert, which autograd sums in fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_tune.model.internals.transformers_internals import EXPERTS, has_experts_kernel
from fsdp_tune.model.shard.local import ModuleView

_INDEXES_BIASES = "grouped_mm"


def operand(stack: torch.Tensor, kernel: object) -> Any:
    """Return a stack of experts as a kernel takes it: with `grouped_mm`, biases in half precision are
    `_Biases`."""
    # A product of fp32 may be rounded to TF32, and an index of fp32 is summed in fp32.
    is_half = stack.dtype in (torch.bfloat16, torch.float16)
    return _Biases(stack) if kernel == _INDEXES_BIASES and _is_bias(stack) and is_half else stack


def sum_biases_in_fp32(model: nn.Module) -> None:
    """Make the experts of a bare model, if their kernel indexes biases, sum the gradients of these in fp32.
    Ranks that divide experts do so in any case (`expert_parallel`)."""
    for module in model.modules():
        if has_experts_kernel(module) and EXPERTS.of(module.config) == _INDEXES_BIASES:
            names = [name for name, stack in module.named_parameters(recurse=False) if _is_bias(stack)]
            if names:
                module.forward = _with_biases(module, names)


def _is_bias(stack: torch.Tensor) -> bool:
    return stack.ndim == 2


def _with_biases(experts: Any, names: Sequence[str]) -> Callable[..., object]:
    inner: Any = type(experts).forward  # FSDP2 and PEFT make subclasses of it

    @functools.wraps(inner)
    def forward(*args: object, **kwargs: object) -> object:
        # by name: in a forward of FSDP1 they are not parameters
        biases = {name: operand(getattr(experts, name), _INDEXES_BIASES) for name in names}
        return inner(ModuleView(experts, **biases), *args, **kwargs)

    return forward


class _Biases:
    """Biases [experts, outputs] that can be indexed by the experts of rows, and nothing else."""

    def __init__(self, stack: torch.Tensor) -> None:
        self._stack = stack

    def __getitem__(self, experts: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = _OfRows.apply(self._stack, experts)  # type: ignore[no-untyped-call]
        return rows


class _OfRows(torch.autograd.Function):
    """`stack[experts]`, for indices [rows]."""

    @staticmethod
    def forward(ctx: Any, stack: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(experts)
        ctx.count = len(stack)
        return stack[experts]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (experts,) = ctx.saved_tensors
        numbers = torch.arange(ctx.count, device=experts.device, dtype=experts.dtype)
        return (numbers.unsqueeze(1) == experts).to(gradients[0].dtype) @ gradients[0], None
