"""Train the best recipes of a ranking for a few steps on this machine, and set what they took beside the
prediction."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.devices import nvidia_driver
from fsdp_tune.core.errors import (
    EXIT_CODE_OF_REASON,
    ExitCode,
    ExitReason,
    FsdpTuneError,
    Problem,
    failed_error,
    usage_error,
)
from fsdp_tune.core.gpus import CPU
from fsdp_tune.core.package_versions import installed_versions
from fsdp_tune.core.units import format_figure, parse_seconds
from fsdp_tune.jobs.observer import Observer, TrainResult, session
from fsdp_tune.jobs.options import Allowed, TrainOptions
from fsdp_tune.jobs.plan import PlannedHere, planned_here
from fsdp_tune.jobs.plan_options import MEASURED_STEPS
from fsdp_tune.jobs.plan_session import PlanSession, decisions
from fsdp_tune.jobs.ranked_recipe import recipe_body, recipe_text
from fsdp_tune.jobs.train import train
from fsdp_tune.planner.predict.calibration import FULL_ROWS, Measured
from fsdp_tune.planner.predict.predict import MeasuredPlan, Plan
from fsdp_tune.planner.search.candidates import PlannedRecipe
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.schema.evaluation import CheckpointEvaluation
from fsdp_tune.recipe.schema.recipe import Recipe
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


def measure(
    recipe: LoadedRecipe,
    *,
    count: int = 3,
    steps: int = MEASURED_STEPS,
    minutes: float | None = None,
    exact: bool = False,
    write: Path | None = None,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Plan:
    """Rank recipes as `plan` does, train the `count` fastest and the requested one for a few steps on this
    machine, and rank what ran.

    `steps` are counted after the first two. No measurement begins that would end after `minutes`. Full rows
    on a GPU calibrate its later plans. `write` is a file for the fastest. Call it where `train` may be
    called. Raises: FsdpTuneError, also if nothing was measured.
    """
    with session(recipe):
        if write is not None:
            check_output_file(write)
        planned = _planned(recipe, allowed, observer)
        with _folder(Path(str(planned.recipe.output_dir))) as folder:
            with PlanSession(planned.recipe, planned.hardware, exact=exact) as plans:
                decided = plans.decide()
                observer.notices(decided.notices)
                made = replace(plans.plan(), decided=planned.forced | decisions(decided))
                observer.planned(made, "recipe")
                with observer.progress("trying recipes", None, "recipes") as bar:
                    found = plans.search("fastest", lambda _changes: bar.advance())
            chosen = found.to_measure(count)
            if not chosen:
                message = f"no recipe fits {made.num_processes} × {made.gpu}, so there is none to measure"
                raise usage_error("nothing-fits", message)
            measuring = _Measuring(steps, minutes, allowed, observer)
            for number, each in enumerate(chosen, 1):
                loaded = parse_recipe(recipe_body(plans.recipe, planned.written, each), recipe.path)
                measuring.trials.append(Trial(each, loaded, folder / str(number)))
            stop = measuring.run()
            ranked = tuple(each.plan for each in found.ranked)
            measured = tuple(each.figures for each in measuring.fastest_first())
            made = replace(made, alternatives=ranked, best_because=found.because, measured=measured)
            observer.planned(made, "measured")
            fastest = measuring.fastest_first()[0]
            if fastest.figures.step_seconds is not None:
                with PlanSession(plans.recipe, planned.hardware, exact=exact) as plans:
                    if write is not None:
                        why = _why(made, fastest.figures)
                        write_file(write, recipe_text(plans, write, planned.written, fastest.planned, why))
                        observer.message(f"the fastest recipe is {write}")
                    _calibrate(plans, fastest, observer)
        if stop is not None:
            raise stop
        if fastest.figures.step_seconds is None:
            message = f"none of {len(chosen)} recipes was measured; the first: {fastest.figures.problem}"
            hint = "`fsdp-tune train` on this machine shows the complete error"
            raise failed_error("nothing-measured", message, hint=hint)
        return made


def _planned(recipe: LoadedRecipe, allowed: Allowed, observer: Observer) -> PlannedHere:
    try:
        planned = planned_here(recipe, None, None, allowed, observer)
    except FsdpTuneError as error:
        if [problem.code for problem in error.problems] == ["no-gpu-named"]:
            hint = "--set launch.device=cpu, or name a GPU by `--gpu` and leave out `--measure`"
            message = f"`--measure` trains on GPUs of the table, and {error.problems[0].message}"
            raise usage_error("no-gpu-to-measure", message, hint=hint) from error
        raise
    if planned.recipe.launch.num_machines > 1:
        message = (
            "`--measure` trains on this machine alone, and the recipe has "
            f"{planned.recipe.launch.num_machines}"
        )
        raise usage_error(
            "measured-on-one-machine",
            message,
            hint="--set launch.num_machines=1, with the ranks of this machine",
        )
    return planned


@dataclass(slots=True)
class Trial:
    """A recipe to measure."""

    planned: PlannedRecipe
    loaded: LoadedRecipe
    """The same recipe as a user would write it."""
    folder: Path
    """Its run directory."""
    figures: MeasuredPlan = field(init=False)
    trained: Recipe | None = None
    """As it was trained; None if it was not."""
    steps: int = 0
    """Number of the last counted step."""

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


@dataclass(slots=True)
class _Measuring:
    steps: int
    minutes: float | None
    """None: without a limit."""
    allowed: Allowed
    observer: Observer
    trials: list[Trial] = field(default_factory=list[Trial])

    def run(self) -> FsdpTuneError | None:
        """Train each recipe for a few steps. Return the error of a signal that asks to stop; the other trials
        are then not started."""
        began, longest = time.monotonic(), 0.0
        for number, trial in enumerate(self.trials, 1):
            start, plan = time.monotonic(), trial.planned.plan
            if self.minutes is not None and number > 1 and start - began + longest > 60 * self.minutes:
                trial.ended("not started", f"it would have ended after {self.minutes:g} minutes")
                continue
            changes = (
                ", ".join(f"{key}: {value}" for key, value in plan.recipe_changes.items())
                or "the requested recipe"
            )
            self.observer.message(f"measuring {number} of {len(self.trials)}: {changes}")
            try:
                self._train(trial)
            except FsdpTuneError as stop:
                return stop
            seconds = trial.figures.step_seconds
            said = trial.figures.problem if seconds is None else f"{format_figure(seconds)} s a step"
            self.observer.message(f"{trial.figures.outcome}: {said}")
            longest = max(longest, time.monotonic() - start)
        return None

    def fastest_first(self) -> list[Trial]:
        """Return the trials by their tokens a second over all devices, and last what was not measured."""
        return sorted(
            self.trials,
            key=lambda trial: (trial.figures.step_seconds is None, -trial.figures.tokens_per_second),
        )

    def _train(self, trial: Trial) -> None:
        """Raises: FsdpTuneError if a signal asks to stop."""
        loaded = replace(trial.loaded, recipe=self._of_trial(trial))
        try:
            result = train(loaded, TrainOptions(ignore_plan=True, allowed=self.allowed, saves=False))
        except FsdpTuneError as error:
            if error.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
                raise
            trial.ended(
                "out of memory" if error.exit_code is ExitCode.OUT_OF_MEMORY else "failed",
                error.problems[0].message,
            )
            return
        if result.exit_reason is not ExitReason.FINISHED:
            problem = Problem("stopped-measuring", "stopped while a recipe was measured")
            raise FsdpTuneError(problem, exit_code=EXIT_CODE_OF_REASON[result.exit_reason])
        _read(trial, result)

    def _of_trial(self, trial: Trial) -> Recipe:
        """Return the recipe with the same steps, a few of them, and nothing between and after them."""
        recipe = trial.loaded.recipe
        launch: dict[str, object] = {"max_restarts": 0}
        if self.minutes is not None:
            hang_seconds = min(
                parse_seconds(recipe.launch.hang_timeout), max(_LEAST_HANG_SECONDS, round(60 * self.minutes))
            )
            launch["hang_timeout"] = f"{hang_seconds}s"
        return recipe.model_copy(
            update={
                "output_dir": str(trial.folder),
                "training": recipe.training.model_copy(
                    update=_TRAINING | {"max_steps": self.steps + UNCOUNTED_STEPS}
                ),
                "checkpoint": recipe.checkpoint.model_copy(update={"probe": False, "mirror": None}),
                "evaluation": CheckpointEvaluation(),
                "merge": recipe.merge.model_copy(update={"at_end": False}),
                "launch": recipe.launch.model_copy(update=launch),
            }
        )


def _read(trial: Trial, result: TrainResult) -> None:
    """Take the figures of a finished run from its metrics."""
    lines = [line for line in read_metrics(result.run) if "loss" in line and line.get("step_seconds")][
        UNCOUNTED_STEPS:
    ]
    if not lines:
        trial.ended("failed", "the run has no line of a counted step")
        return
    trial.ended("measured", None)
    trial.trained, trial.steps = result.recipe, int(lines[-1]["step"])
    peaks = [line["peak_reserved_gib"] for line in lines if line.get("peak_reserved_gib") is not None]
    trial.figures = replace(
        trial.figures,
        step_seconds=statistics.median(line["step_seconds"] for line in lines),
        tokens_per_second_per_device=statistics.median(
            line["tokens_per_second_per_device"] for line in lines
        ),
        num_processes=trial.planned.plan.num_processes,
        peak_reserved_gib=max(peaks, default=None),
    )


def _calibrate(plans: PlanSession, fastest: Trial, observer: Observer) -> None:
    """Learn the speed of this GPU from a recipe that computed full rows."""
    figures, recipe = fastest.figures, fastest.trained
    if plans.hardware.name == CPU or recipe is None or figures.step_seconds is None:
        return
    share = figures.tokens_per_second * figures.step_seconds / figures.tokens_per_step
    if share < FULL_ROWS:
        observer.message(f"plans are not calibrated: a step computed {share:.0%} of the tokens of full rows")
        return
    try:
        torch, driver = installed_versions(["torch"])["torch"], nvidia_driver()
        factor = plans.learn(
            Measured(recipe, figures.step_seconds, fastest.steps, torch=torch, driver=driver)
        )
    except FsdpTuneError as error:
        observer.message(f"plans are not calibrated: {error.problems[0].message}")
        return
    observer.message(f"{plans.hardware.name} took {factor:.2f} of the predicted time; kept for later plans")


def _why(made: Plan, figures: MeasuredPlan) -> list[str]:
    trained = sum(each.step_seconds is not None for each in made.measured)
    speed = (
        f"{figures.step_seconds:.3g} s a step, {figures.tokens_per_second_per_device:,.0f} tokens a "
        "second and device"
    )
    return [
        f"# {made.recipe} for {made.num_processes} × {made.gpu}: the fastest of {trained} that "
        "`fsdp-tune plan --measure` trained.",
        f"# Measured: {speed}.",
    ]


@contextmanager
def _folder(output: Path) -> Iterator[Path]:
    """Yield a folder for runs on the disk of the recipe's own, and remove it at the end. Raises: usage error
    if it cannot be made."""
    parent = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.is_dir())
    try:
        folder = Path(tempfile.mkdtemp(prefix=".fsdp-tune-measure-", dir=parent))
    except OSError as error:
        message = f"{parent} cannot be written ({error.strerror}), and the measured runs belong there"
        raise usage_error(
            "output-not-writable", message, hint="--set output_dir=… names another directory"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
