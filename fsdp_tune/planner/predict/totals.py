"""Predict disk use, host memory and the number of steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_tune.planner.predict.memory import Memory
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.optimizers import optimizer_name, state_bytes
from fsdp_tune.recipe.schema.training_fields import training_value

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class DiskUse:
    checkpoint_bytes: int
    """One checkpoint: all parameters (with `lora:` those that are trained) in their storage dtype, and the optimizer state."""
    most_checkpoints: int | None
    """Most checkpoints at one time, including the one being written; None: all are kept."""
    merged_bytes: int
    cache_bytes: int | None
    """Prepared rows: 4 bytes per token id and 1 for the trained flag (`data.store`). None before the data is prepared."""


def disk(recipe: Recipe, trace: Trace, tokens: int | None) -> DiskUse:
    """Predict disk use. `tokens` is that of the prepared data, if known."""
    counts, size = trace.counts, DTYPE_BYTES[recipe.model.dtype]
    kept = recipe.training.save_total_limit
    best = 1 if training_value(recipe.training, "load_best_model_at_end") or recipe.training.early_stopping else 0
    saved_bytes = counts.parameter_bytes if recipe.lora is None else counts.trained_parameters * size
    as_wanted = counts.parameter_bytes if recipe.merge.dtype == "keep" else counts.parameters * DTYPE_BYTES[recipe.merge.dtype]
    return DiskUse(
        checkpoint_bytes=saved_bytes + _state_bytes(recipe, trace, size),
        most_checkpoints=None if kept is None else kept + best + 1,
        merged_bytes=as_wanted if recipe.merge.at_end else 0,
        cache_bytes=None if tokens is None else 5 * tokens,
    )


def _state_bytes(recipe: Recipe, trace: Trace, size: int) -> int:
    """Return the bytes of the optimizer state of all ranks. With Muon, the embedding and the head have AdamW's second moment too."""
    counts = trace.counts
    found = round(state_bytes(recipe.training, size) * counts.trained_parameters)
    if optimizer_name(recipe.training) == "muon" and recipe.lora is None:
        found += size * counts.vocabulary * counts.hidden_size * (1 if counts.tied_embeddings else 2)
    return found


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of the machine with most, without that of Python, torch and CUDA (about 1 GiB per rank or more)."""

    loading_bytes: int
    """While the weights are read: the slices of all local ranks, or the full model in each rank or in rank 0."""
    offloaded_bytes: int
    """Offloaded tensors, pinned for the full run."""
    staging_bytes: int
    """The copy of parameters and optimizer state for background saves, kept from the first on; the full state on rank 0 if it gathers."""

    @property
    def peak_bytes(self) -> int:
        return self.offloaded_bytes + max(self.loading_bytes, self.staging_bytes)


def host_memory(recipe: Recipe, trace: Trace, memory: Memory) -> HostMemory:
    local, shards = recipe.local_world_size, max(1, trace.shapes.shard_size)
    counts = trace.counts
    reads_whole = not recipe.fsdp.cpu_ram_efficient_loading or recipe.fsdp.version == 1
    if reads_whole:
        loading = counts.parameter_bytes * local
    else:
        loading = counts.parameter_bytes if recipe.model.from_config is not None else counts.parameter_bytes // shards * local
    checkpoint = disk(recipe, trace, None).checkpoint_bytes
    staging = checkpoint // shards * local if recipe.checkpoint.async_ else 0
    if recipe.fsdp.state_dict_type == "FULL_STATE_DICT":
        staging = checkpoint
    return HostMemory(loading, memory.host_bytes * local, staging)


def total_steps(recipe: Recipe, rows: int | None) -> int | None:
    """Return the optimizer steps of a run, counted as the Trainer does; None if they depend on data that is not prepared."""
    wanted = training_value(recipe.training, "max_steps")
    if isinstance(wanted, int) and wanted > 0:
        return wanted
    if rows is None:
        return None
    epochs = float(training_value(recipe.training, "num_train_epochs") or 0)
    return math.ceil(-(-rows // recipe.global_batch_size) * epochs)
