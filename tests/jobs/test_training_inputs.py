"""What a training needs, and the problems of it."""

from __future__ import annotations

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.jobs.inspection import Inspection
from fsdp_tune.jobs.training_inputs import _required
from fsdp_tune.recipe.schema.recipe import Recipe


def test_what_a_problem_of_the_model_keeps_from_being_checked_is_no_second_problem() -> None:
    problem = Problem("model-config", "the model has no configuration")
    found = Inspection(problems=[problem], unchecked=["checks that need the complete model"])
    with pytest.raises(FsdpTuneError) as raised:
        _required(found, Recipe())
    assert raised.value.problems == (problem,)
    found.problems.clear()
    with pytest.raises(FsdpTuneError) as raised:
        _required(found, Recipe())
    assert [each.code for each in raised.value.problems] == ["model-unreachable"]
