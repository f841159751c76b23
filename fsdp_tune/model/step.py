"""The computation of an optimizer step besides the model itself: the loss, parameter groups, norm, clipping,
fp16 loss scale.

The loss of a step is `sum of token losses / number of supervised tokens`, both over all ranks and
micro-batches, so every supervised token has the same weight. Averages of averages (per micro-batch, per rank)
give tokens of short rows more weight: transformers#34191 and later issues.

The planner traces the same functions, so that it predicts their allocations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypedDict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from fsdp_tune.core.families import BALANCE_WEIGHTS
from fsdp_tune.data.store import IGNORE_INDEX
from fsdp_tune.model.experts import examples_alone
from fsdp_tune.model.internals.torch_internals import FOREACH_MUL, FOREACH_NORM
from fsdp_tune.model.kernels.loss_in_head import loss_kernel_of
from fsdp_tune.model.sequence_parallel import rows_known, shared_rows
from fsdp_tune.model.shard.local import TORCH_DTYPE, plain_name
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return labels [batch, tokens] shifted to the positions of the logits: position t predicts token t +
    1."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def supervised_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of targets (scalar int64); the first token of a row is never one."""
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def token_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    dft: bool = False,
    reduction: str = "none",
) -> torch.Tensor:
    """Return the loss of each token, zero where it is not trained, in fp32 (nats): [batch × tokens], or its
    sum.

    `logits` [batch, tokens, vocabulary] in any float dtype, `targets` (`shift_labels`) [batch, tokens] with
    -100 where not trained. The loss is the cross-entropy -log p; with `dft`, -sg(p) log p, where sg passes no
    gradient (dynamic fine-tuning, arXiv:2508.05629).
    """
    losses = F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]),
        targets.view(-1),
        ignore_index=IGNORE_INDEX,
        reduction="none" if dft else reduction,
        label_smoothing=label_smoothing,
    )
    if not dft:
        return losses
    losses = losses * torch.exp(-losses.detach())
    return losses.sum() if reduction == "sum" else losses


def summed_token_loss(
    logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0, *, dft: bool = False
) -> torch.Tensor:
    """Return the sum of `token_losses`. Zero, with a gradient of zero, if no token is trained."""
    return token_losses(logits, targets, label_smoothing, dft=dft, reduction="sum")


class LossArguments(TypedDict):
    """Of the training loss, for `token_losses` and `forward_backward`."""

    label_smoothing: float
    dft: bool


def loss_options(recipe: Recipe) -> LossArguments:
    """Return the arguments of `token_losses` and `forward_backward` for the training loss. Evaluation has
    none: it is cross-entropy."""
    return {
        "label_smoothing": float(training_value(recipe.training, "label_smoothing_factor")),
        "dft": recipe.training.loss == "dft",
    }


_NOT_OF_THE_MODEL = ("labels", "cu_seq_lens", "example_ids", "example_lengths", "source_ids")


def model_inputs(batch: dict[str, torch.Tensor]) -> dict[str, object]:
    """Return the entries of a batch for a model's forward; of rows that a sequence group shares, with this
    rank's tokens.

    `cu_seq_lens` [examples + 1] int32, if present, gives variable-length kernels the ends of examples in the
    flattened batch; without it they use position ids, which works for a single row only.
    """
    inputs: dict[str, object] = {
        name: value for name, value in batch.items() if name not in _NOT_OF_THE_MODEL
    }
    if (ends := batch.get("cu_seq_lens")) is not None:
        # The length of the longest example is only on the device; the kernels accept an upper bound.
        longest = batch["input_ids"].shape[1]
        inputs |= {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }
    if (rows := shared_rows()) is not None:  # with positions always, since a rank's tokens do not start at 0
        inputs |= {
            "input_ids": rows.own_tokens(batch["input_ids"]),
            "position_ids": rows.own_tokens(rows.position_ids),
        }
    return inputs


