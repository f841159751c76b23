"""What may explain a difference between two runs whose recipes were not computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.comparison.causes import DifferentKey
from fsdp_tune.comparison.stages import ComparedStage
from fsdp_tune.jobs import compared_runs
from fsdp_tune.jobs.compare_answer import FirstDifference
from fsdp_tune.jobs.compared_runs import cause_not_shown
from fsdp_tune.run.base_model import BaseModel
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Environment

KEYS = (
    "data.max_length",
    "data.eval",
    "training.seed",
    "training.learning_rate",
    "training.global_batch_size",
    "model.dtype",
    "merge.dtype",
)


def different(*names: str) -> list[DifferentKey]:
    return [DifferentKey(name, 1, 2, changes_numbers=True, affects=[], meaning="") for name in names]


def difference(stage: str, place: str) -> FirstDifference:
    return FirstDifference(stage=stage, place=place, a="1", b="2")


@pytest.mark.parametrize(
    ("stage", "place", "equal", "kept"),
    [
        ("data", "row 1", (), {"data.max_length", "data.eval", "training.seed"}),
        (
            "steps",
            "step 3, tokens",
            (),
            {"data.max_length", "data.eval", "training.seed", "training.global_batch_size"},
        ),
        ("base", "weights", ("data", "data_order"), {"model.dtype"}),
        ("steps", "step 3, learning_rate", ("data", "data_order"), {"training.learning_rate"}),
        ("steps", "step 3, loss", (), set(KEYS) - {"merge.dtype"}),
        (
            "steps",
            "step 3, loss",
            ("data", "data_order"),
            {"training.seed", "training.learning_rate", "training.global_batch_size", "model.dtype"},
        ),
        (
            "evaluations",
            "step 3, eval_loss",
            ("data", "data_order", "steps"),
            {
                "data.eval",
                "training.learning_rate",
                "training.global_batch_size",
                "model.dtype",
                "merge.dtype",
            },
        ),
    ],
)
def test_keys_that_may_cause_a_difference_affect_what_differs_and_nothing_that_is_equal(
    stage: str, place: str, equal: tuple[str, ...], kept: set[str]
) -> None:
    stages = [ComparedStage(name, name, "equal") for name in equal]
    cause = cause_not_shown(difference(stage, place), different(*KEYS), {"torch": ["1", "2"]}, stages)
    assert {key.key for key in cause.keys} == kept
    assert not cause.is_shown
    assert all(f"`{name}`" in cause.text for name in kept)


@pytest.mark.parametrize(
    ("stage", "place", "environment", "words"),
    [
        ("data", "row 1", True, "the files of the data or the tokenizer changed"),
        ("base", "weights", True, "its weight files, or the commit of its branch, changed"),
        ("steps", "step 3, learning_rate", True, "one of the runs was continued with another one"),
        ("steps", "step 3, loss", True, "the environments differ: torch; not compared: the order of rows"),
        (
            "steps",
            "step 3, loss",
            False,
            "not found: recipes and environments are equal; not compared: the order of rows",
        ),
    ],
)
def test_difference_of_equal_recipes_is_of_files_or_environments(
    stage: str, place: str, environment: bool, words: str
) -> None:
    stages = [
        ComparedStage("data_order", "the order of rows", "not_compared", "unknown"),
        ComparedStage("steps", "the steps", "not_compared", "unknown"),
    ]
    versions: dict[str, list[str | None]] = {"torch": ["1", "2"]} if environment else {}
    cause = cause_not_shown(difference(stage, place), different("merge.dtype"), versions, stages)
    assert cause.keys == []
    assert words in cause.text


def run_on(folder: Path, base: str | None, adapter_base: str | None = None) -> RunDir:
    run = RunDir(folder)
    run.model.mkdir(parents=True)
    Environment(base=base).write(run.environment_json)
    if adapter_base is not None:
        BaseModel("there", digest=adapter_base).write(run.base_json)
    return run


@pytest.mark.parametrize(
    ("a", "b", "status", "detail"),
    [
        (("gpt2@abc",), ("gpt2@abc",), "equal", None),
        (("blake2b:1",), ("blake2b:2",), "different", None),
        (("gpt2@abc",), ("blake2b:2",), "not_compared", "one of the hub and one of a directory"),
        ((None, "blake2b:1"), ("blake2b:1",), "equal", None),
        ((None, "blake2b:1"), (None, "blake2b:2"), "different", None),
        ((None,), ("blake2b:1",), "not_compared", ""),
    ],
)
def test_bases_are_compared_by_what_the_runs_recorded_of_their_weights(
    tmp_path: Path, a: tuple[str | None, ...], b: tuple[str | None, ...], status: str, detail: str | None
) -> None:
    """A run of an earlier version has the base of its adapter alone."""
    stage = compared_runs._compare_bases(run_on(tmp_path / "a", *a), run_on(tmp_path / "b", *b))
    assert stage.status == status
    assert detail is None or detail in str(stage.detail)
    assert (stage.difference is not None) is (status == "different")
