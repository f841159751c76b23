"""Trace a recipe: choose the layers to run, run the step in a fake process group, and count the full
model."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from fsdp_tune.model.loading.construct import attention
from fsdp_tune.model.loading.model_config import config_or_facts
from fsdp_tune.model.shard.fsdp_units import UnitPlan, plan_units
from fsdp_tune.planner.predict.depth import DepthError, Repeated, full_depth, repeated_layers
from fsdp_tune.planner.predict.mixture import with_ep_size
from fsdp_tune.planner.trace.assemble import assemble, count, unit_list
from fsdp_tune.planner.trace.fake_world import fake_world
from fsdp_tune.planner.trace.traced_model import (
    build_traced,
    container_of,
    has_unit_of_several_layers,
    layer_signatures,
    shallow_recipe,
    without_dropped,
)
from fsdp_tune.planner.trace.traced_step import run_step
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe


def trace_recipe(recipe: Recipe, *, exact: bool = False, vocabulary: int | None = None) -> Trace:
    """Return the trace of a resolved recipe's step on rank 0 of its world.

    `exact` runs every decoder layer. Otherwise equal layers in the middle are left out, as many as
    `planner.predict.depth.full_depth` can restore; all are run if they turn out not to repeat. Raises:
    FsdpTuneError (exit 2) for a model that is not found or that transformers rejects.
    """
    config, _ = config_or_facts(recipe)
    if not exact:
        try:
            trace = _trace(recipe, config, vocabulary, exact=False)
            full_depth(trace)
            return trace
        except DepthError:
            pass  # FSDP1 processes units in another order; a model may have other layers at its ends
    return _trace(recipe, config, vocabulary, exact=True)


def _trace(recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None, *, exact: bool) -> Trace:
    flash_version = 3 if recipe.model.attn_implementation == "flash_attention_3" else 2
    kernel, ep = attention(recipe, config), recipe.fsdp.ep_size
    recipe, model = build_traced(recipe, config, vocabulary)
    plan = plan_units(recipe, model) if recipe.is_sharded else UnitPlan((), frozenset())
    groups = plan.groups
    counts, units = count(recipe, config, model), unit_list(recipe, model, plan)
    repeated: Repeated | None = None
    container = None if exact else container_of(recipe, model)
    # The unit of the holder grows with the number of layers.
    if (
        container is not None
        and plan.holder is None
        and not has_unit_of_several_layers(recipe, model, groups)
    ):
        repeated = repeated_layers(layer_signatures(recipe, model, groups), reach=_reach(recipe))
        if repeated is not None:
            recipe = shallow_recipe(recipe, container, repeated, model, groups)
            model = without_dropped(model, container, repeated)
    with fake_world(recipe.world_size):
        run = run_step(recipe, model, kernel=kernel)
        trace = assemble(recipe, config, run, counts, units, repeated)
    return with_ep_size(replace(trace, facts=replace(trace.facts, flash_version=flash_version)), ep)


def _reach(recipe: Recipe) -> int:
    """Return how many layers ahead units are gathered."""
    backward = recipe.fsdp.backward_prefetch
    return max(1, int(recipe.fsdp.forward_prefetch), backward if isinstance(backward, int) else 1)
