"""Plan LoRA and QLoRA for a recipe that does not fit. They train another model, so nothing applies them.
Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_tune.planner.search.alternatives import Changes, batch_changes, changed
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search, any_fits
from fsdp_tune.recipe.schema.recipe import Recipe

LORA: Changes = {"lora.target_modules": "all-linear"}
NF4: Changes = {"quantization.load": "nf4"}


def other_trainings(search: Search, base: Recipe) -> list[PlannedRecipe]:
    """Plan LoRA and QLoRA for a recipe that does not fit, QLoRA alone if it has adapters, nothing if it is
    quantised: other trainings.

    Each has one sequence a forward and recomputes all layers. Parameters are offloaded only if neither fits
    without.
    """
    trainings = (
        [] if base.quantization is not None else [NF4] if base.lora is not None else [LORA, LORA | NF4]
    )
    found: list[PlannedRecipe] = []
    for offload in (False, True):
        found = list(_trainings(search, base, trainings, offload=offload))
        if any_fits(found):
            break
    return found


def _trainings(
    search: Search, base: Recipe, trainings: list[Changes], *, offload: bool
) -> Iterator[PlannedRecipe]:
    layout: Changes = {"fsdp.activation_checkpointing": "full", "fsdp.offload_params": offload}
    if base.world_size > 1:
        layout["fsdp.sharding_strategy"] = "FULL_SHARD"
    for keys in trainings:
        recipe = changed(base, keys | layout | batch_changes(1, base.global_batch_size // base.data_size))
        trace = next(search.trace([recipe])) if recipe is not None else None
        if recipe is not None and trace is not None:
            search.progress(adapter_method(keys))
            made = search.price(recipe, trace, base)
            yield PlannedRecipe(recipe, replace(made.plan, recipe_changes=keys | made.plan.recipe_changes))


def adapter_method(changes: Changes) -> str:
    return "QLoRA" if NF4.keys() <= changes.keys() else "LoRA"
