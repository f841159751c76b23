"""The scaling table: the plan of a recipe on 1 to 1,024 GPUs, and what must change for another number of
ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fsdp_tune.core.families import expert_count
from fsdp_tune.core.topology import DATA_KEYS
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.derive import alike, at_shards
from fsdp_tune.planner.predict.predict import ScalingRow, plan
from fsdp_tune.planner.search.alternatives import batch_changes, changed
from fsdp_tune.planner.search.candidates import Search, ranks_of_machine
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.strategies import STRATEGIES
from fsdp_tune.recipe.world import WORLD_RULES, World, data_ranks, mesh_sizes

_EXPERTS = "fsdp.ep_size"
SIZES = tuple(1 << power for power in range(11))


def scaling_table(search: Search, recipe: Recipe) -> list[ScalingRow]:
    """Return one row per size: seconds of a step, tokens of all GPUs, efficiency against single GPUs, memory.

    Only full machines are used. Where the recipe fits on no size, there is no row.
    """
    rows: list[ScalingRow] = []
    for other, trace in _traced(search, recipe):
        made = plan(other, search.hardware, trace, efficiency=search.efficiency)
        speed = made.tokens_per_second_per_device
        rows.append(
            ScalingRow(
                num_processes=other.world_size,
                num_machines=other.launch.num_machines,
                step_seconds=made.step_seconds,
                tokens_per_second=None if speed is None else speed * other.world_size,
                fits=made.fits,
                peak_reserved_gib=made.peak_reserved_gib,
                efficiency=None,
            )
        )
    return _with_efficiency(rows) if any(row.fits != "no" for row in rows) else []


def _traced(search: Search, recipe: Recipe) -> Iterator[tuple[Recipe, Trace]]:
    """Yield every size with its trace. Only different programs are traced."""
    sizes = {
        size: other
        for size in sorted({*SIZES, recipe.world_size})
        if (other := _sized(search, recipe, size)) is not None
    }
    own = max(2, recipe.world_size)
    if recipe.is_sharded and not recipe.is_hybrid:
        # Shards are derived from two sizes: the recipe's own and the fewest ranks, since extrapolation far
        # beyond both is inaccurate.
        fewest = min((size for size in sizes if size > 1), default=own)
        pair = [_sized(search, recipe, size) for size in ((fewest, own) if fewest < own else (own, 2 * own))]
        traces = [
            trace and full_depth(trace)
            for trace in search.trace([other for other in pair if other is not None])
        ]
        few, many = traces if len(traces) == 2 else (None, None)
        if few is None or many is None or not alike(few, many):
            return
        if expert_count(few.facts.config) == 1:
            yield from ((other, at_shards(few, many, other.topology)) for other in sizes.values())
            return
    # Unsharded copies are equal from two ranks on. Hybrid strategies need a trace for each size, and so do
    # experts: the number of ranks decides in which dimension their stacks are sharded (`shard_dim`).
    stands_for = {size: size if recipe.is_sharded else min(size, own) for size in sizes}
    wanted = sorted(set(stands_for.values()) & sizes.keys())
    traced = dict(zip(wanted, search.trace([sizes[size] for size in wanted]), strict=True))
    for size, other in sizes.items():
        trace = traced.get(stands_for[size])
        if trace is not None:
            yield other, replace(trace, shapes=replace(trace.shapes, topology=other.topology))


def _sized(search: Search, recipe: Recipe, size: int) -> Recipe | None:
    per_machine = ranks_of_machine(recipe, search.hardware)
    if size > per_machine and size % per_machine:
        return None
    batch = batch_changes(
        recipe.training.per_device_train_batch_size, recipe.training.gradient_accumulation_steps or 1
    )
    return changed(
        recipe, {"launch.num_processes": size, "launch.num_machines": max(1, size // per_machine), **batch}
    )


def _with_efficiency(rows: list[ScalingRow]) -> list[ScalingRow]:
    """Add the efficiency relative to the speed per GPU of the smallest size."""
    first = rows[0].tokens_per_second
    if not first:
        return rows
    speed = first / rows[0].num_processes
    return [
        row
        if row.tokens_per_second is None
        else replace(row, efficiency=row.tokens_per_second / row.num_processes / speed)
        for row in rows
    ]


def machines_for(ranks: int, devices_per_machine: int) -> int:
    """Return the smallest number of machines for `ranks` devices, with the same number on each."""
    return next(
        machines for machines in range(-(-ranks // devices_per_machine), ranks + 1) if ranks % machines == 0
    )


def forced_changes(recipe: Recipe, world: World) -> dict[str, Any]:
    """Return the keys that must change for `recipe` to run in `world`, with their values; {} if none must.

    The micro-batch shrinks before the global batch grows. Mesh sizes are resolved again, and a hybrid
    strategy that does not fit becomes the one without copies. Experts are divided among as many of their
    ranks as divide a copy.
    """
    changes: dict[str, Any] = {}
    misfits = [
        finding
        for rule in WORLD_RULES
        for finding in rule(recipe, world)
        if finding.code == "mesh-does-not-fit"
    ]
    if any(finding.keys[0] != _EXPERTS for finding in misfits):
        changes |= _mesh(recipe, world)
    changes |= _experts(recipe, changes, world)
    if recipe.training.global_batch_size is not None:
        changes |= _batch(recipe, recipe.training.global_batch_size, world)
    return changes


def _mesh(recipe: Recipe, world: World) -> dict[str, Any]:
    again: dict[str, Any] = {
        **dict.fromkeys((f"parallelism.{key}" for key in DATA_KEYS), "auto"),
        "fsdp.reshard_after_forward": None,
    }
    changes = {
        key: value
        for key, value in again.items()
        if getattr(getattr(recipe, key.split(".")[0]), key.split(".")[1]) != value
    }
    fits_two_copies = world.size >= 4 and world.size % 2 == 0
    if recipe.is_hybrid and not fits_two_copies:
        reshards = STRATEGIES[recipe.fsdp.sharding_strategy].reshards
        changes["fsdp.sharding_strategy"] = "FULL_SHARD" if reshards else "SHARD_GRAD_OP"
    return changes


def _experts(recipe: Recipe, changes: dict[str, Any], world: World) -> dict[str, Any]:
    """Return the largest part of the ranks that divide the experts which divides a copy of the changed
    recipe."""
    data = recipe.model_dump(by_alias=True)
    for key, value in changes.items():
        section, name = key.split(".")
        data[section][name] = value
    size = math.gcd(recipe.fsdp.ep_size, mesh_sizes(Recipe.model_validate(data), world).topology.copy_size)
    return {_EXPERTS: size} if size != recipe.fsdp.ep_size else {}


def _batch(recipe: Recipe, wanted: int, world: World) -> dict[str, Any]:
    training = recipe.training
    if training.per_device_train_batch_tokens is not None:
        return {}  # a token budget divides any global batch
    micro, ranks = training.per_device_train_batch_size, data_ranks(recipe, world)
    fitting = next((size for size in range(min(micro, wanted), 0, -1) if wanted % (size * ranks) == 0), None)
    size = fitting or min(micro, max(1, wanted // ranks))
    at_once = size * ranks
    batch = -(-wanted // at_once) * at_once
    values = {
        "training.per_device_train_batch_size": (micro, size),
        "training.global_batch_size": (wanted, batch),
        "training.gradient_accumulation_steps": (training.gradient_accumulation_steps, batch // at_once),
    }
    return {key: new for key, (old, new) in values.items() if old is not None and new != old}
