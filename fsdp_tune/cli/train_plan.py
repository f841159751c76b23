"""The plan beside a training: made while the data is prepared, and set against what was measured when the run has ended.

Only on CUDA, and on a card of the table: on a CPU there is no card to run out of, and nothing to predict with. What a recipe leaves to a
plan (`fsdp.activation_checkpointing: auto`) is decided everywhere.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.errors import FsdpTuneError, Notice, usage_error
from fsdp_tune.run.metrics_file import read_metrics

if TYPE_CHECKING:
    from fsdp_tune.cli.output import Screen
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.planner.search.recomputation import Decided
    from fsdp_tune.recipe.schema import Recipe
    from fsdp_tune.run.directory import RunDir


def plan_of(screen: Screen, recipe: Recipe) -> tuple[Decided, Plan | None, list[Notice]]:
    """A resolved recipe with what it leaves to a plan, its plan on this machine's card, and why there is none.

    A trace that fails stops no training.
    """
    from fsdp_tune.cli.plan_auto import budget_of, card_of, decided, in_words
    from fsdp_tune.planner.hardware.gpus import detect
    from fsdp_tune.planner.search.recomputation import Decided, is_open

    card = card_of(recipe)
    found = decided(recipe, budget_of(recipe, card)) if is_open(recipe) else Decided(recipe, {})
    if recipe.launch.device != "cuda":
        return found, None, list(found.notices)
    hardware = detect(card.name) if card is not None else None
    if hardware is None:
        name = card.name if card is not None else "this machine's card"
        why = f"{name} is not in the table of GPUs, so nothing is predicted"
        return found, None, [*found.notices, Notice("not-planned", why)]
    from fsdp_tune.cli.plan_job import PlanJob

    try:
        with PlanJob(screen, found.recipe, hardware) as job:
            return found, replace(job.plan_once(), decided=in_words(found)), list(found.notices)
    except (FsdpTuneError, ValueError) as error:
        why = f"the step could not be traced, so nothing is predicted: {error}"
        return found, None, [*found.notices, Notice("not-planned", why)]


def refuse_what_cannot_fit(plan: Plan | None, *, ignore_plan: bool) -> None:
    """Exit 2 for a recipe that needs more than the card has, even were the prediction too high by its usual error."""
    if plan is None or plan.fits != "no" or ignore_plan:
        return
    raise usage_error(
        "does-not-fit",
        f"the recipe does not fit {plan.gpu}: {plan.fits_because}; the peak is at {plan.where}",
        ways_out=("`fsdp-tune plan` ranks recipes that fit", "`--ignore-plan` to try it all the same"),
    )


def predicted_line(plan: Plan) -> str:
    speed = plan.tokens_per_second_per_device
    step = "" if plan.step_seconds is None or speed is None else f"; {plan.step_seconds:.3g} s a step, {speed:,.0f} tokens/s/GPU"
    return f"plan: {plan.peak_reserved_gib:.1f} GiB reserved of {plan.usable_gib:.1f} (fits: {plan.fits}){step}"


def keep_plan(run: RunDir, plan: Plan | None) -> None:
    """Writes plan.json; where nothing is predicted, that of an earlier start goes, since it would be held against what it is not about."""
    if plan is None:
        DISK.unlink(run.plan_json)
    else:
        write_json(run.plan_json, plan.as_dict())


def predicted_and_measured(run: RunDir) -> list[str]:
    """Lines for the end of a run: plan.json against the last line of metrics.jsonl; [] where one of them says nothing."""
    if not run.plan_json.exists():
        return []
    plan: dict[str, Any] = json.loads(run.plan_json.read_text(encoding="utf-8"))
    nothing: dict[str, Any] = {}
    last = next((line for line in reversed(read_metrics(run)) if "loss" in line), nothing)
    said: list[str] = []
    for name, unit in (("peak_allocated_gib", "GiB"), ("peak_reserved_gib", "GiB"), ("step_seconds", "s")):
        predicted, measured = plan.get(name), last.get(name)
        if predicted is not None and measured:
            said.append(f"{name}: {predicted:.3g} {unit} predicted, {measured:.3g} measured ({predicted / measured - 1:+.1%})")
    return said
