"""Resolve `fsdp.activation_checkpointing: auto`: the least recomputation with which a recipe fits. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.planner.predict.fits import Fit, fit_into, workspace_bytes
from fsdp_tune.planner.search.candidates import CHECKPOINTING, is_refused
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe

KEY = "fsdp.activation_checkpointing"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that one rank may use."""

    name: str
    usable_bytes: int
    workspace_bytes: int = 0

    @staticmethod
    def of(hardware: Hardware) -> MemoryBudget:
        return MemoryBudget(hardware.name, hardware.usable_bytes, workspace_bytes(hardware))


@dataclass(frozen=True, slots=True)
class Decided:
    """A recipe with recomputation decided."""

    recipe: Recipe
    reasons: dict[str, str]
    """Reason of each value that was decided, by key; {} if none was."""
    notices: tuple[Notice, ...] = ()


def is_undecided(recipe: Recipe) -> bool:
    """Return whether a plan must decide the recomputation."""
    return recipe.fsdp.activation_checkpointing == "auto"


def decide(recipe: Recipe, budget: MemoryBudget | None, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return the recipe with the least recomputation that fits the budget.

    `recipe` is otherwise resolved. If the budget is unknown, or `trace` raises FsdpTuneError or ValueError (the model cannot be
    traced), everything is recomputed, with a notice: a slow run is better than one out of memory.
    """
    if not is_undecided(recipe):
        return Decided(recipe, {})
    if budget is None:
        return _fully_recomputed(recipe, "the memory of a rank is unknown")
    try:
        return least_recomputation(recipe, budget, trace)
    except (FsdpTuneError, ValueError) as error:
        return _fully_recomputed(recipe, f"the step could not be traced: {error}")


def least_recomputation(recipe: Recipe, budget: MemoryBudget, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return the first of none, selective and full that fits, or else the one with least memory. Later kinds are not traced, nor
    those that contradict another key."""
    tried: list[tuple[str, Fit]] = []
    for kind in CHECKPOINTING:
        if is_refused(with_recomputation(recipe, kind)):
            continue
        found = fit_into(trace(with_recomputation(recipe, kind)), budget.usable_bytes, workspace_bytes=budget.workspace_bytes)
        if found.answer == "yes":
            without = f"; {tried[-1][0]} would take {tried[-1][1].because}" if tried else ""
            return Decided(with_recomputation(recipe, kind), {KEY: f"the least that fits {budget.name}: {found.because}{without}"})
        tried.append((kind, found))
    kind, least = min(tried, key=lambda each: each[1].device_bytes)
    message = f"the recipe may not fit {budget.name} with any activation checkpointing; {kind} needs least: {least.because}"
    notice = Notice("recomputation-is-not-enough", message, hint="`fsdp-tune plan` ranks recipes that fit")
    return Decided(with_recomputation(recipe, kind), {KEY: f"needs least memory: {least.because}"}, (notice,))


def with_recomputation(recipe: Recipe, kind: str) -> Recipe:
    return recipe.model_copy(update={"fsdp": recipe.fsdp.model_copy(update={"activation_checkpointing": kind})})


def _fully_recomputed(recipe: Recipe, why: str) -> Decided:
    notice = Notice("recomputation-not-planned", f"`{KEY}: auto` became full: {why}", hint="write none, selective or full")
    return Decided(with_recomputation(recipe, "full"), {KEY: f"full, to be safe: {why}"}, (notice,))
