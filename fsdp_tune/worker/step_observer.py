"""What takes part in the steps of a run: it is attached to the trainer once, and may add fields to the lines
of metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

from transformers import TrainerState, TrainingArguments


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A step that gets a line in metrics.jsonl."""

    step: int
    grad_norm: float | None = None
    learning_rate: float | None = None


def is_logged(args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether the step that begins now gets a line in metrics.jsonl."""
    step = state.global_step + 1
    is_first = step == 1 and bool(args.logging_first_step)
    return is_first or step % max(int(args.logging_steps), 1) == 0 or step == state.max_steps


@dataclass(slots=True)
class RankTimes:
    """Seconds of this rank's host since the start."""

    in_steps: float = 0.0
    """From taking the batches of a step to the end of its optimizer."""
    waited: float = 0.0
    """Of these, in collectives: for other ranks."""
    data: float = 0.0
    """Of these, for batches."""
    stalled: float = 0.0
    """Training stopped for a save."""
    written: float = 0.0
    """Writing this rank's files of checkpoints, up to the last save, also while training continued."""
    _step_began: float | None = None

    def begin_step(self) -> None:
        self._step_began = time.perf_counter()

    def end_step(self) -> None:
        if self._step_began is not None:
            self.in_steps += time.perf_counter() - self._step_began
        self._step_began = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for other ranks, if it is in a step."""
        began, is_in_step = time.perf_counter(), self._step_began is not None
        yield
        if is_in_step:
            self.waited += time.perf_counter() - began

    def copy(self) -> RankTimes:
        return replace(self)

    def since(self, earlier: RankTimes) -> RankTimes:
        """Return the seconds of each kind since a copy was made."""
        return RankTimes(
            *(now - then for now, then in zip(astuple(self)[:5], astuple(earlier)[:5], strict=True))
        )


class StepObserver(Protocol):
    """`attach` and `facts` do nothing: override what is needed. The trainer calls the Trainer's events of one
    that is a callback too."""

    def attach(self, trainer: Any) -> None:
        """Receive the `FsdpTrainer`, before the first step. Its module imports this one, so its type is in
        the overriding methods."""

    def facts(self, step: LoggedStep) -> Mapping[str, object]:
        """Return fields of the line of a step that has ended. All ranks call it in the same order, so it may
        be collective."""
        return {}
