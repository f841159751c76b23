"""The token-weighted loss: every supervised token of a step has the same weight, regardless of its rank and micro-batch.

A step's loss is `sum of token losses / number of supervised tokens`, both over all ranks and micro-batches. Averages of
averages (per micro-batch, per rank) give tokens of short rows more weight: transformers#34191 and later issues.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from fsdp_tune.core.families import BALANCE_WEIGHTS
from fsdp_tune.data.store import IGNORE_INDEX
from fsdp_tune.model.experts import examples_alone
from fsdp_tune.model.kernels.head import loss_kernel_of
from fsdp_tune.model.sequence_parallel import shared_rows


def shift_labels(labels: torch.Tensor) -> torch.Tensor:
    """Return labels [batch, tokens] shifted to the positions of the logits: position t predicts token t + 1."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:].contiguous()


def supervised_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return the number of targets (scalar int64); the first token of a row is never one."""
    return (labels[..., 1:] != IGNORE_INDEX).sum()


def token_losses(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0, *, reduction: str = "none") -> torch.Tensor:
    """Return the cross-entropy of each token, zero where it is not trained, in fp32 (nats): [batch × tokens], or its sum.

    `logits` [batch, tokens, vocabulary] in any float dtype, `targets` (`shift_labels`) [batch, tokens] with -100 where not trained.
    """
    return F.cross_entropy(
        logits.float().view(-1, logits.shape[-1]),
        targets.view(-1),
        ignore_index=IGNORE_INDEX,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


def summed_token_loss(logits: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the sum of `token_losses`. Zero, with a gradient of zero, if no token is trained."""
    return token_losses(logits, targets, label_smoothing, reduction="sum")


_NOT_OF_THE_MODEL = ("labels", "cu_seq_lens", "example_ids", "example_lengths", "source_ids")


def model_inputs(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the entries of a batch for a model's forward; of rows that a sequence group shares, with this rank's tokens.

    `cu_seq_lens` [examples + 1] int32, if present, gives variable-length kernels the ends of examples in the flattened batch; without it
    they use position ids, which works for a single row only.
    """
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name not in _NOT_OF_THE_MODEL}
    if (ends := batch.get("cu_seq_lens")) is not None:
        # The length of the longest example is only on the device; the kernels accept an upper bound.
        longest = batch["input_ids"].shape[1]
        inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    if (rows := shared_rows()) is not None:  # with positions always, since a rank's tokens do not start at 0
        inputs |= {"input_ids": rows.own_tokens(inputs["input_ids"]), "position_ids": rows.own_tokens(rows.position_ids)}
    return inputs


def micro_batch_loss(
    model: torch.nn.Module,
    batch: dict[str, torch.Tensor],
    label_smoothing: float = 0.0,
    gradient_scale: float = 1.0,
    source_losses: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one forward and return (summed loss in fp32, auxiliary loss or zero).

    `batch` has input_ids, labels and optionally position_ids and cu_seq_lens. With example_ids and example_lengths, the
    auxiliary loss is that of each example times its tokens, summed (`summed_balance`); otherwise the model's own, of the batch.
    `gradient_scale` is the factor by which the caller multiplies the summed loss before the backward. With `source_losses`, fp64
    [sources], the token losses are also added to it by source, if the batch has `source_ids` [batch, tokens].
    """
    inputs, targets = model_inputs(batch), shift_labels(batch["labels"])
    ids = None if source_losses is None or "source_ids" not in batch else shift_labels(batch["source_ids"])
    if (rows := shared_rows()) is not None:
        targets = rows.own_tokens(targets)  # after the shift: the last target of a rank is the first token of the next rank
        ids = None if ids is None else rows.own_tokens(ids)
    of_tokens: torch.Tensor | None = None
    with examples_alone(model, batch):
        if loss_kernel_of(model) == "full":
            outputs: Any = model(**inputs, use_cache=False)
            if ids is None:
                loss = summed_token_loss(outputs.logits, targets, label_smoothing)
            else:
                of_tokens = token_losses(outputs.logits, targets, label_smoothing)
                loss = of_tokens.sum()
            auxiliary = getattr(outputs, "aux_loss", None)
        else:
            options = {"targets": targets, "label_smoothing": label_smoothing, "gradient_scale": gradient_scale}
            loss, auxiliary, of_tokens = model(**inputs, use_cache=False, **options, keeps_token_losses=ids is not None)
    if source_losses is not None and ids is not None and of_tokens is not None:
        _add_by_source(source_losses, of_tokens.detach(), ids.view(-1))
    return loss, auxiliary if isinstance(auxiliary, torch.Tensor) else torch.zeros_like(loss)


def _add_by_source(source_losses: torch.Tensor, of_tokens: torch.Tensor, ids: torch.Tensor) -> None:
    """Add the losses of each source's tokens. In a fixed order, where `index_add_` on a GPU adds in any."""
    sources = torch.arange(len(source_losses), device=ids.device).unsqueeze(1)
    source_losses += torch.where(ids == sources, of_tokens, 0.0).sum(1, dtype=source_losses.dtype)


def auxiliary_loss_weight(model: PreTrainedModel) -> float:
    """Return the coefficient of the load-balancing loss; zero if `output_router_logits` is off in the configuration."""
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    return next((float(getattr(model, name)) for name in BALANCE_WEIGHTS if hasattr(model, name)), 0.0)
