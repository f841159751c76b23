"""Stand-ins for fused kernels of other programs: they allocate what the kernel allocates, and compute
nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Function


class _Norm(Function):
    """One kernel: keeps its input and one fp32 number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Rotate(Function):
    """One kernel: keeps nothing of the size of its input."""

    @staticmethod
    def forward(_ctx: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), torch.empty_like(k)

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.empty_like(gradients[0]), torch.empty_like(gradients[1])


class _Gate(Function):
    """`act(gate) × up` in one kernel: keeps both."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up = ctx.saved_tensors
        return torch.empty_like(gate), torch.empty_like(up)


class _LossOverLogits(Function):
    """The gradient overwrites the logits."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device).sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].detach()


class _CompiledLoss(Function):
    """Logits in their own dtype, maxima and sums in fp32, the gradient in the logits' dtype."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(
            logits, torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
        )
        return torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device).sum()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Norm.apply(x, weight)
    return made


def rotated(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made: tuple[torch.Tensor, torch.Tensor] = _Rotate.apply(q, k)
    return made


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Gate.apply(gate, up)
    return made


def loss_over_logits(logits: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _LossOverLogits.apply(logits)
    return made


def compiled_loss(logits: torch.Tensor, _labels: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _CompiledLoss.apply(logits)
    return made
