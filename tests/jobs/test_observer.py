"""The result of a training in Python, the answers of its machines, and stop signals."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGINT, SIGTERM, SIGUSR1
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Where, usage_error
from fsdp_tune.core.signals import StoppedBySignal, stop_signals_raise
from fsdp_tune.jobs.observer import Observer, TrainResult, session
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import Checkpoint, RunDir
from fsdp_tune.run.manifest import Manifest
from tests.launch.recipes import BASE


def result(reason: ExitReason = ExitReason.FINISHED, **changes: Any) -> TrainResult:
    return TrainResult(RunDir(Path("/runs/a")), Recipe(), reason, **changes)


def test_answer_of_the_first_machine_has_what_its_first_rank_reported() -> None:
    checkpoint = Checkpoint(Path("/runs/a/checkpoint-9"), 9, Manifest("k", {}))
    outcome = {"loss": 1.5, "eval_loss": 1.75, "tokens": 100, "seconds": 2.5, "gradient_norm": 1.0}
    found = result(step=9, outcome=outcome, checkpoint=checkpoint, merged=Path("/runs/a/merged"), pushed="u")
    assert found.as_dict() == {
        "run_dir": "/runs/a",
        "steps": 9,
        "loss": 1.5,
        "eval_loss": 1.75,
        "checkpoint": "/runs/a/checkpoint-9",
        "merged": "/runs/a/merged",
        "pushed": "u",
        "tokens": 100,
        "seconds": 2.5,
        "exit_reason": "finished",
    }
    assert found.metrics == Path("/runs/a/metrics.jsonl")
    assert {name for name, value in result().as_dict().items() if value is None} == {
        *("loss", "eval_loss", "checkpoint", "merged", "pushed", "tokens", "seconds")
    }


def test_answer_of_another_machine_has_its_number_and_no_figures() -> None:
    found = result(ExitReason.PREEMPTED, machine_rank=1, step=9, outcome={"loss": 1.5})
    assert found.as_dict() == {"run_dir": "/runs/a", "machine_rank": 1, "exit_reason": "preempted"}


@pytest.mark.parametrize(
    ("reason", "number", "code"),
    [
        (ExitReason.FINISHED, None, None),
        (ExitReason.FINISHED, SIGINT, ExitCode.INTERRUPTED),
        (ExitReason.FINISHED, SIGTERM, ExitCode.PREEMPTED),
        (ExitReason.FINISHED, SIGUSR1, ExitCode.PREEMPTED),
        (ExitReason.MAX_RUNTIME, None, ExitCode.PREEMPTED),
        (ExitReason.INTERRUPTED, SIGINT, ExitCode.INTERRUPTED),
        (ExitReason.FAILED, SIGTERM, None),
        (ExitReason.OUT_OF_MEMORY, None, None),
    ],
)
def test_request_to_stop_ends_what_starts_one_run_after_another(
    reason: ExitReason, number: int | None, code: ExitCode | None
) -> None:
    """A run may finish although it was asked to stop."""
    assert result(reason, signal=number).stop_code == code


def test_error_that_names_a_key_gets_its_line_in_the_recipe(tmp_path: Path) -> None:
    loaded = parse_recipe(BASE.replace("data: {", "data: {\n  "), tmp_path / "a.yaml")
    refused = usage_error("too-long", "it is too long", where=Where(key="data.max_length"))
    with pytest.raises(FsdpTuneError) as caught, session(loaded):
        raise refused
    (problem,) = caught.value.problems
    assert (problem.where.source, problem.where.line) == (str(tmp_path / "a.yaml"), 4), (
        "after a line without text"
    )
    with pytest.raises(FsdpTuneError) as caught, session():
        raise usage_error("too-long", "it is too long", where=Where(key="data.max_length"))
    assert caught.value.problems[0].where.line is None


def test_observer_that_overrides_nothing_can_be_used() -> None:
    with Observer().training(), Observer().progress("tokenising", None, "rows") as bar:
        bar.advance(3)


def test_stop_signal_is_an_error_for_a_program_that_calls_a_job() -> None:
    """As docs/reference/python.md says."""
    with pytest.raises(FsdpTuneError, match="stopped by SIGTERM") as stopped, session():
        os.kill(os.getpid(), SIGTERM)
    assert stopped.value.exit_code == 143


def test_no_handler_of_errors_takes_a_stop_signal_inside_a_command_or_another_job() -> None:
    with stop_signals_raise(), pytest.raises(StoppedBySignal), session():
        os.kill(os.getpid(), SIGTERM)
    with session(), pytest.raises(StoppedBySignal), session():
        os.kill(os.getpid(), SIGTERM)
