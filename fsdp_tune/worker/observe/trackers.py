"""Guard trackers (tensorboard, wandb …): the run continues without one that fails or hangs. metrics.jsonl has
the same numbers."""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable

from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.integrations import MLflowCallback

_INTEGRATIONS = "transformers.integrations"


# A tracker's server may be slow once (wandb allows itself 90 s to start); after that it is not called again.
LIMIT_SECONDS = 120.0


class Guarded(TrainerCallback):
    """Pass every event on to a tracker until it first fails, which is reported once through `report`.

    The tracker lives in a thread of its own, the same for all events: a call that does not end cannot be
    ended, but it can be left behind. Each call is waited for, so the tracker sees the run as it would without
    a thread between.
    """

    def __init__(self, tracker: TrainerCallback, report: Callable[[str], None], limit_seconds: float) -> None:
        self.name = type(tracker).__name__
        self._tracker, self._report, self._limit_seconds = tracker, report, limit_seconds
        self._calls: queue.SimpleQueue[tuple[str, tuple[object, ...], dict[str, object]]] = (
            queue.SimpleQueue()
        )
        self._answers: queue.SimpleQueue[tuple[object, Exception | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.has_failed = False

    def _pass_on(self, event: str, *args: object, **kwargs: object) -> object:
        if self.has_failed or getattr(type(self._tracker), event) is getattr(TrainerCallback, event):
            return None
        if self._thread is None:
            # daemon: not joined at exit
            self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
            self._thread.start()
        self._calls.put((event, args, kwargs))
        try:
            result, error = self._answers.get(timeout=self._limit_seconds)
        except queue.Empty:
            result, error = None, TimeoutError(f"`{event}` did not return within {self._limit_seconds:g} s")
        if error is not None:
            self.has_failed = True
            name = self.name.removesuffix("Callback")
            self._report(f"{name} failed and gets no more events: {type(error).__name__}: {error}")
        return result

    def _serve(self) -> None:
        while not self.has_failed:
            event, args, kwargs = self._calls.get()
            try:
                self._answers.put((getattr(self._tracker, event)(*args, **kwargs), None))
            except Exception as error:  # noqa: BLE001  training does not depend on any error of a tracker
                self._answers.put((None, error))


def _passing(event: str) -> Callable[..., object]:
    def pass_on(self: Guarded, *args: object, **kwargs: object) -> object:
        return self._pass_on(event, *args, **kwargs)

    return pass_on


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Guarded, _event, _passing(_event))


def keep_mlflow_run(trainer: Trainer, keep: Callable[[str], None]) -> None:
    """Pass the id of the MLflow run to `keep` when `MLflowCallback` has started one; MLflow takes no ids that
    a client chooses."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback) is MLflowCallback:
            callback.setup = _keeping(callback, keep)


def _keeping(callback: MLflowCallback, keep: Callable[[str], None]) -> Callable[..., None]:
    setup = callback.setup

    def set_up(args: TrainingArguments, state: TrainerState, model: object) -> None:
        setup(args, state, model)
        if state.is_world_process_zero:
            keep(importlib.import_module("mlflow").active_run().info.run_id)

    return set_up


def guard_trackers(trainer: Trainer, report: Callable[[str], None], limit_seconds: float) -> None:
    """Replace each tracker callback of transformers by a guard, which cuts it off `limit_seconds` after a
    call."""
    callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
    trainer.callback_handler.callbacks = [
        Guarded(callback, report, limit_seconds)
        if type(callback).__module__.startswith(_INTEGRATIONS)
        else callback
        for callback in callbacks
    ]
