"""Resolve `fsdp.activation_checkpointing: auto`, the least recomputation with which a recipe fits, and
`fsdp.reshard_after_backward: auto`, false if it fits. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.planner.predict.memory import Fit, cublas_workspace_bytes, fit_into
from fsdp_tune.planner.search.alternatives import CHECKPOINTING, is_refused
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe

RECOMPUTATION, RESHARDING = "fsdp.activation_checkpointing", "fsdp.reshard_after_backward"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The memory that one rank may use."""

    name: str
    usable_bytes: int
    workspace_bytes: int = 0
    reserved_factor: Callable[[Recipe, Trace], float] = lambda _recipe, _trace: 1.0
    """Return that of `fit_into` for a recipe."""

    @staticmethod
    def of(hardware: Hardware) -> MemoryBudget:
        return MemoryBudget(hardware.name, hardware.usable_bytes, cublas_workspace_bytes(hardware))

    def fit(self, recipe: Recipe, trace: Trace) -> Fit:
        """Return whether a recipe with this trace fits."""
        return fit_into(
            trace,
            self.usable_bytes,
            workspace_bytes=self.workspace_bytes,
            reserved_factor=self.reserved_factor(recipe, trace),
        )


@dataclass(frozen=True, slots=True)
class Decided:
    """A recipe with recomputation and resharding decided."""

    recipe: Recipe
    reasons: dict[str, str]
    """Reason of each value that was decided, by key; {} if none was."""
    notices: tuple[Notice, ...] = ()


def undecided(recipe: Recipe) -> list[str]:
    """Return the keys of a resolved recipe that a plan must decide."""
    return [key for key in (RECOMPUTATION, RESHARDING) if value_of(recipe, key) == "auto"]


def decide(recipe: Recipe, budget: MemoryBudget | None, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return the recipe with the least recomputation that fits the budget, and then with fewer gathers if
    they fit.

    `recipe` is otherwise resolved. If the budget is unknown, or if it or `trace` raises FsdpTuneError or
    ValueError (the model cannot be traced, or what was learned about the GPU cannot be read), everything is
    recomputed and resharded, with a notice: a slow run is better than one out of memory.
    """
    if not undecided(recipe):
        return Decided(recipe, {})
    if budget is None:
        return _decided_for_safety(recipe, "the memory of a rank is unknown")
    try:
        return decide_by_memory(recipe, budget, trace)
    except FsdpTuneError as error:  # says itself what failed
        return _decided_for_safety(recipe, str(error))
    except ValueError as error:
        return _decided_for_safety(recipe, f"the step could not be traced: {error}")


def decide_by_memory(recipe: Recipe, budget: MemoryBudget, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return `decide` for a known budget. Raises: FsdpTuneError or ValueError if the model cannot be
    traced."""
    found = Decided(recipe, {})
    if RECOMPUTATION in undecided(recipe):
        found = least_recomputation(
            with_resharding(recipe, after_backward=True) if RESHARDING in undecided(recipe) else recipe,
            budget,
            trace,
        )
    if RESHARDING not in undecided(recipe):
        return found
    kept = with_resharding(found.recipe, after_backward=False)
    fits = budget.fit(kept, trace(kept))
    if fits.answer == "yes":
        return replace(
            found, recipe=kept, reasons=found.reasons | {RESHARDING: f"it fits {budget.name}: {fits.because}"}
        )
    because = f"parameters that stay gathered between micro-batches would take {fits.because}"
    return replace(
        found,
        recipe=with_resharding(found.recipe, after_backward=True),
        reasons=found.reasons | {RESHARDING: because},
    )


def least_recomputation(recipe: Recipe, budget: MemoryBudget, trace: Callable[[Recipe], Trace]) -> Decided:
    """Return the first of none, selective and full that fits, or else the one with least memory. Later kinds
    are not traced, nor those that contradict another key."""
    tried: list[tuple[str, Fit]] = []
    for kind in CHECKPOINTING:
        other = with_recomputation(recipe, kind)
        if is_refused(other):
            continue
        found = budget.fit(other, trace(other))
        if found.answer == "yes":
            without = f"; {tried[-1][0]} would take {tried[-1][1].because}" if tried else ""
            return Decided(
                other,
                {RECOMPUTATION: f"the least that fits {budget.name}: {found.because}{without}"},
            )
        tried.append((kind, found))
    kind, least = min(tried, key=lambda each: each[1].device_bytes)
    message = (
        f"the recipe may not fit {budget.name} with any activation checkpointing; {kind} needs least: "
        f"{least.because}"
    )
    notice = Notice("recomputation-is-not-enough", message, hint="`fsdp-tune plan` ranks recipes that fit")
    return Decided(
        with_recomputation(recipe, kind), {RECOMPUTATION: f"needs least memory: {least.because}"}, (notice,)
    )


def with_recomputation(recipe: Recipe, kind: str) -> Recipe:
    return recipe.model_copy(
        update={"fsdp": recipe.fsdp.model_copy(update={"activation_checkpointing": kind})}
    )


def with_resharding(recipe: Recipe, *, after_backward: bool) -> Recipe:
    return recipe.model_copy(
        update={"fsdp": recipe.fsdp.model_copy(update={"reshard_after_backward": after_backward})}
    )


def _decided_for_safety(recipe: Recipe, why: str) -> Decided:
    reasons: dict[str, str] = {}
    notices: list[Notice] = []
    for key in undecided(recipe):
        if key == RECOMPUTATION:
            recipe, became, hint = with_recomputation(recipe, "full"), "full", "write none, selective or full"
            code = "recomputation-not-planned"
        else:
            recipe, became, hint = with_resharding(recipe, after_backward=True), "true", "write true or false"
            code = "resharding-not-planned"
        reasons[key] = f"{became}, to be safe: {why}"
        notices.append(Notice(code, f"`{key}: auto` became {became}: {why}", hint=hint))
    return Decided(recipe, reasons, tuple(notices))
