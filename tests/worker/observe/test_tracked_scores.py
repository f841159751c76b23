"""Trackers get the scores of each checkpoint once, at its step: from rank 0, and from the process after the
ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import checkpoint_events
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.event_parts import CheckpointScore
from fsdp_tune.run.events import CheckpointEvaluated
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.worker.observe import tracked_scores
from fsdp_tune.worker.observe.tracked_scores import SendScores, TrackedScores, send_rest
from fsdp_tune.worker.observe.trackers import Guarded


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


def evaluate(run: RunDir, step: int) -> None:
    scores = {"sums/exact_match": CheckpointScore(step / 100, None, None, 8)}
    append_event(run, CheckpointEvaluated(step, f"of step {step}", 1.0, scores))


class TensorBoardCallback(TrainerCallback):
    """In its place; the list has what it was sent."""

    def __init__(self, sent: list[tuple[int, dict[str, float]]], *, fails_at: int | None = None) -> None:
        self._sent, self._fails_at = sent, fails_at

    def on_log(self, *arguments: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        step = arguments[1].global_step
        if step == self._fails_at:
            raise ConnectionError("no answer")
        self._sent.append((step, logs or {}))


class WandbCallback(TensorBoardCallback):
    pass


def sender(
    run: RunDir, sent: list[tuple[int, dict[str, float]]], *more: TrainerCallback, fails_at: int | None = None
) -> SendScores:

    class Extension(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            raise AssertionError("its collective would wait for the other ranks")

    made = SendScores(run)
    trackers = [TensorBoardCallback(sent, fails_at=fails_at), *more]
    callbacks = [Extension(), made, *(Guarded(tracker, print, 60.0) for tracker in trackers)]
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


def test_tracker_that_fails_hinders_no_other_and_gets_the_rest_later(run: RunDir) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    others: list[tuple[int, dict[str, float]]] = []
    made = sender(run, sent, WandbCallback(others), fails_at=20)
    for step in (10, 20, 30):
        evaluate(run, step)
        log(made)
    assert [step for step, _ in sent] == [10]
    assert [step for step, _ in others] == [10, 20, 30]
    found = [event for event in checkpoint_events(run) if isinstance(event, CheckpointEvaluated)]
    tracked = TrackedScores.of(run)
    assert [event.step for event in tracked.lacking("TensorBoardCallback", found)] == [20, 30]
    assert tracked.lacking("WandbCallback", found) == []


@pytest.mark.parametrize("fails_at", [None, 10])
def test_rest_is_sent_once_after_the_ranks(
    fails_at: int | None, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setattr(
        tracked_scores,
        "set_environment",
        lambda *_: monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(run.tensorboard)),
    )
    document = {"model": {"name_or_path": "gpt2"}, "training": {"report_to": ["tensorboard"]}}
    evaluate(run, 10)
    log(sender(run, [], fails_at=fails_at))
    evaluate(run, 20)
    for _ in range(2):
        send_rest(run, Recipe.model_validate(document))
    found = accumulators.EventAccumulator(str(run.tensorboard)).Reload()
    values = [(each.step, round(each.value, 3)) for each in found.Scalars("train/sums/exact_match")]
    assert values == ([(10, 0.1)] if fails_at else []) + [(20, 0.2)]


def failing(event: str) -> type[TrainerCallback]:
    """A tracker whose server does not answer at one event."""

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no answer")

    return type("FailingCallback", (TrainerCallback,), {event: fail})


def sending(sent: list[tuple[int, dict[str, float]]]) -> type[TrainerCallback]:
    class MLflowCallback(TensorBoardCallback):
        def __init__(self) -> None:
            super().__init__(sent)

    return MLflowCallback


@pytest.mark.parametrize("event", ["__init__", "on_train_begin", "on_log", "on_train_end"])
def test_tracker_that_fails_after_the_ranks_keeps_nothing_from_another(
    event: str, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    kinds = {"wandb": failing(event), "mlflow": sending(sent)}
    monkeypatch.setattr(tracked_scores, "INTEGRATION_TO_CALLBACK", kinds)
    monkeypatch.setattr(tracked_scores, "set_environment", lambda *_: None)
    document = {"model": {"name_or_path": "gpt2"}, "training": {"report_to": ["wandb", "mlflow"]}}
    for step in (10, 20):
        evaluate(run, step)
    recipe = Recipe.model_validate(document)
    assert send_rest(run, recipe) == ["FailingCallback"]
    assert [step for step, _ in sent] == [10, 20]
    assert send_rest(run, recipe) == ([] if event == "on_train_end" else ["FailingCallback"])
    assert [step for step, _ in sent] == [10, 20]


def test_scores_of_an_earlier_version_are_not_sent_again(run: RunDir) -> None:
    run.tracked_scores_json.write_text('{"version": 1, "checkpoints": ["of step 10"]}')
    sent: list[tuple[int, dict[str, float]]] = []
    for step in (10, 20):
        evaluate(run, step)
    log(sender(run, sent))
    assert [step for step, _ in sent] == [20]
    assert TrackedScores.of(run).checkpoints == ["of step 10"]
