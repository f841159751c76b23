"""Search the best recipe for given GPUs and a target: fastest, cheapest, longest rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_tune.core.command import Target
from fsdp_tune.planner.search.alternatives import (
    OFFLOADS,
    Changes,
    changed,
    differences,
    fewer_gathers,
    layouts,
    same_global_batch,
)
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search, any_fits, device_seconds, rank
from fsdp_tune.planner.search.long_rows import less_recomputed, longest
from fsdp_tune.planner.search.why_first import why_first
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe

SHOWN = 12
"""Number of alternatives in a plan."""


@dataclass(frozen=True, slots=True)
class Ranking:
    ranked: tuple[PlannedRecipe, ...]
    """Best first, at most `SHOWN`, each with its rank among all recipes; always includes the requested
    recipe."""
    because: str | None
    placed: tuple[PlannedRecipe, ...]
    """All recipes, best first."""

    def to_measure(self, count: int) -> list[PlannedRecipe]:
        """Return the `count` recipes that are predicted to be fastest and may fit, and the requested one.

        The order of the ranking is another: of recipes whose times are equal within the error, its first need
        least memory.
        """
        found = [each for each in sorted(self.placed, key=rank) if each.plan.fits != "no"]
        return found[:count] + [each for each in found[count:] if not each.plan.recipe_changes]


def rank_recipes(search: Search, base: Recipe, trace: Trace, target: Target) -> Ranking:
    """Rank recipes for a target, including `base`; `trace` is that of `base`."""
    search_for, order = {
        "fastest": (fastest, rank),
        "cheapest": (cheapest, _by_cost),
        "largest-context": (longest, _by_length),
    }[target]
    others = [each for each in search_for(search, base, trace) if not _is_same(each.recipe, base, trace)]
    placed = with_places(sorted([search.price(base, trace, base), *others], key=order))
    cut = next(each for each in placed if not each.plan.recipe_changes)
    shown = placed[:SHOWN] if cut in placed[:SHOWN] else [*placed[: SHOWN - 1], cut]
    return Ranking(tuple(shown), why_first(placed, target), tuple(placed))


def with_places(found: Sequence[PlannedRecipe]) -> list[PlannedRecipe]:
    """Return recipes that are sorted by the target with their places; those whose times are equal within the
    error by memory.

    Each recipe is compared with the fastest one of the last group on as many GPUs, so that the order within
    these is consistent; a group has the place of its fastest one.
    """
    groups: list[list[PlannedRecipe]] = []
    last: dict[int, list[PlannedRecipe]] = {}
    for each in found:
        group = last.get(each.plan.num_processes)
        if group is not None and _is_equal(group[0], each):
            group.append(each)
        else:
            groups.append([each])
            last[each.plan.num_processes] = groups[-1]
    placed: list[PlannedRecipe] = []
    for group in groups:
        first = len(placed) + 1
        for each in sorted(group, key=lambda one: one.plan.device_gib):
            equal_from = first if len(group) > 1 else None
            placed.append(
                PlannedRecipe(each.recipe, replace(each.plan, place=len(placed) + 1, equal_from=equal_from))
            )
    return placed


def _is_equal(faster: PlannedRecipe, slower: PlannedRecipe) -> bool:
    """Return whether two recipes take the same time per token within the median error of times, with rows of
    one length on as many GPUs; and whether both fit, or both are tight."""
    one, other = faster.plan, slower.plan
    kinds = [
        (each.plan.fits, each.plan.num_processes, each.recipe.data.max_length) for each in (faster, slower)
    ]
    if kinds[0] != kinds[1] or one.fits == "no":
        return False
    error = max(each.accuracy["step_seconds"].median_percent or 0.0 for each in (one, other))
    times = device_seconds(faster), device_seconds(slower)
    return times[1] < float("inf") and times[1] <= times[0] * (1 + error / 100)


def _is_same(recipe: Recipe, base: Recipe, trace: Trace) -> bool:
    """Return whether a candidate equals the requested recipe, whose `kernels.loss` may be auto."""
    changes = differences(base, recipe)
    loss = changes.pop("kernels.loss", None)
    return not changes and loss in (None, "chunked" if trace.facts.slice_tokens else "full")


def fastest(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan all layouts; with offloading only if nothing fits without it."""
    found: list[PlannedRecipe] = []
    for offload in OFFLOADS:
        found += search.layouts(base, trace, layouts(base, offload=offload))
        if any_fits(found):
            break
    return [*found, *_with_fewer_gathers(search, base, trace, found)]


KEPT_LAYOUTS = 2


def _with_fewer_gathers(
    search: Search, base: Recipe, trace: Trace, found: Sequence[PlannedRecipe]
) -> list[PlannedRecipe]:
    """Plan the fastest layouts that accumulate once more, with parameters that stay gathered between
    micro-batches."""
    wanted: list[Changes] = []
    for each in sorted(found, key=rank):
        changes = fewer_gathers(each.recipe)
        if each.plan.fits != "yes" or len(wanted) == KEPT_LAYOUTS:
            break
        if changes is not None and changes not in wanted:
            wanted.append(changes)
    return search.layouts(base, trace, wanted) if wanted else []


def cheapest(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan layouts on all GPUs and on smaller powers of two of them; where they recompute, also shared rows
    and slices of the MLP."""
    found: list[PlannedRecipe] = []
    size = base.world_size
    counts = [size, *(1 << power for power in range(size.bit_length() - 1, -1, -1) if 1 << power < size)]
    for number in counts:
        machines = max(1, -(-number // base.local_world_size))
        fewer = {"launch.num_processes": number, "launch.num_machines": machines, **same_global_batch(base)}
        other = base if number == size else changed(base, fewer)
        if other is None or other.global_batch_size != base.global_batch_size:
            continue
        search.progress(f"{number} GPUs")
        planned = fastest(search, other, trace)
        for each in [*planned, *less_recomputed(search, other, trace, planned)]:
            made = replace(each.plan, recipe_changes=differences(base, each.recipe))
            found.append(PlannedRecipe(each.recipe, made))
    return found


def _by_cost(found: PlannedRecipe) -> tuple[int, float]:
    """Sort key: fewest GPU-seconds per token first."""
    return rank(found)[0], device_seconds(found)


def _by_length(found: PlannedRecipe) -> tuple[int, int, float, float]:
    """Sort key: longest rows first."""
    order, *others = rank(found)
    return order, -found.recipe.data.max_length, others[0], others[1]
