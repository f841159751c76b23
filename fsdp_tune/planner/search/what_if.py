"""A recipe on another number of ranks (`plan --num-gpus`): which of its keys must change. Pure."""

from __future__ import annotations

from typing import Any

from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.recipe.schema.strategies import STRATEGIES
from fsdp_tune.recipe.world import WORLD_RULES, World


def machines_for(ranks: int, devices_per_machine: int) -> int:
    """Return the fewest machines that hold `ranks` devices, the same number on each."""
    return next(machines for machines in range(-(-ranks // devices_per_machine), ranks + 1) if ranks % machines == 0)


def forced_changes(recipe: Recipe, world: World) -> dict[str, Any]:
    """Return the keys that must change for `recipe` to run in `world`, with their values; {} where it runs as it is.

    The micro-batch shrinks before the global batch grows. Mesh sizes are resolved again, and a hybrid strategy that does not fit
    becomes the one without copies.
    """
    codes = {finding.code for rule in WORLD_RULES for finding in rule(recipe, world)}
    changes: dict[str, Any] = {}
    if "mesh-does-not-fit" in codes:
        changes |= _mesh(recipe, world)
    if recipe.training.global_batch_size is not None:
        changes |= _batch(recipe, recipe.training.global_batch_size, world)
    return changes


def _mesh(recipe: Recipe, world: World) -> dict[str, Any]:
    again: dict[str, Any] = {
        "parallelism.dp_replicate_size": "auto",
        "parallelism.dp_shard_size": "auto",
        "fsdp.reshard_after_forward": None,
    }
    changes = {key: value for key, value in again.items() if getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) != value}
    fits_two_copies = world.size >= 4 and world.size % 2 == 0
    if recipe.is_hybrid and not fits_two_copies:
        reshards = STRATEGIES[recipe.fsdp.sharding_strategy].reshards
        changes["fsdp.sharding_strategy"] = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
    return changes


def _batch(recipe: Recipe, wanted: int, world: World) -> dict[str, Any]:
    training = recipe.training
    if training.per_device_train_batch_tokens is not None:
        return {}  # a token budget divides any global batch
    micro = training.per_device_train_batch_size
    fitting = next((size for size in range(min(micro, wanted), 0, -1) if wanted % (size * world.size) == 0), None)
    size = fitting or min(micro, max(1, wanted // world.size))
    at_once = size * world.size
    batch = -(-wanted // at_once) * at_once
    values = {
        "training.per_device_train_batch_size": (micro, size),
        "training.global_batch_size": (wanted, batch),
        "training.gradient_accumulation_steps": (training.gradient_accumulation_steps, batch // at_once),
    }
    return {key: new for key, (old, new) in values.items() if old is not None and new != old}
