"""The least hardware for a recipe that does not fit: larger GPUs, or more of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_tune.core.gpus import known_hardware
from fsdp_tune.planner.predict.memory import fit
from fsdp_tune.planner.predict.predict import SmallestHardware
from fsdp_tune.planner.search.alternatives import batch_changes, changed, differences
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search, ranks_of_machine
from fsdp_tune.recipe.rules.limits import computes_in_fp8
from fsdp_tune.recipe.schema.recipe import Recipe

MOST_DEVICES = 1024


def smallest_hardware(
    search: Search, base: Recipe, ranked: Sequence[PlannedRecipe]
) -> SmallestHardware | None:
    """Return hardware for a recipe that does not fit: as many larger GPUs, else more of the same; None if
    1,024 are not enough."""
    leanest = min(
        (each.recipe for each in ranked),
        key=lambda recipe: recipe.training.per_device_train_batch_size,
        default=base,
    )
    nothing = {"fsdp.activation_checkpointing_offload": False, "fsdp.offload_params": False}
    lean = changed(
        leanest, {"fsdp.sharding_strategy": "FULL_SHARD", "fsdp.activation_checkpointing": "full", **nothing}
    )
    one = lean and changed(lean, batch_changes(1, base.global_batch_size // base.data_size))
    traced = next(search.trace([one])) if one else None
    if one is None or traced is None:
        return None
    larger = sorted(known_hardware().values(), key=lambda gpu: gpu.usable_bytes)
    multiplies_in = "fp8" if computes_in_fp8(one) else one.compute_dtype
    for gpu in (
        gpu
        for gpu in larger
        if gpu.usable_bytes > search.hardware.usable_bytes and gpu.peak_flops(multiplies_in)
    ):
        if fit(traced, gpu).answer == "yes":
            return SmallestHardware(gpu.name, base.world_size, differences(base, one))
    return _more(search, base, one)


def _more(search: Search, base: Recipe, one: Recipe) -> SmallestHardware | None:
    number = base.world_size * 2
    while number <= MOST_DEVICES:
        machines = max(1, -(-number // ranks_of_machine(base, search.hardware)))
        batch = batch_changes(1, max(1, base.global_batch_size * base.topology.row_size // number))
        other = changed(one, {"launch.num_processes": number, "launch.num_machines": machines, **batch})
        traced = next(search.trace([other])) if other else None
        if other is not None and traced is not None and search.fit(traced).answer == "yes":
            return SmallestHardware(search.hardware.name, number, differences(base, other))
        number *= 2
    return None
