"""Trials of `plan --measure`: train a recipe for a few steps as `train` does, and read its figures."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Problem, usage_error
from fsdp_tune.core.units import GIB, parse_seconds
from fsdp_tune.jobs.observer import TrainResult
from fsdp_tune.jobs.options import Allowed, TrainOptions
from fsdp_tune.jobs.train import train
from fsdp_tune.launch.command.accelerate import EXPANDABLE_SEGMENTS
from fsdp_tune.planner.predict.calibration import FULL_ROWS, Measured
from fsdp_tune.planner.predict.predict import MeasuredPlan
from fsdp_tune.planner.search.candidates import PlannedRecipe
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.schema.evaluation import CheckpointEvaluation
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import LaunchRecord
from fsdp_tune.run.metrics_file import read_metrics

UNCOUNTED_STEPS = 2
"""The first step compiles and allocates, and the second is the first beside a complete optimizer state."""
_LEAST_HANG_SECONDS = 60
_TRAINING: dict[str, object] = {
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "metric_for_best_model": None,
    "greater_is_better": None,
    "early_stopping": None,
    "sample": None,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
    "lr_scheduler_kwargs": None,
    "warmup_steps": 0,
    "report_to": [],
    "push_to_hub": False,
}
"""What costs time between steps and changes none inside them; a schedule of a few steps is refused."""
FOLDER_PREFIX = ".fsdp-tune-measure-"


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """How trials are trained; the same on all machines but for `machine_rank`."""

    steps: int
    """Those that are counted."""
    minutes: float | None
    """None: without a limit."""
    allowed: Allowed
    machine_rank: int | None = None
    """As in `TrainOptions`."""

    def hang_seconds(self, recipe: Recipe) -> float:
        """Return `launch.hang_timeout` of a trial."""
        own = parse_seconds(recipe.launch.hang_timeout)
        if self.minutes is None:
            return own
        return min(own, max(_LEAST_HANG_SECONDS, round(60 * self.minutes)))

    def recipe(self, recipe: Recipe, folder: Path) -> Recipe:
        """Return the recipe with the same steps, a few of them, and nothing between and after them."""
        launch: dict[str, object] = {"max_restarts": 0}
        if self.minutes is not None:
            launch["hang_timeout"] = f"{self.hang_seconds(recipe):.0f}s"
        return recipe.model_copy(
            update={
                "output_dir": str(folder),
                "training": recipe.training.model_copy(
                    update=_TRAINING | {"max_steps": self.steps + UNCOUNTED_STEPS}
                ),
                "checkpoint": recipe.checkpoint.model_copy(update={"probe": False, "mirror": None}),
                "evaluation": CheckpointEvaluation(),
                "merge": recipe.merge.model_copy(update={"at_end": False}),
                "launch": recipe.launch.model_copy(update=launch),
            }
        )

    def train(self, loaded: LoadedRecipe, folder: Path) -> TrainResult:
        """Train a recipe with a run directory of its own. Raises: FsdpTuneError; after a stop signal with its
        exit code."""
        options = TrainOptions(
            ignore_plan=True, machine_rank=self.machine_rank, allowed=self.allowed, saves=False
        )
        result = train(replace(loaded, recipe=self.recipe(loaded.recipe, folder)), options)
        if result.stop_code is not None:
            problem = Problem("stopped-measuring", "stopped while a recipe was measured")
            raise FsdpTuneError(problem, exit_code=result.stop_code)
        return result


@dataclass(slots=True)
class Trial:
    """A recipe to measure."""

    planned: PlannedRecipe
    loaded: LoadedRecipe
    """The same recipe as a user would write it."""
    folder: Path
    """Its run directory."""
    figures: MeasuredPlan = field(init=False)
    measured: Measured | None = None
    """What calibrates later plans; None if nothing was measured, or if its rows were not full."""

    def __post_init__(self) -> None:
        self.ended("not started", None)

    def ended(self, outcome: str, problem: str | None) -> None:
        plan = self.planned.plan
        self.figures = MeasuredPlan(
            plan.recipe_changes,
            plan.batch,
            outcome,
            problem,
            plan.tokens_per_step,
            plan.step_seconds,
            plan.peak_reserved_gib,
        )

    @property
    def share_of_full_rows(self) -> float:
        """Computed tokens of a step relative to rows of `data.max_length`; 0 if nothing was measured."""
        figures = self.figures
        return figures.tokens_per_second * (figures.step_seconds or 0.0) / figures.tokens_per_step

    def read(self, result: TrainResult) -> None:
        """Take the figures of the finished run from its metrics."""
        lines = [line for line in read_metrics(result.run) if "loss" in line and line.get("step_seconds")][
            UNCOUNTED_STEPS:
        ]
        if not lines:
            self.ended("failed", "the run has no line of a counted step")
            return
        self.ended("measured", None)
        peaks = [line["peak_reserved_gib"] for line in lines if line.get("peak_reserved_gib") is not None]
        seconds = statistics.median(line["step_seconds"] for line in lines)
        # Every trial has the same rows, and steps have different numbers of tokens: a median of the rates
        # could rank a trial with longer steps first.
        tokens = statistics.fmean(
            line["tokens_per_second_per_device"] * line["step_seconds"] for line in lines
        )
        self.figures = replace(
            self.figures,
            step_seconds=seconds,
            tokens_per_second_per_device=tokens / seconds,
            num_processes=self.planned.plan.num_processes,
            peak_reserved_gib=max(peaks, default=None),
        )
        if self.share_of_full_rows >= FULL_ROWS:
            reserved = max(peaks) * GIB if peaks and _has_expandable_segments(result.run) else None
            steps = int(lines[-1]["step"])
            self.measured = Measured(result.recipe, seconds, steps, reserved_bytes=reserved)


def _has_expandable_segments(run: RunDir) -> bool:
    """Return whether the ranks had the allocator that a plan assumes."""
    record = LaunchRecord.read(run.launch_json)
    return record is not None and EXPANDABLE_SEGMENTS.items() <= record.facts.get("environment", {}).items()


@contextmanager
def folder_of_trials(output: Path) -> Iterator[Path]:
    """Yield a folder for runs on the disk of the recipe's own, and remove it at the end. Raises: usage error
    if it cannot be made."""
    parent = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.is_dir())
    try:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent))
    except OSError as error:
        message = f"{parent} cannot be written ({error.strerror}), and the measured runs belong there"
        raise usage_error(
            "output-not-writable", message, hint="--set output_dir=… names another directory"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
