"""Plan recipes from their traces. Every layout is traced once, at a micro-batch from which all others are
derived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fsdp_tune.core.gpus import Hardware
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.derive import at_micro_batch, prime_for
from fsdp_tune.planner.predict.efficiency import Efficiency
from fsdp_tune.planner.predict.memory import CONTEXT_BYTES, Fit, fit
from fsdp_tune.planner.predict.predict import Plan, plan
from fsdp_tune.planner.search.alternatives import (
    Changes,
    batch_changes,
    changed,
    devices_of_machine,
    differences,
    least_state_bytes,
    micro_batches,
)
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe


def ranks_of_machine(recipe: Recipe, hardware: Hardware) -> int:
    """Return the ranks per machine for layouts on other numbers of GPUs: the recipe's, or, on one machine, at
    least the vendor's."""
    own = recipe.local_world_size
    return own if recipe.launch.num_machines > 1 else max(own, devices_of_machine(hardware))


class Tracer(Protocol):
    """Trace recipes in parallel in other processes, and yield the traces in order; None for a recipe that
    cannot be traced."""

    def __call__(self, recipes: Sequence[Recipe]) -> Iterator[Trace | None]: ...


@dataclass(frozen=True, slots=True)
class PlannedRecipe:
    """A recipe with its plan."""

    recipe: Recipe
    plan: Plan


@dataclass(slots=True)
class Search:
    """Inputs of a search besides the recipe."""

    hardware: Hardware
    trace: Tracer
    efficiency: Efficiency | None = None
    rows: int | None = None
    progress: Callable[[str], None] = lambda _text: None

    def price(self, recipe: Recipe, trace: Trace, base: Recipe) -> PlannedRecipe:
        changes = differences(base, recipe)
        made = plan(
            recipe, self.hardware, trace, rows=self.rows, efficiency=self.efficiency, recipe_changes=changes
        )
        return PlannedRecipe(recipe, replace(made, memory=None))

    def fit(self, trace: Trace) -> Fit:
        """Return whether a step fits this GPU."""
        factor = 1.0 if self.efficiency is None else self.efficiency.reserved_factor
        return fit(trace, self.hardware, reserved_factor=factor)

    def layouts(self, base: Recipe, trace: Trace, wanted: Iterable[Changes]) -> list[PlannedRecipe]:
        """Plan each wanted layout that could fit, at every micro-batch up to the first that does not; `trace`
        is of `base`'s model."""
        batches = micro_batches(base)
        counts, prime = trace.counts, prime_for(trace)
        possible: list[Changes] = []
        traced: list[Recipe] = []
        for changes in wanted:
            lean = changed(base, changes | batch_changes(*batches[0]))
            # With accumulation if any of the batches accumulates; a micro-batch between may differ from the
            # last one.
            most = 3 if _keeps_gathered(changes) else 2
            family = changed(base, changes | batch_changes(prime, min(most, batches[0][1])))
            if lean is None or family is None:
                continue
            if least_state_bytes(lean, counts) + CONTEXT_BYTES <= self.hardware.usable_bytes:
                possible.append(changes)
                traced.append(family)
        found: list[PlannedRecipe] = []
        for changes, at_prime in zip(possible, self.trace(traced), strict=True):
            self.progress(describe(changes))
            if at_prime is not None:
                found += self._layout(base, changes, full_depth(at_prime), batches)
        return found

    def _layout(
        self, base: Recipe, changes: Changes, at_prime: Trace, batches: list[tuple[int, int]]
    ) -> list[PlannedRecipe]:
        found: list[PlannedRecipe] = []
        in_slices = base.kernels.loss == "auto" and at_prime.facts.slice_tokens
        for micro, accumulation in batches:
            recipe = changed(base, changes | batch_changes(micro, accumulation))
            if recipe is None or (in_slices and micro * base.data.max_length <= in_slices):
                continue
            if accumulation == 1 and _keeps_gathered(changes):
                continue  # the layout without it
            found.append(self.price(recipe, at_micro_batch(at_prime, micro, accumulation), base))
            if found[-1].plan.fits == "no":
                break
        return found


def _keeps_gathered(changes: Changes) -> bool:
    return changes.get("fsdp.reshard_after_backward") is False


def describe(changes: Changes) -> str:
    words = {
        key: key.split(".")[1] if value is True else str(value)
        for key, value in changes.items()
        if value is not False and value is not None and key != "fsdp.reshard_after_backward"
    }
    if _keeps_gathered(changes):
        words["fsdp.reshard_after_backward"] = "gathered between micro-batches"
    return ", ".join(word for key, word in words.items() if key != "fsdp.auto_wrap_policy")


def any_fits(found: Sequence[PlannedRecipe]) -> bool:
    return any(each.plan.fits == "yes" for each in found)


def rank(found: PlannedRecipe) -> tuple[int, float, float]:
    """Sort key: recipes that fit, then tight ones, by time per token over all devices and memory; then the
    others by memory.

    Where no time is predicted, those that take most memory are first: they recompute least, in the largest
    micro-batches.
    """
    made = found.plan
    order = ("yes", "tight", "no").index(made.fits)
    if order == 2:
        return order, made.device_gib, 0.0
    if made.step_seconds is None:
        return order, float("inf"), -made.device_gib
    return order, made.step_seconds / made.tokens_per_step, made.device_gib


def device_seconds(found: PlannedRecipe) -> float:
    """Return the seconds of all devices for a token; infinity if no time is predicted."""
    made = found.plan
    return (
        float("inf")
        if made.step_seconds is None
        else made.step_seconds * made.num_processes / made.tokens_per_step
    )
