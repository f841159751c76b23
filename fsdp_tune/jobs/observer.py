"""How a job reports to its caller while it works."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fsdp_tune.core.command import Bar
from fsdp_tune.core.errors import Notice

if TYPE_CHECKING:
    from fsdp_tune.jobs.answers import TrainingInputs, TrainResult
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.run.directory import RunDir

PlanStage = Literal["recipe", "ranking", "scaling"]


class _NoBar:
    def advance(self, n: int = 1) -> None: ...


class Observer:
    """Receives what a job reports. Each method does nothing: override those that you need.

    Methods are called in the thread that called the job; `Bar.advance` may come from several threads.
    """

    def notices(self, notices: Sequence[Notice]) -> None:
        """Receive facts that the user should know and that stop nothing. One may come more than once."""

    def message(self, text: str) -> None:
        """Receive a line for people about what happens now."""

    def phase(self, name: str) -> None:
        """Receive what the job does now, such as `checking checkpoints`. It lasts until the next phase or progress bar."""

    def progress(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Bar]:  # noqa: ARG002
        """Open a progress bar; `total` None: unknown. `unit` is `bytes`, `rows` or another plural."""
        return nullcontext(_NoBar())

    def planned(self, plan: Plan, stage: PlanStage) -> None:
        """Receive the plan after each stage: of the recipe itself, with other recipes ranked, with the scaling table."""

    def inputs_checked(self, inputs: TrainingInputs) -> None:
        """Receive the model, data and plan of a training before its run directory is written."""

    def run_opened(self, run: RunDir, log: Path) -> None:
        """Receive the run directory, which the job owns from now on, and the file where messages of this machine belong."""

    def training(self) -> AbstractContextManager[None]:
        """Return a context that is open while ranks run."""
        return nullcontext()

    def metrics(self, line: dict[str, Any]) -> None:
        """Receive a line of metrics.jsonl: a step, an evaluation or an event (`docs/reference`)."""

    def position(self, step: int, phase: str, done: int, planned: int) -> None:
        """Receive where the first rank of this machine is, a few times a second: the step, the phase (`importing`, `training`,
        `evaluating`, `saving` …), and in an evaluation how many of its planned batches are done."""

    def run_ended(self, result: TrainResult) -> None:
        """Receive the result when the ranks have ended. Until a finished run is merged, its `exit_reason` is FAILED."""
