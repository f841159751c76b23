"""An evaluation after which a callback ends the training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fsdp_tune.worker.trainer import FsdpTrainer


def test_callback_of_the_user_may_end_a_run_that_chooses_no_best() -> None:
    events: list[Any] = []
    trainer: Any = SimpleNamespace(
        last_line_step=4,
        parts=SimpleNamespace(
            recipe=SimpleNamespace(training=SimpleNamespace(early_stopping=None)),
            metrics=SimpleNamespace(event=events.append),
        ),
        state=SimpleNamespace(best_metric=None, best_global_step=None),
        args=SimpleNamespace(metric_for_best_model=None),
    )
    FsdpTrainer._end_early(trainer, 4, None, None)
    assert [(event.step, event.message) for event in events] == [
        (4, "a callback ended the training after the evaluation")
    ]
