"""How much has to be recomputed for a recipe to fit: what `fsdp.activation_checkpointing: auto` stands for."""

from __future__ import annotations

from fsdp_tune.plan.candidates import CHECKPOINTING, changed
from fsdp_tune.plan.search import Found, Search
from fsdp_tune.recipe.schema import Recipe


def least_recomputation(search: Search, recipe: Recipe) -> Found | None:
    """Of none, selective and full the first that fits, with its plan; where none does, the leanest.

    `recipe` is resolved, whatever its own setting. None where the model cannot be traced.
    """
    wanted = [other for kind in CHECKPOINTING if (other := changed(recipe, {"fsdp.activation_checkpointing": kind})) is not None]
    found = [search.price(other, trace, recipe) for other, trace in zip(wanted, search.trace(wanted), strict=True) if trace is not None]
    fitting = [each for each in found if each.plan.fits == "yes"]
    return next(iter(fitting), None) or min(found, key=lambda each: each.plan.device_gib, default=None)
