"""Find the first non-finite value: repeat the forward of the step and check the output of every module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.loss import micro_batch_loss
from fsdp_tune.model.sequence_parallel import rows_known
from fsdp_tune.model.shard.gathering import outside_step
from fsdp_tune.model.step import compute_context
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.worker.agreement import gather
from fsdp_tune.worker.rows.dataset import Batch
from fsdp_tune.worker.rows.training_rows import TrainingRows


def first_bad_module(recipe: Recipe, loaded: Loaded, batch: Batch, device: torch.device) -> str | None:
    """Name of the first module, in the order of the forward, whose output has a NaN or an infinity; collective under FSDP."""
    bad: list[str] = []

    def watch(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            if not bad and any(t.is_floating_point() and not bool(torch.isfinite(t).all()) for t in _tensors(output)):
                bad.append(name)

        return hook

    # Leaves before their parents: report the innermost module.
    handles = [module.register_forward_hook(watch(name)) for name, module in loaded.model.named_modules() if name]
    try:
        tensors = {name: tensor.to(device) for name, tensor in batch.tensors.items()}
        with outside_step(loaded.wrapped, device), rows_known(loaded.wrapped, tensors), compute_context(recipe, device.type):
            micro_batch_loss(loaded.wrapped, tensors)  # as in the step: full logits may not fit
    finally:
        for handle in handles:
            handle.remove()
    return bad[0] if bad else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for inner in value for t in _tensors(inner)] if isinstance(value, list | tuple) else []


def describe(recipe: Recipe, loaded: Loaded, batches: list[Batch], rows: TrainingRows, device: torch.device) -> str:
    """Return one sentence for all ranks: module, rank and rows, or that only the backward pass is not finite."""
    mine: list[str] = []
    for number, batch in enumerate(batches):
        module = first_bad_module(recipe, loaded, batch, device)
        if module is not None:
            mine.append(f"micro-batch {number + 1}, {rows.describe(batch)}: the output of `{module}` is the first that is not finite")
    found = [(rank, text) for rank, texts in enumerate(gather(mine)) for text in texts]
    if found:
        more = f" (and {len(found) - 1} more micro-batches)" if len(found) > 1 else ""
        return f"rank {found[0][0]}, {found[0][1]}{more}"
    mine = [rows.describe(batch) for batch in batches]
    everything = "; ".join(f"rank {rank}: {', '.join(texts)}" for rank, texts in enumerate(gather(mine)))
    return f"every module's output is finite, so it arose in the backward; the step's rows: {everything}"
