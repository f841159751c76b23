"""Train the best recipes of a ranking for a few steps on this machine, and set what they took beside the prediction."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.command import Target
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitCode, ExitReason, FsdpTuneError, Problem, usage_error
from fsdp_tune.core.gpus import CPU
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import Allowed, TrainOptions
from fsdp_tune.jobs.plan import PlanSession, decisions, planned_here, recipe_body, recipe_text
from fsdp_tune.jobs.train import train
from fsdp_tune.planner.predict.predict import MeasuredPlan, Plan
from fsdp_tune.planner.search.candidates import PlannedRecipe
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.metrics_file import read_metrics

UNCOUNTED_STEPS = 2
"""The first step compiles and allocates, and the second is the first beside a complete optimizer state."""
_TRAINING: dict[str, Any] = {
    "eval_strategy": "no",
    "load_best_model_at_end": False,
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
    steps: int = 5,
    minutes: float | None = None,
    target: Target | None = None,
    exact: bool = False,
    write: Path | None = None,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Plan:
    """Rank recipes as `plan` does, train the best `count` and the requested one for a few steps on this machine, and rank what ran.

    `steps` are counted after the first two. No measurement begins that would end after `minutes`. The figures of the fastest one
    calibrate later plans of this GPU. `write` is a file for it. Call it where `train` may be called. Raises: FsdpTuneError.
    """
    with session(recipe):
        if write is not None:
            check_output_file(write)
        planned = planned_here(recipe, None, None, allowed, observer)
        if planned.recipe.launch.num_machines > 1:
            message = f"`--measure` trains on this machine alone, and the recipe has {planned.recipe.launch.num_machines}"
            raise usage_error("measured-on-one-machine", message, hint="--set launch.num_machines=1, with the ranks of this machine")
        with PlanSession(planned.recipe, planned.hardware, exact=exact) as plans:
            decided = plans.decide()
            observer.notices(decided.notices)
            made = replace(plans.plan(), decided=planned.forced | decisions(decided))
            observer.planned(made, "recipe")
            with observer.progress("trying recipes", None, "recipes") as bar:
                found = plans.search(target or "fastest", lambda _changes: bar.advance())
        chosen = best_first(found.ranked, count)
        if not chosen:
            raise usage_error("nothing-fits", f"no recipe fits {made.num_processes} × {made.gpu}, so there is none to measure")
        written = [parse_recipe(recipe_body(plans.recipe, planned.written, each), recipe.path) for each in chosen]
        with _folder(Path(str(planned.recipe.output_dir))) as folder:
            trials = [
                Trial(each, loaded, folder / str(number)) for number, (each, loaded) in enumerate(zip(chosen, written, strict=True), 1)
            ]
            measured = _in_turn(trials, Measuring(steps, minutes, allowed, observer))
            made = replace(made, alternatives=tuple(each.plan for each in found.ranked), best_because=found.because)
            made = replace(made, measured=tuple(each for _, each in measured))
            observer.planned(made, "measured")
            fastest, figures = measured[0]
            if figures.step_seconds is None:
                return made
            with PlanSession(plans.recipe, planned.hardware, exact=exact) as plans:
                if planned.hardware.name != CPU:
                    observer.message(plans.calibrate(fastest.folder))
                if write is not None:
                    write_file(write, recipe_text(plans, write, planned.written, fastest.planned, _why(made, figures)))
                    observer.message(f"the fastest recipe is {write}")
        return made


@dataclass(frozen=True, slots=True)
class Measuring:
    """What is measured of each recipe."""

    steps: int
    minutes: float | None
    """None: without a limit."""
    allowed: Allowed
    observer: Observer


@dataclass(frozen=True, slots=True)
class Trial:
    """A recipe to measure."""

    planned: PlannedRecipe
    loaded: LoadedRecipe
    """The same recipe as a user would write it."""
    folder: Path
    """Its run directory."""


def best_first(ranked: Sequence[PlannedRecipe], count: int) -> list[PlannedRecipe]:
    """Return the best `count` recipes that may fit, and the requested one."""
    found = [each for each in ranked if each.plan.fits != "no"]
    best = found[:count]
    return best + [each for each in found[count:] if not each.plan.recipe_changes]


def _why(made: Plan, figures: MeasuredPlan) -> list[str]:
    trained = sum(each.step_seconds is not None for each in made.measured)
    speed = f"{figures.step_seconds:.3g} s a step, {figures.tokens_per_second_per_device:,.0f} tokens a second and device"
    return [
        f"# {made.recipe} for {made.num_processes} × {made.gpu}: the fastest of {trained} that `fsdp-tune plan --measure` trained.",
        f"# Measured: {speed}.",
    ]


def _in_turn(trials: Sequence[Trial], measuring: Measuring) -> list[tuple[Trial, MeasuredPlan]]:
    """Train each recipe for a few steps. Return the fastest first, and last what failed or did not start."""
    began, longest = time.monotonic(), 0.0
    done: list[tuple[Trial, MeasuredPlan]] = []
    for number, trial in enumerate(trials, 1):
        start, plan = time.monotonic(), trial.planned.plan
        if measuring.minutes is not None and done and start - began + longest > 60 * measuring.minutes:
            done.append((trial, _unmeasured(plan, "not started", f"it would have ended after {measuring.minutes:g} minutes")))
            continue
        changes = ", ".join(f"{key}: {value}" for key, value in plan.recipe_changes.items()) or "the requested recipe"
        measuring.observer.message(f"measuring {number} of {len(trials)}: {changes}")
        done.append((trial, _measured(trial, measuring)))
        longest = max(longest, time.monotonic() - start)
    return sorted(done, key=lambda each: (each[1].step_seconds is None, each[1].seconds_per_token or 0.0))


def _measured(trial: Trial, measuring: Measuring) -> MeasuredPlan:
    """Raises: FsdpTuneError if a signal asks to stop."""
    plan = trial.planned.plan
    loaded = replace(trial.loaded, recipe=_of_trial(trial.loaded.recipe, trial.folder, measuring.steps + UNCOUNTED_STEPS))
    try:
        result = train(loaded, TrainOptions(ignore_plan=True, allowed=measuring.allowed, saves=False))
    except FsdpTuneError as error:
        if error.exit_code in (ExitCode.INTERRUPTED, ExitCode.PREEMPTED):
            raise
        outcome = "out of memory" if error.exit_code is ExitCode.OUT_OF_MEMORY else "failed"
        return _unmeasured(plan, outcome, error.problems[0].message)
    if result.exit_reason is not ExitReason.FINISHED:
        problem = Problem("stopped-measuring", "stopped while a recipe was measured")
        raise FsdpTuneError(problem, exit_code=EXIT_CODE_OF_REASON[result.exit_reason])
    lines = [line for line in read_metrics(result.run) if "loss" in line and line.get("step_seconds")][UNCOUNTED_STEPS:]
    if not lines:
        return _unmeasured(plan, "failed", "the run has no line of a counted step")
    seconds = statistics.median(line["step_seconds"] for line in lines)
    peaks = [line["peak_reserved_gib"] for line in lines if line.get("peak_reserved_gib") is not None]
    return replace(
        _unmeasured(plan, "measured", None),
        step_seconds=seconds,
        tokens_per_second_per_device=plan.tokens_per_step / seconds / plan.num_processes,
        peak_reserved_gib=max(peaks, default=None),
    )


def _unmeasured(plan: Plan, outcome: str, problem: str | None) -> MeasuredPlan:
    return MeasuredPlan(plan.recipe_changes, plan.batch, outcome, problem, plan.tokens_per_step, plan.step_seconds, plan.peak_reserved_gib)


def _of_trial(recipe: Recipe, folder: Path, steps: int) -> Recipe:
    """Return the recipe with the same steps, a few of them, and nothing between and after them."""
    training = recipe.training.model_copy(update=_TRAINING | {"max_steps": steps})
    return recipe.model_copy(
        update={
            "output_dir": str(folder),
            "training": training,
            "checkpoint": recipe.checkpoint.model_copy(update={"probe": False, "mirror": None}),
            "merge": recipe.merge.model_copy(update={"at_end": False}),
        }
    )


@contextmanager
def _folder(output: Path) -> Iterator[Path]:
    """Yield a folder for runs on the disk of the recipe's own, and remove it at the end."""
    parent = next(folder for folder in output.absolute().parents if folder.is_dir())
    folder = Path(tempfile.mkdtemp(prefix=".fsdp-tune-measure-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
