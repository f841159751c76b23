"""Validate a recipe: everything that can be checked without GPUs, all mistakes at once."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.jobs.inspection import Inspection, inspect
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.planning import budget_of, decide, visible_gpu
from fsdp_tune.jobs.session import check_cache, resolve_recipe, session
from fsdp_tune.model.loading.model_files import check_vocabulary
from fsdp_tune.planner.search.recomputation import KEY, is_undecided
from fsdp_tune.recipe.findings import pinned
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Validation:
    """The verdict on a recipe. It is valid if there are no `problems`."""

    resolution: Resolution
    """The recipe with every key decided, and the reasons."""
    model: dict[str, Any]
    """Parameters, layers and FSDP units; empty if the model could not be built."""
    inputs: list[dict[str, Any]]
    """For each data source, its format, what is trained, and how many rows were read."""
    problems: tuple[Problem, ...]
    unchecked: tuple[str, ...]
    """What could not be checked here, one sentence each."""

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe


def validate(
    recipe: LoadedRecipe,
    *,
    strict: bool = False,
    offline: bool = False,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Validation:
    """Check the recipe's keys for this machine, its model, and the first rows of its data. Starts and writes nothing.

    `strict` counts keys that have no effect as problems. `offline` sets HF_HUB_OFFLINE for this process and lists as unchecked what
    needs the hub. Raises: FsdpTuneError if the recipe cannot be resolved; problems of model and data are in the result.
    """
    with session(recipe):
        resolution = resolve_recipe(recipe, allowed, observer, starts_ranks=True, strict=strict)
        check_cache(resolution.recipe, writes=False)
        if offline:
            os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, which is later
        found = inspect(resolution.recipe, offline=offline)
        _compare_vocabulary(resolution.recipe, found)
        resolution = _decide(resolution, found, offline=offline)
        notices = [*recipe.notices, *resolution.notices, *found.notices]
        observer.notices([notice for notice in notices if not (strict and notice.strict)])
        wrong = [Problem(each.code, each.message, each.where, each.hint) for each in notices if strict and each.strict]
        problems = tuple(pinned(problem, recipe.positions) for problem in [*found.problems, *wrong])
        return Validation(resolution, found.model, found.inputs, problems, tuple(found.unchecked))


def _compare_vocabulary(recipe: Recipe, found: Inspection) -> None:
    if found.model.get("packaged"):
        name = recipe.model.name_or_path
        found.unchecked.append(f"the files of `{name}`: the hub cannot be reached; shapes are those in the package")
    elif found.model and found.vocabulary_size is not None:
        try:
            found.notices.extend(check_vocabulary(found.model, recipe, found.vocabulary_size))
        except FsdpTuneError as error:
            found.problems.extend(error.problems)


def _decide(resolution: Resolution, found: Inspection, *, offline: bool) -> Resolution:
    """Decide keys that are left to a plan, if the model is there and this machine has the memory of the ranks."""
    recipe = resolution.recipe
    if not is_undecided(recipe) or found.problems or not found.model:
        return resolution
    budget = budget_of(recipe, visible_gpu(recipe))
    if budget is None:
        found.unchecked.append(f"`{KEY}: auto`: this machine does not have the run's memory; `fsdp-tune plan --gpu NAME` decides for a GPU")
        return resolution
    decided = decide(recipe, budget, offline=offline)
    found.notices.extend(decided.notices)
    return replace(resolution, recipe=decided.recipe, reasons=resolution.reasons | decided.reasons)
