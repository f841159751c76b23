"""Recipe → trace: how many layers are run, and the counts of the full model."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from fsdp_tune.model.attention import has_variable_lengths
from fsdp_tune.model.build import attention, config_or_facts
from fsdp_tune.model.units import plan_units
from fsdp_tune.plan.depth import DepthError, Repeated, full_depth, repeated_layers
from fsdp_tune.plan.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.trace.assemble import assemble, count, unit_list
from fsdp_tune.trace.layers import container_of, layer_signatures, shallow_recipe, without_dropped
from fsdp_tune.trace.model import build_traced
from fsdp_tune.trace.step import run_step
from fsdp_tune.trace.world import fake_world


def trace_recipe(recipe: Recipe, *, exact: bool = False, vocabulary: int | None = None) -> Trace:
    """Return the trace of a resolved recipe's step on rank 0 of its world.

    `exact` runs every decoder layer; otherwise equal layers in the middle are left out, as many as `plan.depth.full_depth` can
    repeat, unless it turns out that they do not repeat. Raises: FsdpTuneError (exit 2) for a model that is not found or that
    transformers refuses.
    """
    config, _ = config_or_facts(recipe)
    if not exact:
        try:
            trace = _trace(recipe, config, vocabulary, exact=False)
            full_depth(trace)
            return trace
        except DepthError:
            pass  # FSDP1 works on units in another order; a model may have layers of its own at the ends
    return _trace(recipe, config, vocabulary, exact=True)


def _trace(recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None, *, exact: bool) -> Trace:
    is_masked = recipe.data.packing and not has_variable_lengths(attention(recipe, config))
    recipe, model = build_traced(recipe, config, vocabulary)
    groups: Sequence[tuple[str, ...]] = plan_units(recipe, model).groups if recipe.is_sharded else ()
    counts, units = count(recipe, config, model), unit_list(recipe, model, tuple(groups))
    repeated: Repeated | None = None
    container = None if exact else container_of(recipe, model)
    if container is not None:
        repeated = repeated_layers(layer_signatures(recipe, model, groups), reach=_reach(recipe))
        if repeated is not None:
            recipe = shallow_recipe(recipe, container, repeated, model, groups)
            model = without_dropped(model, container, repeated)
    with fake_world(recipe.world_size):
        run = run_step(recipe, model, is_masked=is_masked)
        return assemble(recipe, config, run, counts, units, repeated)


def _reach(recipe: Recipe) -> int:
    """How many layers ahead units are gathered."""
    backward = recipe.fsdp.backward_prefetch
    return max(1, int(recipe.fsdp.forward_prefetch), backward if isinstance(backward, int) else 1)
