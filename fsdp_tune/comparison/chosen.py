"""Which parameters patterns of names choose: those that are trained, each with its learning rate and weight
decay.

The stages are computed with a small model, in which a pattern may match other parameters; this is of the
model in its own size.
"""

from __future__ import annotations

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.optim.optimizer import options_by_parameter
from fsdp_tune.model.shard.local import decayed_names
from fsdp_tune.recipe.schema.recipe import Recipe


def chosen_parameters(recipe: Recipe) -> dict[str, object]:
    """Return the options of each trained parameter by name, without memory for weights; {} if the model
    cannot be built."""
    try:
        model = build_empty(recipe, model_config(recipe))
    except FsdpTuneError:  # then no key is shown to make no difference
        return {}
    return {**options_by_parameter(recipe, model, decayed_names(model))}
