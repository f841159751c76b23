"""How a job reports to its caller while it works, and what a training returns in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT
from typing import TYPE_CHECKING, Any, Literal

from fsdp_tune.core.command import Bar, JsonAnswer
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, STOP_CODES, ExitCode, ExitReason, FsdpTuneError, Notice
from fsdp_tune.core.signals import StoppedBySignal, stop_signals_raise

if TYPE_CHECKING:
    from fsdp_tune.data.preparation import Prepared
    from fsdp_tune.model.model_files import ModelFacts
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.recipe.read.loader import LoadedRecipe
    from fsdp_tune.recipe.resolve import Resolution
    from fsdp_tune.recipe.schema.recipe import Recipe
    from fsdp_tune.run.base_model import BaseModel
    from fsdp_tune.run.directory import Checkpoint, RunDir
    from fsdp_tune.run.evaluation_record import EvaluationRecord

PlanStage = Literal["recipe", "ranking", "scaling", "measured"]


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    """The inputs that are checked before a run is written."""

    resolution: Resolution
    """With the keys decided that were left to a plan."""
    decided: dict[str, str]
    """Those keys → value and reason."""
    model: ModelFacts
    encoder: Any
    data: Prepared
    plan: Plan | None
    """The prediction for this machine's GPU; None where there is none."""
    base: BaseModel | None
    """The model under an adapter; None without `lora:`."""
    steps: int | None
    """Optimizer steps of the run; None if they are unknown."""
    evaluation: EvaluationRecord
    """What the scores of checkpoints are computed from; without sets and tasks if there is no
    `evaluation:`."""


@dataclass(frozen=True, slots=True)
class TrainAnswer(JsonAnswer):
    """How a run ended, of the first machine."""

    run_dir: str
    steps: int
    loss: float | None
    eval_loss: float | None
    checkpoint: str | None
    """The newest complete one."""
    merged: str | None
    """Directory of the merged model."""
    pushed: str | None
    """Address of the commit on the hub."""
    tokens: int | None
    seconds: float | None
    exit_reason: str


@dataclass(frozen=True, slots=True)
class FollowerAnswer(JsonAnswer):
    """How a run ended, of a machine that is not the first."""

    run_dir: str
    machine_rank: int
    exit_reason: str


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How a run ended on this machine. Machines other than the first know no step, outcome and checkpoint."""

    run: RunDir
    recipe: Recipe
    """As it was trained."""
    exit_reason: ExitReason
    step: int = 0
    outcome: dict[str, Any] = field(default_factory=dict[str, Any])
    """`loss`, `eval_loss`, `tokens` and `seconds`, where the first rank reported them."""
    checkpoint: Checkpoint | None = None
    """The newest complete one."""
    merged: Path | None = None
    pushed: str | None = None
    """Address of the commit on the hub."""
    machine_rank: int = 0
    had_finished: bool = False
    """Nothing was left to train."""
    signal: int | None = None
    """The first stop signal that came while it trained."""

    @property
    def stop_code(self) -> ExitCode | None:
        """The exit code of a request to stop, also if the run finished all the same: what starts one run
        after another ends then. None without such a request."""
        code = EXIT_CODE_OF_REASON[self.exit_reason]
        if code is ExitCode.OK and self.signal is not None:
            return ExitCode.INTERRUPTED if self.signal == SIGINT else ExitCode.PREEMPTED
        return code if code in STOP_CODES else None

    @property
    def metrics(self) -> Path:
        return self.run.metrics_jsonl

    def as_dict(self) -> dict[str, Any]:
        """Return the document of `train --json`."""
        if self.machine_rank:
            return FollowerAnswer(str(self.run.path), self.machine_rank, self.exit_reason.value).as_dict()
        return TrainAnswer(
            run_dir=str(self.run.path),
            steps=self.step,
            loss=self.outcome.get("loss"),
            eval_loss=self.outcome.get("eval_loss"),
            checkpoint=str(self.checkpoint.path) if self.checkpoint else None,
            merged=str(self.merged) if self.merged else None,
            pushed=self.pushed,
            tokens=self.outcome.get("tokens"),
            seconds=self.outcome.get("seconds"),
            exit_reason=self.exit_reason.value,
        ).as_dict()


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
        """Receive what the job does now, such as `checking checkpoints`. It lasts until the next phase or
        progress bar."""

    def progress(self, label: str, total: int | None, unit: str) -> AbstractContextManager[Bar]:  # noqa: ARG002
        """Open a progress bar; `total` None: unknown. `unit` is `bytes`, `rows` or another plural."""
        return nullcontext(_NoBar())

    def planned(self, plan: Plan, stage: PlanStage) -> None:
        """Receive the plan after each stage: of the recipe itself, with other recipes ranked, with the
        scaling table, with measured recipes (`plan --measure`)."""

    def inputs_checked(self, inputs: TrainingInputs) -> None:
        """Receive the model, data and plan of a training before its run directory is written."""

    def run_opened(self, run: RunDir, log: Path) -> None:
        """Receive the run directory, which the job owns from now on, and the file where messages of this
        machine belong."""

    def training(self) -> AbstractContextManager[None]:
        """Return a context that is open while ranks run."""
        return nullcontext()

    def metrics(self, line: dict[str, object]) -> None:
        """Receive a line of metrics.jsonl: a step, an evaluation or an event (`docs/reference`)."""

    def position(self, step: int, phase: str, done: int, planned: int) -> None:
        """Receive where the first rank of this machine is, a few times a second: the step, the phase
        (`importing`, `training`, `evaluating`, `saving` …), and in an evaluation how many of its planned
        batches are done."""

    def run_ended(self, result: TrainResult) -> None:
        """Receive the result when the ranks have ended. Until a finished run is merged, its `exit_reason` is
        FAILED."""


@contextmanager
def session(loaded: LoadedRecipe | None = None) -> Iterator[None]:
    """Run a job: errors that name a key of the recipe get its line.

    A stop signal raises StoppedBySignal; for a caller that has not prepared for it, as commands have, it is
    an error with exit code 143.
    """
    with stop_signals_raise() as is_outermost:
        try:
            yield
        except StoppedBySignal as stopped:
            if not is_outermost:
                raise
            raise FsdpTuneError(*stopped.problems, exit_code=stopped.exit_code) from None
        except FsdpTuneError as error:
            if loaded is not None:
                from fsdp_tune.recipe.schema.keys import pinned

                error.problems = tuple(pinned(problem, loaded.positions) for problem in error.problems)
            raise
