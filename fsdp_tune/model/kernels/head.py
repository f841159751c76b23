"""Compute head and loss together, a slice of the tokens at a time, so that `tokens × vocabulary` logits are
never stored.

The gradients of a slice are computed in the forward, while its logits exist, as in Liger (arXiv:2410.10989)
and in torch's `linear_cross_entropy`: no logits are kept or computed twice. torch's function (2.13) is not
used: in bf16 it returns a loss rounded to bf16 and adds the slices of the weight's gradient in bf16, and it
supports neither soft-capping nor label smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fsdp_tune.data.store import IGNORE_INDEX

SLICE_ELEMENTS = 1 << 27
"""Logits of one slice, tokens × vocabulary: 512 MiB in fp32. Each slice adds to the gradient of the head's
weight, so smaller slices would spend their time on that sum: 1,024 tokens with Llama 3's vocabulary take
1.6 TFLOP per product and 2 GiB for the sum."""


_WHOLE_TILES = 128
"""Slices are multiples of this many tokens if possible: the tile height of a matrix product."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Transformation of the head's output: `softcap · tanh(scale · x / softcap)`, or `scale · x` if softcap
    is None."""

    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Options of the loss. `gradient_scale` is the factor by which the caller will multiply the loss: in fp16
    the gradients of the logits, of order 1 / vocabulary, must include it before they are rounded to 16
    bits."""

    logits: Logits = Logits()
    label_smoothing: float = 0.0
    dft: bool = False
    """Weight the loss of each token by its detached probability (`model.step.token_losses`). Liger's kernel
    cannot."""
    gradient_scale: float = 1.0
    token_losses: torch.Tensor | None = None
    """fp32 [tokens], to be set to the loss of each token; without a gradient. Liger's kernel, which returns
    only the sum, ignores it."""


def slice_tokens(tokens: int, vocabulary: int) -> int:
    """Return the number of tokens of one slice."""
    most = max(1, SLICE_ELEMENTS // vocabulary)
    return min(tokens, most // _WHOLE_TILES * _WHOLE_TILES or most)


def summed_linear_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    options: LossOptions,
) -> torch.Tensor:
    """Return the loss of `hidden @ weight.T + bias`, summed over the targets that are not -100: an fp32
    scalar (nats).

    `hidden` [tokens, width], `weight` [vocabulary, width], `bias` [vocabulary] or None, `targets` [tokens]
    int64. Products are computed in the dtype of `hidden` (autocast's if enabled), everything else in fp32.
    Its gradient can be computed only once.
    """
    device = hidden.device.type
    compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        loss: torch.Tensor = _SummedLinearLoss.apply(hidden, weight, bias, targets, options, compute)  # type: ignore[no-untyped-call]
    return loss


class _SummedLinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        options: LossOptions,
        compute: torch.dtype,
    ) -> torch.Tensor:
        ctx.options = options
        wanted = ctx.needs_input_grad[:3]
        gradients = _Gradients.of(hidden, weight, bias, wanted)
        x, w = hidden.to(compute), weight.to(compute)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        tokens = hidden.shape[0]
        size = slice_tokens(tokens, weight.shape[0])
        for start in range(0, tokens, size):
            part = slice(start, min(start + size, tokens))
            logits = F.linear(x[part], w, None if bias is None else bias.to(compute)).float()
            of_tokens = _losses_and_gradient(logits, targets[part], options, differentiate=any(wanted))
            loss += of_tokens.sum()
            if options.token_losses is not None:
                options.token_losses[part] = of_tokens
            gradients.add(part, logits.to(compute) if any(wanted) else logits, x[part], w)
            del logits  # before the next slice's are made
        ctx.save_for_backward(*gradients.finished(weight.dtype, bias.dtype if bias is not None else None))
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        assert not getattr(ctx, "spent", False), "the gradients of the chunked loss can be used only once"
        ctx.spent = True
        factor = upstream[0] / ctx.options.gradient_scale
        hidden, weight, bias = (
            None if gradient is None else gradient.mul_(factor) for gradient in ctx.saved_tensors
        )
        return hidden, weight, bias, None, None, None


@dataclass(slots=True)
class _Gradients:
    """Gradients of hidden states in their own dtype, and of weight and bias in fp32, since every slice adds
    to them."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @classmethod
    def of(
        cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: tuple[bool, ...]
    ) -> _Gradients:
        return cls(
            torch.empty_like(hidden) if wanted[0] else None,
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted[1] else None,
            torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
            if bias is not None and wanted[2]
            else None,
        )

    def add(self, part: slice, logits_gradient: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
        if self.hidden is not None:
            self.hidden[part] = logits_gradient @ w
        if self.weight is not None:
            if logits_gradient.dtype == torch.float32:
                self.weight.addmm_(logits_gradient.T, x)
            else:
                self.weight += logits_gradient.T @ x
        if self.bias is not None:
            self.bias += logits_gradient.sum(0, dtype=torch.float32)

    def finished(self, weight: torch.dtype, bias: torch.dtype | None) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients, rounded once to the dtypes that autograd expects."""
        of_weight, self.weight = self.weight, None
        return (
            self.hidden,
            None if of_weight is None else of_weight.to(weight),
            None if self.bias is None or bias is None else self.bias.to(bias),
        )


def _losses_and_gradient(
    logits: torch.Tensor, targets: torch.Tensor, options: LossOptions, *, differentiate: bool
) -> torch.Tensor:
    """Return the loss of each token. `logits` [tokens, vocabulary], fp32, becomes its gradient times
    `gradient_scale`, in place."""
    slope = _shape_logits(logits, options.logits, differentiate=differentiate)
    valid = targets != IGNORE_INDEX
    index = torch.where(valid, targets, 0).unsqueeze(1)
    smoothing, vocabulary = options.label_smoothing, logits.shape[1]
    logits -= logits.amax(dim=1, keepdim=True)
    of_target = logits.gather(1, index).squeeze(1)
    of_all = logits.mean(dim=1) if smoothing else None
    logits.exp_()
    total = logits.sum(dim=1, keepdim=True)
    log_total = total.log().squeeze(1)
    loss = log_total - of_target
    if of_all is not None:
        loss = (1 - smoothing) * loss + smoothing * (log_total - of_all)
    weight = torch.where(valid, options.gradient_scale, 0.0).unsqueeze(1) if differentiate else None
    if options.dft:
        # a constant for the gradient, which is therefore that of the cross-entropy times it
        probability = torch.exp(-loss)
        loss = loss * probability
        weight = None if weight is None else weight * probability.unsqueeze(1)
    if weight is not None:
        logits *= weight / total
        logits.scatter_add_(1, index, (smoothing - 1) * weight)
        if smoothing:
            logits -= smoothing / vocabulary * weight
        if slope is not None:
            logits *= slope
    return torch.where(valid, loss, 0.0)


def _shape_logits(logits: torch.Tensor, shape: Logits, *, differentiate: bool) -> torch.Tensor | float | None:
    """Apply scale and soft-cap in place. Return the derivative, or None if it is 1."""
    if shape.softcap is None:
        if shape.scale == 1.0:
            return None
        logits *= shape.scale
        return shape.scale
    logits *= shape.scale / shape.softcap
    logits.tanh_()
    slope = (1 - logits.square()).mul_(shape.scale) if differentiate else None
    logits *= shape.softcap
    return slope
