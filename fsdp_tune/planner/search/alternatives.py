"""Generate alternatives to a recipe: the same training with another layout on the same GPUs, or on another
number of ranks.

Model, data, length, dtype, global batch and schedule stay the same. Strategy, recomputation, offload,
micro-batch × accumulation, size of a copy (over machines), decoder layers as units (if the recipe has coarser
ones), and, for some targets, the ranks that share a row and the slices of the MLP vary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.topology import DATA_KEYS
from fsdp_tune.planner.predict.memory import DTYPE_BYTES
from fsdp_tune.planner.trace_format import Counts
from fsdp_tune.recipe.device_choice import ASSUMED_DEVICES
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.rules.contradictions import INPUTS, RULES
from fsdp_tune.recipe.rules.training import TOKENS_KEY
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.optimizers import state_bytes
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.strategies import STRATEGIES, ShardingStrategy
from fsdp_tune.recipe.schema.unsupported_values import refused

Changes = dict[str, Any]


LOSSES = ("full", "chunked")


CHECKPOINTING = ("none", "selective", "full")


Offload = Literal["nothing", "inputs", "parameters"]


OFFLOADS: tuple[Offload, ...] = ("nothing", "inputs", "parameters")
"""Offloaded tensors: inputs of recomputed layers, or all state. Slower, so only tried if memory is short, the
cheaper one first."""


SEQUENCE = "parallelism.sp_size"


SLICES = "kernels.mlp_slice_tokens"


MLP_SLICES = (16384, 4096)
"""Tokens of a slice of the MLP. Smaller slices save nothing: other tensors are the peak
(docs/guide/long-rows.md)."""


BATCH = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")


def changed(recipe: Recipe, changes: Changes) -> Recipe | None:
    """Return a resolved recipe with other values, and dependent keys resolved again; None if it is
    contradictory or unsupported."""
    data = recipe.model_dump(by_alias=True)
    for key, value in changes.items():
        section, name = key.split(".")
        data[section] = (data[section] or {}) | {name: value}
    if SEQUENCE in changes:  # a rule would refuse the padding that was resolved for another number
        data["data"]["pad_to_multiple_of"] = math.lcm(data["data"]["pad_to_multiple_of"], changes[SEQUENCE])
    if changes.keys() & {"fsdp.sharding_strategy", "launch.num_processes", SEQUENCE}:
        for key in DATA_KEYS:
            data["parallelism"][key] = changes.get(f"parallelism.{key}", "auto")
        data["fsdp"]["reshard_after_forward"] = None
    if "training.gradient_accumulation_steps" in changes and "training.global_batch_size" not in changes:
        data["training"]["global_batch_size"] = None
        # A plan assumes rows of `max_length`, so a token budget has no effect.
        data["training"]["per_device_train_batch_tokens"] = None
    wanted = Recipe.model_validate(data)
    if is_refused(wanted):
        return None
    machine = Machine(wanted.launch.device, wanted.world_size, 1, None)
    try:
        return resolve(wanted, machine, cwd=Path.cwd(), assume=wanted.launch.device).recipe
    except FsdpTuneError:
        return None  # a mesh or a batch that does not divide


def is_refused(recipe: Recipe) -> bool:
    """Return whether the recipe is contradictory or unsupported, other than by inputs that only a run
    needs."""
    return bool(refused(recipe)) or any(found.code not in INPUTS for rule in RULES for found in rule(recipe))


def differences(recipe: Recipe, other: Recipe) -> Changes:
    """Return the searched keys in which two resolved recipes differ, with the values of `other`."""
    keys = [
        "fsdp.sharding_strategy",
        "fsdp.reshard_after_backward",
        "fsdp.activation_checkpointing",
        "fsdp.activation_checkpointing_offload",
        "fsdp.offload_params",
        "fsdp.auto_wrap_policy",
        "kernels.loss",
        SLICES,
        SEQUENCE,
        *BATCH,
        "data.max_length",
        "launch.num_processes",
        "launch.num_machines",
    ]
    found = {key: value_of(other, key) for key in keys if value_of(other, key) != value_of(recipe, key)}
    if other.is_hybrid and other.parallelism.dp_shard_size != recipe.parallelism.dp_shard_size:
        found["parallelism.dp_shard_size"] = other.parallelism.dp_shard_size
    budget, slots = (
        recipe.training.per_device_train_batch_tokens,
        other.training.per_device_train_batch_size * other.data.max_length,
    )
    if budget is not None:
        found = {key: value for key, value in found.items() if key not in BATCH}
        return found | ({TOKENS_KEY: slots} if slots != budget else {})
    return found


def layouts(recipe: Recipe, *, offload: Offload) -> Iterator[Changes]:
    """Yield strategy and recomputation, fast ones first. State is offloaded only if sharded, inputs only with
    full recomputation."""
    # Copies on one machine do not avoid a slower link.
    names: list[ShardingStrategy] = [
        name for name, row in STRATEGIES.items() if recipe.launch.num_machines > 1 or not row.is_hybrid
    ]
    if recipe.world_size == 1:
        names = [recipe.fsdp.sharding_strategy]
    for strategy in names:
        if offload == "parameters" and not STRATEGIES[strategy].is_sharded:
            continue
        for checkpointing in ("full",) if offload == "inputs" else CHECKPOINTING:
            changes = layout(recipe, strategy, checkpointing) | {
                "fsdp.offload_params": offload == "parameters"
            }
            changes["fsdp.activation_checkpointing_offload"] = offload == "inputs"
            # `auto` depends on the number of tokens, so both are tried; the chunked loss only with more than
            # one slice.
            for loss in LOSSES if recipe.kernels.loss == "auto" else (recipe.kernels.loss,):
                yield changes | {"kernels.loss": loss}


def layout(recipe: Recipe, strategy: str, checkpointing: str) -> Changes:
    """Return the changes to a strategy and a kind of recomputation, with nothing offloaded and decoder layers
    as units."""
    changes: Changes = {"fsdp.sharding_strategy": strategy, "fsdp.activation_checkpointing": checkpointing}
    changes["fsdp.reshard_after_backward"] = True
    changes |= {"fsdp.activation_checkpointing_offload": False, "fsdp.offload_params": False}
    return changes | (
        {"fsdp.auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
        if recipe.fsdp.auto_wrap_policy == "NO_WRAP"
        else {}
    )


def fewer_gathers(recipe: Recipe) -> Changes | None:
    """Return the changes to a layout with parameters that stay gathered between micro-batches; None where
    that is refused or changes nothing."""
    fsdp = recipe.fsdp
    has_effect = recipe.is_sharded and fsdp.version == 2 and recipe.training.gradient_accumulation_steps != 1
    if not has_effect or fsdp.offload_params or fsdp.reshard_after_backward is False:
        return None
    inputs = {
        "fsdp.activation_checkpointing_offload": fsdp.activation_checkpointing_offload,
        "kernels.loss": recipe.kernels.loss,
    }
    return (
        layout(recipe, fsdp.sharding_strategy, fsdp.activation_checkpointing)
        | inputs
        | {"fsdp.reshard_after_backward": False}
    )


def sequence_sizes(recipe: Recipe, heads: int, ranks: int) -> list[int]:
    """Return each number of neighbouring ranks that can share a row, of `ranks` at most: it divides the
    attention heads, and the global batch has a row for every group."""
    sizes = [size for size in range(1, ranks + 1) if recipe.world_size % size == 0 and heads % size == 0]
    return [size for size in sizes if recipe.global_batch_size % (recipe.world_size // size) == 0]


def with_shared_rows(recipe: Recipe, size: int) -> Recipe | None:
    """Return the recipe with `size` ranks a row, one row a forward and the same global batch."""
    return changed(recipe, {SEQUENCE: size, **same_global_batch(recipe)})


def same_global_batch(recipe: Recipe) -> Changes:
    """Return the changes that keep the global batch on other numbers of ranks with rows of their own, by
    other accumulation."""
    return {"training.global_batch_size": recipe.global_batch_size, **batch_changes(1, None)}


def micro_batches(recipe: Recipe) -> list[tuple[int, int]]:
    """Return each (micro-batch, accumulation) of the recipe's global batch, small micro-batches first, with
    at most 64 sequences."""
    each = recipe.global_batch_size // recipe.data_size
    return [(size, each // size) for size in range(1, min(each, 64) + 1) if each % size == 0]


def batch_changes(micro_batch: int, accumulation: int | None) -> Changes:
    return {BATCH[0]: micro_batch, BATCH[1]: accumulation}


def least_state_bytes(recipe: Recipe, counts: Counts) -> float:
    """Return the bytes of a device's share of parameters, gradients and optimizer state, a lower bound
    without activations."""
    if recipe.fsdp.offload_params:
        return 0.0
    size = DTYPE_BYTES[recipe.model.dtype]
    total = counts.parameter_bytes + (size + state_bytes(recipe.training, size)) * counts.trained_parameters
    return total / (recipe.topology.copy_size if recipe.is_sharded else 1)


def devices_of_machine(hardware: Hardware) -> int:
    """Return the number of devices of the vendor's machine, or the assumed number if unknown."""
    return hardware.devices_per_machine or ASSUMED_DEVICES
