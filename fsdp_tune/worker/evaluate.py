"""Evaluation: the token-weighted loss of each set, every row once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler

from fsdp_tune.core.errors import failed_error
from fsdp_tune.data.store import RowStore
from fsdp_tune.model.loss import micro_batch_loss
from fsdp_tune.model.shard.gathering import outside_step
from fsdp_tune.model.step import compute_context
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.worker.dataset import Collator, eval_batches, loader


class _Fixed(BatchSampler):
    def __init__(self, batches: list[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


def evaluate_sets(
    recipe: Recipe, wrapped: nn.Module, sets: dict[str, RowStore], collator: Collator, device: torch.device
) -> dict[str, float]:
    """`eval_loss` over the tokens of all sets, and `eval_<label>_loss` of each where there are several."""
    wrapped.eval()
    # A run that stops may omit an evaluation, and the resumed run must still draw the same masks: `outside_step` restores the generator.
    with outside_step(wrapped, device):
        sums = {label: _sums(recipe, wrapped, store, collator, device) for label, store in sets.items()}
    wrapped.train()
    for label, (_, tokens) in sums.items():
        if tokens == 0:
            raise failed_error("eval-without-targets", f"the eval set `{label}` has no supervised token, so it has no loss")
    metrics = {f"eval_{label}_loss": loss / tokens for label, (loss, tokens) in sums.items() if len(sums) > 1}
    metrics["eval_loss"] = sum(loss for loss, _ in sums.values()) / sum(tokens for _, tokens in sums.values())
    return metrics


def _sums(recipe: Recipe, wrapped: nn.Module, store: RowStore, collator: Collator, device: torch.device) -> tuple[float, float]:
    """(sum of token losses, supervised tokens) of one set over all ranks."""
    micro_batch = recipe.training.per_device_eval_batch_size or recipe.training.per_device_train_batch_size
    topology = recipe.topology
    data_rank = topology.data_rank(dist.get_rank())
    batches = eval_batches(len(store), data_rank=data_rank, data_size=topology.data_size, micro_batch=micro_batch)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    for batch in loader(store, _Fixed(batches), collator, workers=0, pin_memory=False):
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
        with compute_context(recipe, device.type):
            loss += micro_batch_loss(wrapped, tensors)[0]
        tokens += batch.supervised_tokens
    total = torch.tensor([float(loss), tokens], dtype=torch.float64)
    dist.all_reduce(total)
    return total[0].item(), total[1].item()
