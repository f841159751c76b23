"""Trackers get the scores of each checkpoint once, at its step: from rank 0, and from the process after the
ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.event_parts import CheckpointScore
from fsdp_tune.run.events import CheckpointEvaluated
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.worker.observe import tracked_scores
from fsdp_tune.worker.observe.tracked_scores import SendScores, send_rest
from fsdp_tune.worker.observe.trackers import Guarded


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


def evaluate(run: RunDir, step: int) -> None:
    scores = {"sums/exact_match": CheckpointScore(step / 100, None, None, 8)}
    append_event(run, CheckpointEvaluated(step, f"of step {step}", 1.0, scores))


def sender(run: RunDir, sent: list[tuple[int, dict[str, float]]]) -> SendScores:
    def on_log(_: object, state: TrainerState, __: object, logs: dict[str, float]) -> None:
        sent.append((state.global_step, logs))

    class Tracker(TrainerCallback):
        def on_log(self, *arguments: Any, **values: Any) -> None:
            on_log(*arguments, **values)

    class Extension(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            raise AssertionError("its collective would wait for the other ranks")

    made = SendScores(run)
    callbacks = [Extension(), made, Guarded(Tracker(), print, 60.0)]
    made.trainer = SimpleNamespace(callback_handler=SimpleNamespace(callbacks=callbacks))  # type: ignore[assignment]
    return made


def log(made: SendScores) -> None:
    arguments: Any = None
    made.on_log(arguments, TrainerState(global_step=30), TrainerControl(), {"loss": 1.0})


def test_rank_0_sends_each_checkpoint_once_also_after_a_resume(run: RunDir) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    made = sender(run, sent)
    log(made)
    evaluate(run, 10)
    log(made)
    log(made)
    assert sent == [(10, {"sums/exact_match": 0.1})]
    evaluate(run, 20)
    resumed = sender(run, sent)
    log(resumed)
    log(resumed)
    assert [step for step, _ in sent] == [10, 20]


def test_full_disk_does_not_end_rank_0(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    sent: list[tuple[int, dict[str, float]]] = []
    made = sender(run, sent)
    evaluate(run, 10)
    with monkeypatch.context() as patched:
        patched.setattr(tracked_scores.TrackedScores, "write", write)
        log(made)
    evaluate(run, 20)
    log(made)
    assert [step for step, _ in sent] == [10, 20]


def test_rest_is_sent_once_after_the_ranks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(
        tracked_scores,
        "set_environment",
        lambda *_: monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(run.tensorboard)),
    )
    document = {"model": {"name_or_path": "gpt2"}, "training": {"report_to": ["tensorboard"]}}
    evaluate(run, 10)
    log(sender(run, []))
    evaluate(run, 20)
    for _ in range(2):
        send_rest(run, Recipe.model_validate(document))
    found = accumulators.EventAccumulator(str(run.tensorboard)).Reload()
    assert [(each.step, round(each.value, 3)) for each in found.Scalars("train/sums/exact_match")] == [
        (20, 0.2)
    ]
