"""Evaluation: the token-weighted loss of each set, every row once, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import SupportsFloat

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler

from fsdp_tune.core.errors import failed_error
from fsdp_tune.data.store import IGNORE_INDEX, RowStore
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.gathered import outside_step
from fsdp_tune.model.step import compute_context, micro_batch_loss, model_inputs, shift_labels
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.rows.batches import Collator, eval_batches, loader


class _Fixed(BatchSampler):
    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


Metric = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[SupportsFloat, SupportsFloat]]
"""A user's metric, called with each batch: logits [rows, tokens, vocabulary], the target of each position
[rows, tokens], and a mask of the targets that count. Returns a sum and a count, which are added up over
batches and ranks; the metric is their quotient."""


def evaluate_sets(
    recipe: Recipe,
    wrapped: nn.Module,
    sets: dict[str, RowStore],
    collator: Collator,
    device: torch.device,
    metrics: Mapping[str, Metric] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """Return `eval_loss`, `eval_perplexity` and the user's `eval_<metric>` over all sets, and
    `eval_<label>_…` of each of several sets.

    `progress` gets the number of finished batches and that of all sets. Raises: as `_quotients`, on every
    rank; what a metric raises.
    """
    metrics = metrics or {}
    batches = {label: _batches(recipe, store) for label, store in sets.items()}
    planned, finished = sum(map(len, batches.values())), count(1)

    def counted() -> None:
        if progress is not None:
            progress(next(finished), planned)

    # A run that stops may omit an evaluation, and the resumed run must still draw the same masks:
    # `outside_step` restores the generator.
    wrapped.eval()
    try:
        with outside_step(wrapped, device):
            sums = {
                label: _sums(recipe, wrapped, store, batches[label], collator, device, metrics, counted)
                for label, store in sets.items()
            }
    finally:
        wrapped.train()
    # Of several sources, only one may have held-out rows; its metrics have the names that the recipe may use.
    return _quotients(sums, [] if len(recipe.data.eval_labels) == 1 else list(sums), [*metrics, "loss"])


def _quotients(
    sums: Mapping[str, Sequence[Sequence[float]]], labels: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Return each metric over all sets and of those in `labels`, and the perplexities. `sums` has [sum,
    count] of each name, by set.

    Raises: FailedError for a set of which nothing was counted.
    """
    found: dict[str, float] = {}
    for index, name in enumerate(names):
        pairs = {label: each[index] for label, each in sums.items()}
        for label, (_, counted) in pairs.items():
            if counted == 0 and name == "loss":
                raise failed_error(
                    "eval-without-targets", f"the eval set `{label}` has no trained token, so it has no loss"
                )
            if counted == 0:
                raise failed_error(
                    "extension-failed", f"the metric `{name}` counted nothing in the eval set `{label}`"
                )
        found |= {f"eval_{label}_{name}": pairs[label][0] / pairs[label][1] for label in labels}
        found[f"eval_{name}"] = sum(total for total, _ in pairs.values()) / sum(
            counted for _, counted in pairs.values()
        )
    # A loss beyond 700 is that of no model, and its exponential is not a number of 64 bits.
    prefixes = ["eval", *(f"eval_{label}" for label in labels)]
    return {
        f"{prefix}_perplexity": math.exp(min(found[f"{prefix}_loss"], 700.0)) for prefix in prefixes
    } | found


def _batches(recipe: Recipe, store: RowStore) -> list[list[int]]:
    """Return the batches of one set that this rank reads."""
    micro_batch = recipe.training.per_device_eval_batch_size or recipe.training.per_device_train_batch_size
    topology = recipe.topology
    data_rank = topology.data_rank(dist.get_rank())
    return eval_batches(
        len(store), data_rank=data_rank, data_size=topology.data_size, micro_batch=micro_batch
    )


def _sums(
    recipe: Recipe,
    wrapped: nn.Module,
    store: RowStore,
    batches: list[list[int]],
    collator: Collator,
    device: torch.device,
    metrics: Mapping[str, Metric],
    finished: Callable[[], None],
) -> list[list[float]]:
    """Return [sum, count] of each metric and, last, of the token losses of one set, over all ranks. Calls
    `finished` after each batch."""
    loss = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    total = torch.zeros(len(metrics) + 1, 2, dtype=torch.float64)
    for batch in loader(store, _Fixed(batches), collator, workers=0, pin_memory=False):
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
        with rows_known(wrapped, tensors), compute_context(recipe, device.type):
            loss += micro_batch_loss(wrapped, tensors)[0]
            if metrics:
                total[:-1] += _metric_sums(wrapped, tensors, metrics)
        tokens += batch.supervised_tokens if recipe.topology.counts_rows(dist.get_rank()) else 0
        finished()
    total[-1] = torch.tensor([float(loss), tokens], dtype=torch.float64)
    if not recipe.topology.counts_loss(dist.get_rank()):
        total.zero_()
    dist.all_reduce(total)
    return total.tolist()


def _metric_sums(
    wrapped: nn.Module, batch: dict[str, torch.Tensor], metrics: Mapping[str, Metric]
) -> torch.Tensor:
    """Call each metric with one batch → [metrics, 2]. A forward of its own makes the logits, which that of
    the loss may not."""
    logits = wrapped(**model_inputs(batch), use_cache=False).logits
    targets = shift_labels(batch["labels"])
    pairs = [metric(logits, targets, targets != IGNORE_INDEX) for metric in metrics.values()]
    return torch.tensor([[float(total), float(count)] for total, count in pairs], dtype=torch.float64)
