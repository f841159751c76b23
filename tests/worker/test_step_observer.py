"""An observer of steps is all that a new field of metrics.jsonl needs."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.worker import setup
from fsdp_tune.worker.observe.step_phases import StepProgress
from fsdp_tune.worker.step_observer import LoggedStep, StepObserver
from tests.parity import runs
from tests.parity.bench import Bench
from tests.worker.short_runs import trained


def test_observer_adds_nothing_by_itself() -> None:
    class Silent(StepObserver):
        pass

    trainer: Any = None
    Silent().attach(trainer)
    assert Silent().facts(LoggedStep(1)) == {}


def run_with_an_observer(path: str) -> dict[str, Any]:
    class Counting(StepProgress):
        def attach(self, trainer: Any) -> None:
            super().attach(trainer)
            self.attached_to = trainer

        def facts(self, step: LoggedStep) -> dict[str, Any]:
            assert step.learning_rate is not None
            return {"observed_step": step.step, "observed_tokens": self.attached_to.lines.tokens}

    with patch.object(setup, "StepProgress", Counting):
        return runs.run_worker(path)


@pytest.mark.ranks
def test_fields_of_an_observer_are_in_every_training_line(bench: Bench) -> None:
    lines = [line for line in runs.lines(trained(bench, worker=run_with_an_observer)) if "loss" in line]
    assert lines
    for line in lines:
        assert (line["observed_step"], line["observed_tokens"]) == (line["step"], line["tokens"]), (
            "after the sums of the ranks"
        )
