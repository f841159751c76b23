"""Results of `train`: the inputs checked before the start, and how the run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import ExitReason
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.jobs.answers import FollowerAnswer, TrainAnswer
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.base_model import BaseModel
from fsdp_tune.run.directory import Checkpoint, RunDir


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


@dataclass(frozen=True, slots=True)
class TrainingInputs:
    """The inputs that are checked before a run is written."""

    resolution: Resolution
    """With the keys decided that were left to a plan."""
    decided: dict[str, str]
    """Those keys → value and reason."""
    model: dict[str, Any]
    encoder: Any
    data: Prepared
    plan: Plan | None
    """The prediction for this machine's GPU; None where there is none."""
    base: BaseModel | None
    """The model under an adapter; None without `lora:`."""
