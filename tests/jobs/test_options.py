"""Options are declared once: commands and the Python API take the same, with the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

import fsdp_tune
from fsdp_tune.core.command import declared
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs import options
from fsdp_tune.jobs.plan_options import PlanOptions
from fsdp_tune.jobs.recipe_options import ImportOptions
from fsdp_tune.merge.merge_options import MergeOptions

JOBS = {
    fsdp_tune.validate: options.ValidateOptions,
    fsdp_tune.plan: PlanOptions,
    fsdp_tune.prepare: options.PrepareOptions,
    fsdp_tune.rehearse: options.RehearseOptions,
    fsdp_tune.push: options.PushOptions,
    fsdp_tune.import_recipe: ImportOptions,
}
"""Jobs that take their options as keywords."""
NO_OPTIONS = {"observer", "samples"}
"""Keywords that no command line can give, or that follow from another option."""
GROUPS = [
    *JOBS.values(),
    options.TrainOptions,
    options.EvaluateOptions,
    options.CompareOptions,
    options.SourceKeys,
    MergeOptions,
    options.Allowed,
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_job_takes_the_options_of_its_command_as_keywords(job: Callable[..., Any]) -> None:
    parameters = [
        each
        for each in inspect.signature(job).parameters.values()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    taken = {each.name: each.default for each in parameters if each.name not in NO_OPTIONS}
    assert taken == {each.name: each.default for each in fields(JOBS[job])}
    hints, declared_hints = get_type_hints(job), get_type_hints(JOBS[job])
    # A script may write a path or the name of a tool as plain text.
    wider = {name for name in taken if hints[name] not in (declared_hints[name], declared_hints[name] | str)}
    assert wider == ({"tool"} if job is fsdp_tune.import_recipe else set())


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_help_of_an_option_is_one_sentence_or_more(group: type) -> None:
    found = dict(declared(group))
    assert found
    assert [name for name, option in found.items() if not option.help.rstrip().endswith(".")] == []


def test_allowed_names_the_options_that_allow_the_same() -> None:
    assert options.Allowed(remote_code=True, variables=["A", "B"], extensions=True).options() == (
        *("--trust-remote-code", "--allow-extensions"),
        *("--allow-env", "A", "--allow-env", "B"),
    )
    assert options.Allowed().options() == ()


def test_size_and_profile_that_are_not_understood_are_usage_errors() -> None:
    readers = {
        name: option.read for group in GROUPS for name, option in declared(group) if option.read is not None
    }
    codes = {
        "max_shard_bytes": "merge-shard-size",
        "profile": "profile-not-understood",
        "rename_columns": "usage",
    }
    for name, code in codes.items():
        read = readers[name]
        assert read is not None
        with pytest.raises(FsdpTuneError) as caught:
            read(["x"] if name == "rename_columns" else "x")
        assert [problem.code for problem in caught.value.problems] == [code]
