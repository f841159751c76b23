"""Trackers (tensorboard, wandb …) may fail; the run goes on without them. What they show is in metrics.jsonl anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

_INTEGRATIONS = "transformers.integrations"


class Guarded(TrainerCallback):
    """Passes every event on to a tracker until it raises for the first time; `told` hears of that, once."""

    def __init__(self, tracker: TrainerCallback, told: Callable[[str], None]) -> None:
        self._tracker, self._told = tracker, told
        self._has_failed = False

    def _pass_on(self, event: str, *args: Any, **kwargs: Any) -> Any:
        if self._has_failed:
            return None
        try:
            return getattr(self._tracker, event)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  whatever a tracker's library raises, training does not depend on it
            self._has_failed = True
            name = type(self._tracker).__name__.removesuffix("Callback")
            self._told(f"{name} has failed and gets nothing more: {type(error).__name__}: {error}")
            return None


def _passing(event: str) -> Callable[..., Any]:
    def pass_on(self: Guarded, *args: Any, **kwargs: Any) -> Any:
        return self._pass_on(event, *args, **kwargs)

    return pass_on


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_")]:
    setattr(Guarded, _event, _passing(_event))


def guard_trackers(trainer: Trainer, told: Callable[[str], None]) -> None:
    """Puts a guard around each of transformers' own tracker callbacks, in its place."""
    callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
    trainer.callback_handler.callbacks = [
        Guarded(callback, told) if type(callback).__module__.startswith(_INTEGRATIONS) else callback for callback in callbacks
    ]
