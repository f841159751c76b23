"""Helpers that load a recipe from text and return its values or problems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.read.overrides import OptionOverride

MINIMAL = "model: {name_or_path: gpt2}\ndata: {train: [{path: some/set}]}\n"


def load(text: str, *overrides: str, options: Sequence[OptionOverride] = ()) -> LoadedRecipe:
    return parse_recipe(text, Path("recipe.yaml"), overrides, options=options)


def load_with(extra: str, *overrides: str) -> LoadedRecipe:
    """A recipe with a model and data, and `extra` after it (from line 3 on)."""
    return load(MINIMAL + extra, *overrides)


def problems(text: str, *overrides: str, options: Sequence[OptionOverride] = ()) -> tuple[Problem, ...]:
    with pytest.raises(FsdpTuneError) as caught:
        load(text, *overrides, options=options)
    assert caught.value.exit_code == 2
    return caught.value.problems


def problems_with(extra: str, *overrides: str, options: Sequence[OptionOverride] = ()) -> tuple[Problem, ...]:
    return problems(MINIMAL + extra, *overrides, options=options)


def one_problem(found: Sequence[Problem]) -> Problem:
    assert len(found) == 1, [str(problem) for problem in found]
    return found[0]