def micro_batch_loss(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    label_smoothing: float = 0.0,
    gradient_scale: float = 1.0,
    source_losses: torch.Tensor | None = None,
    *,
    dft: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one forward and return (summed loss in fp32, auxiliary loss or zero).

    `batch` has input_ids, labels and optionally position_ids and cu_seq_lens. With example_ids and
    example_lengths, the auxiliary loss is that of each example times its tokens, summed (`summed_balance`);
    otherwise the model's own, of the batch. `gradient_scale` is the factor by which the caller multiplies the
    summed loss before the backward. With `source_losses`, fp64 [sources], the token losses are also added to
    it by source, if the batch has `source_ids` [batch, tokens].
    """
    inputs, targets = model_inputs(batch), shift_labels(batch["labels"])
    ids = None if source_losses is None or "source_ids" not in batch else shift_labels(batch["source_ids"])
    if (rows := shared_rows()) is not None:
        # after the shift: the last target of a rank is the first token of the next rank
        targets = rows.own_tokens(targets)
        ids = None if ids is None else rows.own_tokens(ids)
    of_tokens: torch.Tensor | None = None
    with examples_alone(model, batch):
        if loss_kernel_of(model) == "full":
            outputs = model(**inputs, use_cache=False)
            if ids is None:
                loss = summed_token_loss(outputs.logits, targets, label_smoothing, dft=dft)
            else:
                of_tokens = token_losses(outputs.logits, targets, label_smoothing, dft=dft)
                loss = of_tokens.sum()
            auxiliary = getattr(outputs, "aux_loss", None)
        else:
            options = {
                "targets": targets,
                "label_smoothing": label_smoothing,
                "dft": dft,
                "gradient_scale": gradient_scale,
            }
            loss, auxiliary, of_tokens = model(
                **inputs, use_cache=False, **options, keeps_token_losses=ids is not None
            )
    if source_losses is not None and ids is not None and of_tokens is not None:
        _add_by_source(source_losses, of_tokens.detach(), ids.view(-1))
    return loss, auxiliary if isinstance(auxiliary, torch.Tensor) else torch.zeros_like(loss)


def _add_by_source(source_losses: torch.Tensor, of_tokens: torch.Tensor, ids: torch.Tensor) -> None:
    """Add the losses of each source's tokens. In a fixed order, where `index_add_` on a GPU adds in any."""
    sources = torch.arange(len(source_losses), device=ids.device).unsqueeze(1)
    source_losses += torch.where(ids == sources, of_tokens, 0.0).sum(1, dtype=source_losses.dtype)


def auxiliary_loss_weight(model: PreTrainedModel) -> float:
    """Return the coefficient of the load-balancing loss; zero if `output_router_logits` is off in the
    configuration."""
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    return next((float(getattr(model, name)) for name in BALANCE_WEIGHTS if hasattr(model, name)), 0.0)


NORM_PIECE = 1 << 14


def compute_context(recipe: Recipe, device_type: str) -> AbstractContextManager[object]:
    """Return the context of the forward: autocast for DDP in mixed precision; no-op under FSDP, which casts
    its units itself."""
    mixed = recipe.precision.mixed_precision
    if recipe.is_sharded or mixed == "no" or recipe.compute_dtype == recipe.model.dtype:
        return nullcontext()
    return torch.autocast(device_type, dtype=TORCH_DTYPE[recipe.compute_dtype])


def parameter_groups(
    wrapped: nn.Module, options_of: Callable[[str], dict[str, object]]
) -> list[dict[str, object]]:
    """Return the trained parameters in groups of equal options, which `options_of` returns for a parameter's
    name.

    Groups without a learning rate of their own come first, and of these the one with weight decay.
    """
    groups: dict[tuple[tuple[str, object], ...], list[nn.Parameter]] = {}
    for wrapped_name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            options = options_of(plain_name(wrapped_name))
            groups.setdefault(tuple(sorted(options.items())), []).append(parameter)
    made: list[dict[str, object]] = [
        {"params": parameters, **dict(options)} for options, parameters in groups.items()
    ]
    return sorted(made, key=lambda group: ("lr" in group, not group["weight_decay"]))


def flat_shard_group(wrapped: nn.Module) -> dist.ProcessGroup | None:
    """Return the group over which FSDP1 splits its flat parameters; None if gradients are DTensors or not
    sharded."""
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
    dft: bool = False,
    source_losses: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run forward and backward of one micro-batch. Return (differentiated loss, sum of token losses), both
    detached scalars.

    `share` turns the sum of token losses into this rank's part of the step's loss; `auxiliary` is the weight
    of a mixture of experts' auxiliary loss, this rank's part of the step's tokens included; `loss_scale` is
    fp16's. Token losses are added to `source_losses` by source (`micro_batch_loss`).
    """
    scale = share if loss_scale is None else share * loss_scale
    with rows_known(wrapped, batch):  # also during the backward, in which recomputation runs layers again
        with compute_context(recipe, batch["input_ids"].device.type):
            loss_sum, auxiliary_loss = micro_batch_loss(
                wrapped, batch, label_smoothing, scale, source_losses, dft=dft
            )
        loss = loss_sum * share
        if auxiliary:
            loss = loss + auxiliary * auxiliary_loss
        if loss_scale is not None:
            loss = loss * loss_scale
        loss.backward()
    return loss.detach(), loss_sum.detach()


@torch.no_grad()
def total_norm(
    parameters: Iterable[nn.Parameter], flat_group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the L2 norm of all gradients over all ranks: a plain fp32 scalar, the same on every rank.

    Gradients with different placements (sharded and replicated ones) are each summed over the ranks that
    share them, and the squares are added. Under FSDP1 a gradient is a plain tensor with this rank's part;
    `flat_group` is the group of the ranks with the other parts.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = defaultdict(list)
    by_layout: dict[object, list[torch.Tensor]] = {}  # few layouts, many gradients
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
        by_groups[
            () if flat_group is None else (flat_group,)
        ] = []  # this rank's part of every gradient may be empty
    squares: list[torch.Tensor] = []
    for groups, gradients in by_groups.items():
        square = sum_of_squares(gradients)
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack([square.to(squares[0].device) for square in squares]).sum().sqrt().float()


def _shard_groups(gradient: DTensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups of ranks with the other parts of a gradient, one for each mesh dimension that shards
    it."""
    mesh = gradient.device_mesh
    return tuple(
        mesh.get_group(dim) for dim, placement in enumerate(gradient.placements) if placement.is_shard()
    )


def sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares. On CPU it is computed in pieces: torch sums a norm sequentially in fp32, off
    by 0.2 % at 33M elements."""
    device = gradients[0].device if gradients else torch.device("cpu")
    if device.type == "cpu":
        gradients = [piece for gradient in gradients for piece in _pieces(gradient.reshape(-1))]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    exact = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    if device.type == "cpu":
        norms = [torch.linalg.vector_norm(piece, dim=-1, dtype=torch.float32) for piece in gradients]
    else:
        # without `dtype`, the norm of bf16 gradients would be bf16
        norms = FOREACH_NORM.get()(gradients, 2, dtype=torch.float32)
    return torch.cat([norm.reshape(-1).to(exact) for norm in norms]).square().sum()


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """Split a flat tensor into rows of `NORM_PIECE` elements and the rest."""
    whole = flat.numel() // NORM_PIECE * NORM_PIECE
    return [piece for piece in (flat[:whole].view(-1, NORM_PIECE), flat[whole:]) if piece.numel()]


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: torch.Tensor | float) -> None:
    """Multiply every gradient by `factor` in place."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
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
    """Dynamic loss scaling for fp16 under any sharding, on any device (Micikevicius et al.,
    arXiv:1710.03740).

    torch's GradScaler checks for infinities on each rank separately. The gradient norm is reduced over all
    ranks anyway, and it is not finite exactly if some gradient is not, so every rank makes the same decision.
    """

    growth, backoff, growth_interval_steps = 2.0, 0.5, 2000

    def __init__(self, scale: float = 65536.0) -> None:
        self.scale = scale
        self.good_steps = 0
        self.skipped_in_a_row = 0

    def update(self, *, finite: bool) -> None:
        """Update the scale. Call it once per step with whether the norm of the scaled gradients is finite."""
        if finite:
            self.skipped_in_a_row = 0
            self.good_steps += 1
            if self.good_steps % self.growth_interval_steps == 0:
                self.scale *= self.growth
        else:
            self.skipped_in_a_row += 1
            self.good_steps = 0
            self.scale *= self.backoff

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
