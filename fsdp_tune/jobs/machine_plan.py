"""The plan of a run on this machine: decide what the recipe leaves to a plan, and predict the GPU here.
Nothing is predicted on a CPU, or for a GPU that is not in the table."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.errors import FsdpTuneError, Notice, usage_error
from fsdp_tune.core.gpus import detect
from fsdp_tune.jobs.plan_session import (
    PlanSession,
    budget_of,
    cache_of,
    decide_open_keys,
    decisions,
    one_trace,
    visible_gpu,
)
from fsdp_tune.planner import tracing as traces
from fsdp_tune.planner.predict.memory import disk
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.planner.search.auto_recomputation import Decided, undecided
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Prediction


class MachinePlan(NamedTuple):
    """The plan of a run on this machine."""

    decided: Decided
    prediction: Plan | None
    """None if nothing is predicted; a notice gives the reason."""
    notices: list[Notice]


def plan_here(recipe: Recipe) -> MachinePlan:
    """Decide what a resolved recipe leaves to a plan, and predict it for this machine's GPU.

    A trace that fails stops no training.
    """
    gpu = visible_gpu(recipe)
    decided = decide_open_keys(recipe, budget_of(recipe, gpu)) if undecided(recipe) else Decided(recipe, {})
    if recipe.launch.device != "cuda":
        return MachinePlan(decided, None, list(decided.notices))
    hardware = detect(gpu.name) if gpu is not None else None
    if hardware is None:
        name = gpu.name if gpu is not None else "this machine's GPU"
        why = f"{name} is not in the table of GPUs, so nothing is predicted"
        return MachinePlan(decided, None, [*decided.notices, Notice("not-planned", why)])
    try:
        with PlanSession(decided.recipe, hardware) as plans:
            return MachinePlan(
                decided, replace(plans.plan_once(), decided=decisions(decided)), list(decided.notices)
            )
    except (FsdpTuneError, ValueError) as error:
        why = str(error) if isinstance(error, FsdpTuneError) else f"the step could not be traced: {error}"
        why = f"nothing is predicted: {why}"
        return MachinePlan(decided, None, [*decided.notices, Notice("not-planned", why)])


def trace_of(recipe: Recipe) -> Trace | None:
    """Return the trace of a step of a resolved recipe; None if it cannot be traced here."""
    try:
        with traces.Tracing(cache_of(recipe) / "traces") as tracing:
            return one_trace(tracing)(recipe)
    except (FsdpTuneError, ValueError):
        return None


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """Return the size of a checkpoint of a resolved recipe, from a trace; None if the step cannot be traced
    here."""
    trace = trace_of(recipe)
    return None if trace is None else disk(recipe, trace, None).checkpoint_bytes


def refuse_what_cannot_fit(plan: Plan | None) -> None:
    """Raise a usage error for a recipe that needs more memory than the GPU has, even if the prediction is too
    high by its usual error."""
    if plan is not None and plan.fits == "no":
        raise usage_error(
            "does-not-fit",
            f"the recipe does not fit {plan.gpu}: {plan.fits_because}; the peak is at {plan.where}",
            ways_out=("`fsdp-tune plan` ranks recipes that fit", "`--ignore-plan` to try it all the same"),
        )


def keep_prediction(run: RunDir, plan: Plan | None) -> None:
    """Write plan.json; without a prediction remove that of an earlier start, which would be compared with
    this one's figures."""
    if plan is None:
        DISK.unlink(run.plan_json)
    else:
        Prediction.from_dict(plan.as_dict()).write(run.plan_json)
