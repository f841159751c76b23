"""The computation of an optimizer step besides the model itself: parameter groups, norm, clipping, fp16 loss scale.

The planner traces the same functions, so that it predicts their allocations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdp_tune.model.internals.torch_internals import FOREACH_MUL, FOREACH_NORM
from fsdp_tune.model.loss import micro_batch_loss
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.local import TORCH_DTYPE, plain_name
from fsdp_tune.recipe.schema.recipe import Recipe

NORM_PIECE = 1 << 14


def compute_context(recipe: Recipe, device_type: str) -> AbstractContextManager[Any]:
    """Return the context of the forward: autocast for DDP in mixed precision; no-op under FSDP, which casts its units itself."""
    mixed = recipe.precision.mixed_precision
    if recipe.is_sharded or mixed == "no" or recipe.compute_dtype == recipe.model.dtype:
        return nullcontext()
    return torch.autocast(device_type, dtype=TORCH_DTYPE[recipe.compute_dtype])


def parameter_groups(wrapped: nn.Module, options_of: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the trained parameters in groups of equal options, which `options_of` returns for a parameter's name.

    Groups without a learning rate of their own come first, and of these the one with weight decay.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
    for wrapped_name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            options = options_of(plain_name(wrapped_name))
            groups.setdefault(tuple(sorted(options.items())), []).append(parameter)
    made = [{"params": parameters, **dict(options)} for options, parameters in groups.items()]
    return sorted(made, key=lambda group: ("lr" in group, not group["weight_decay"]))


def flat_shard_group(wrapped: nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which FSDP1 splits its flat parameters; None if gradients are DTensors or not sharded."""
    return wrapped.process_group if isinstance(wrapped, FullyShardedDataParallel) else None


def forward_backward(
    recipe: Recipe,
    wrapped: nn.Module,
    batch: dict[str, torch.Tensor],
    share: float,
    *,
    auxiliary: float = 0.0,
    loss_scale: float | None = None,
    label_smoothing: float = 0.0,
    source_losses: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and backward of one micro-batch. Return (differentiated loss, sum of token losses), both detached scalars.

    `share` turns the sum of token losses into this rank's part of the step's loss; `auxiliary` is the weight of a mixture
    of experts' auxiliary loss, this rank's part of the step's tokens included; `loss_scale` is fp16's. Token losses are added to
    `source_losses` by source (`micro_batch_loss`).
    """
    scale = share if loss_scale is None else share * loss_scale
    with rows_known(wrapped, batch):  # also during the backward, in which recomputation runs layers again
        with compute_context(recipe, batch["input_ids"].device.type):
            loss_sum, auxiliary_loss = micro_batch_loss(wrapped, batch, label_smoothing, scale, source_losses)
        loss = loss_sum * share
        if auxiliary:
            loss = loss + auxiliary * auxiliary_loss
        if loss_scale is not None:
            loss = loss * loss_scale
        loss.backward()
    return loss.detach(), loss_sum.detach()


@torch.no_grad()
def total_norm(parameters: Iterable[nn.Parameter], flat_group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the L2 norm of all gradients over all ranks: a plain fp32 scalar, the same on every rank.

    Gradients with different placements (sharded and replicated ones) are each summed over the ranks that share them, and the
    squares are added. Under FSDP1 a gradient is a plain tensor with this rank's part; `flat_group` is the group of the ranks
    with the other parts.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    by_layout: dict[Any, list[torch.Tensor]] = {}  # few layouts, many gradients
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            layout = (gradient.device_mesh, gradient.placements)
            if layout not in by_layout:
                by_layout[layout] = by_groups[_shard_groups(gradient)]
            by_layout[layout].append(gradient.to_local())
        elif gradient is not None:
            by_groups[() if flat_group is None else (flat_group,)].append(gradient)
    if not by_groups:
        by_groups[() if flat_group is None else (flat_group,)] = []  # this rank's part of every gradient may be empty
    squares: list[torch.Tensor] = []
    for groups, gradients in by_groups.items():
        square = sum_of_squares(gradients)
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().float()


def _shard_groups(gradient: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks with the other parts of a gradient, one for each mesh dimension that shards it."""
    mesh = gradient.device_mesh
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(gradient.placements) if placement.is_shard())


def sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares. On CPU it is computed in pieces: torch sums a norm sequentially in fp32, off by 0.2 % at 33M elements."""
    device = gradients[0].device if gradients else torch.device("cpu")
    if device.type == "cpu":
        gradients = [piece for gradient in gradients for piece in _pieces(gradient.reshape(-1))]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    if device.type == "cpu":
        norms = [torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float32) for piece in gradients]
    else:
        norms = FOREACH_NORM.get()(gradients, 2, dtype=torch.float32)  # without `dtype`, the norm of bf16 gradients would be bf16
    return torch.cat([norm.reshape(-1).to(exact) for norm in norms]).square().sum()


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """Split a flat tensor into rows of `NORM_PIECE` elements and the rest."""
    whole = flat.numel() // NORM_PIECE * NORM_PIECE
    return [piece for piece in (flat[:whole].view(-1, NORM_PIECE), flat[whole:]) if piece.numel()]


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by `factor` in place."""
    by_kind: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            by_kind[local.device, local.dtype].append(local)
    for (device, _), gradients in by_kind.items():
        FOREACH_MUL.get()(gradients, factor.to(device) if isinstance(factor, torch.Tensor) else factor)


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor for gradients that limits their norm to `max_norm`, as in torch's clip_grad_norm_."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


class LossScale:
    """Dynamic loss scaling for fp16 under any sharding, on any device (Micikevicius et al., arXiv:1710.03740).

    torch's GradScaler checks for infinities on each rank separately. The gradient norm is reduced over all ranks anyway, and it
    is not finite exactly if some gradient is not, so every rank makes the same decision.
    """

    growth, backoff, growth_interval_steps = 2.0, 0.5, 2000

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale
        self.good_steps = 0
        self.skipped_steps = 0
        self.skipped_in_a_row = 0

    def update(self, *, finite: bool) -> None:
        """Update the scale. Call it once per step with whether the norm of the scaled gradients is finite."""
        if finite:
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.good_steps % self.growth_interval_steps == 0:
                self.scale *= self.growth
        else:
            self.skipped_steps += 1
            self.skipped_in_a_row += 1
            self.good_steps = 0
            self.scale *= self.backoff

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])
