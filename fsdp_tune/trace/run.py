"""Recipe → trace: how many layers are run, and the counts of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from fsdp_tune.model.build import build_empty, config_or_facts
from fsdp_tune.model.units import plan_units
from fsdp_tune.plan.depth import DepthError, full_depth, layers_to_trace
from fsdp_tune.plan.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.trace.assemble import assemble, count, deepened, unit_list
from fsdp_tune.trace.model import period, truncated
from fsdp_tune.trace.step import run_step
from fsdp_tune.trace.world import fake_world


def trace_recipe(recipe: Recipe, *, exact: bool = False, vocabulary: int | None = None) -> Trace:
    """The trace of a resolved recipe's step on rank 0 of its world.

    `exact` runs every decoder layer; otherwise as many as `plan.depth.full_depth` needs to repeat the middle ones, unless
    it turns out that they do not repeat. FsdpTuneError (exit 2) for a model that is not found or that transformers refuses.
    """
    config, _ = config_or_facts(recipe)
    layers = int(config.num_hidden_layers)
    repeats = period(recipe, config)
    traced = layers if exact else layers_to_trace(layers, repeats, reach=_reach(recipe))
    if traced < layers:
        try:
            trace = _trace(recipe, config, traced, repeats, vocabulary)
            full_depth(trace)
            return trace
        except DepthError:
            pass  # FSDP1 works on units in another order; a model may have layers of its own at the ends
    return _trace(recipe, config, layers, repeats, vocabulary)


def _reach(recipe: Recipe) -> int:
    """How many layers ahead units are gathered."""
    backward = recipe.fsdp.backward_prefetch
    return max(1, int(recipe.fsdp.forward_prefetch), backward if isinstance(backward, int) else 1)


def _trace(recipe: Recipe, config: PreTrainedConfig, traced: int, repeats: int, vocabulary: int | None) -> Trace:
    layers = int(config.num_hidden_layers)
    shallow = truncated(config, traced) if traced != layers else config
    model = build_empty(recipe, shallow, vocabulary=vocabulary)
    groups: Sequence[tuple[str, ...]] = plan_units(recipe, model).groups if recipe.is_sharded else ()
    counts, units = count(shallow, model), unit_list(recipe, model, tuple(groups))
    if traced != layers:
        counts, units = deepened(recipe, counts, units, layers, model)
    with fake_world(recipe.world_size):
        run = run_step(recipe, shallow, vocabulary=vocabulary)
        return assemble(recipe, shallow, run, counts, units, period=repeats)
