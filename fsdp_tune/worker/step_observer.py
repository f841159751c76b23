"""What takes part in the steps of a run: it is attached to the trainer once, and may add fields to the lines of metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step that gets a line in metrics.jsonl."""

    step: int
    grad_norm: float | None = None
    learning_rate: float | None = None


class StepObserver(Protocol):
    """`attach` and `facts` do nothing: override what is needed. The trainer calls the Trainer's events of one that is a callback too."""

    def attach(self, trainer: Any) -> None:
        """Receive the `FsdpTrainer`, before the first step. Its module imports this one, so its type is in the overriding methods."""

    def facts(self, step: LoggedStep) -> dict[str, Any]:
        """Return fields of the line of a step that has ended. All ranks call it in the same order, so it may be collective."""
        return {}
