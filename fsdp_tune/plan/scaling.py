"""The same recipe on 1 to 1,024 GPUs, each with as many sequences as now."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdp_tune.plan.blend import alike, at_shards
from fsdp_tune.plan.candidates import batch_changes, changed
from fsdp_tune.plan.predict import plan
from fsdp_tune.plan.search import Search
from fsdp_tune.plan.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe

SIZES = tuple(1 << power for power in range(11))


def scaling_table(search: Search, recipe: Recipe) -> list[dict[str, Any]]:
    """One row a size: seconds of a step, tokens of all, share of the speed of as many single GPUs, memory. Machines hold as many as now,
    or as the vendor's machine does."""
    per_machine = recipe.local_world_size if recipe.launch.num_machines > 1 else search.hardware.devices_per_machine or 8
    sizes = [(size, changed(recipe, _sized(recipe, size, per_machine))) for size in SIZES]
    line = _line(search, recipe, per_machine)
    rows: list[dict[str, Any]] = []
    for size, other in sizes:
        if other is None:
            continue
        trace = _trace(search, other, line)
        if trace is None:
            continue
        made = plan(other, search.hardware, trace, efficiency=search.efficiency)
        speed = made.tokens_per_second_per_device
        rows.append(
            {
                "num_processes": size,
                "num_machines": other.launch.num_machines,
                "step_seconds": made.step_seconds,
                "tokens_per_second": None if speed is None else speed * size,
                "fits": made.fits,
                "peak_reserved_gib": made.peak_reserved_gib,
                "efficiency": None,
            }
        )
    return _with_efficiency(rows)


def _sized(recipe: Recipe, size: int, per_machine: int) -> dict[str, Any]:
    accumulation = recipe.training.gradient_accumulation_steps or 1
    machines = max(1, size // per_machine)
    batch = batch_changes(recipe.training.per_device_train_batch_size, accumulation)
    return {"launch.num_processes": size, "launch.num_machines": machines, **batch}


def _line(search: Search, recipe: Recipe, per_machine: int) -> tuple[Trace, Trace] | None:
    """Two traces that differ in the number of shards; a strategy whose shards do not grow with the world needs one for each size."""
    pair = [changed(recipe, _sized(recipe, size, per_machine)) for size in (4, 8)]
    if recipe.is_hybrid or not recipe.is_sharded or None in pair:
        return None
    few, many = search.trace([other for other in pair if other is not None])
    return (few, many) if few is not None and many is not None and alike(few, many) else None


def _trace(search: Search, other: Recipe, line: tuple[Trace, Trace] | None) -> Trace | None:
    size = other.world_size
    if line is not None:
        return at_shards(*line, size, world_size=size, replicate_size=1)
    if not other.is_sharded:
        one = search.trace([other])[0]
        return None if one is None else replace(one, shapes=replace(one.shapes, world_size=size, replicate_size=size))
    return search.trace([other])[0]


def _with_efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Against the speed per GPU of the smallest size."""
    first = rows[0]["tokens_per_second"] if rows else None
    for row in rows:
        if first and row["tokens_per_second"] is not None:
            row["efficiency"] = row["tokens_per_second"] / row["num_processes"] / (first / rows[0]["num_processes"])
    return rows
