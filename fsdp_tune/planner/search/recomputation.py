"""How much has to be recomputed for a recipe to fit: what `fsdp.activation_checkpointing: auto` stands for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.planner.hardware.gpus import Hardware
from fsdp_tune.planner.predict.fits import Fit, fit_into, workspace_bytes
from fsdp_tune.planner.search.candidates import CHECKPOINTING
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
    """A recipe that leaves nothing to a plan."""

    recipe: Recipe
    reasons: dict[str, str]
    """Key → why it has the value that the recipe left open; {} where it left none."""
    notices: tuple[Notice, ...] = ()


def is_open(recipe: Recipe) -> bool:
    return recipe.fsdp.activation_checkpointing == "auto"


def decide(recipe: Recipe, budget: MemoryBudget | None, trace: Callable[[Recipe], Trace]) -> Decided:
    """The recipe with as little recomputation as fits the budget.

    `recipe` is otherwise resolved. Where the budget is not known, or `trace` raises FsdpTuneError or ValueError (a model that refuses
    it), everything is recomputed, and a notice says why: too slow beats out of memory.
    """
    if not is_open(recipe):
        return Decided(recipe, {})
    if budget is None:
        return _blindly(recipe, "how much memory a rank has is not known")
    try:
        return least_recomputation(recipe, budget, trace)
    except (FsdpTuneError, ValueError) as error:
        return _blindly(recipe, f"the step could not be traced: {error}")


def least_recomputation(recipe: Recipe, budget: MemoryBudget, trace: Callable[[Recipe], Trace]) -> Decided:
    """Of none, selective and full the first that fits; where none does, the leanest. No more are traced than that takes."""
    tried: list[tuple[str, Fit]] = []
    for kind in CHECKPOINTING:
        found = fit_into(trace(with_recomputation(recipe, kind)), budget.usable_bytes, workspace_bytes=budget.workspace_bytes)
        if found.answer == "yes":
            without = f"; {tried[-1][0]} would take {tried[-1][1].because}" if tried else ""
            return Decided(with_recomputation(recipe, kind), {KEY: f"the least that fits {budget.name}: {found.because}{without}"})
        tried.append((kind, found))
    kind, least = min(tried, key=lambda each: each[1].device_bytes)
    message = f"no recomputation makes the recipe fit {budget.name} for certain; {kind} needs least: {least.because}"
    notice = Notice("recomputation-is-not-enough", message, hint="`fsdp-tune plan` ranks recipes that fit")
    return Decided(with_recomputation(recipe, kind), {KEY: f"the leanest: {least.because}"}, (notice,))


def with_recomputation(recipe: Recipe, kind: str) -> Recipe:
    return recipe.model_copy(update={"fsdp": recipe.fsdp.model_copy(update={"activation_checkpointing": kind})})


def _blindly(recipe: Recipe, why: str) -> Decided:
    notice = Notice("recomputation-not-planned", f"`{KEY}: auto` became full: {why}", hint="write none, selective or full")
    return Decided(with_recomputation(recipe, "full"), {KEY: f"everything, to be safe: {why}"}, (notice,))
