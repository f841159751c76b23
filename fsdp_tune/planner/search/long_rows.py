"""Layouts for long rows: rows shared by several ranks, the MLP in slices, inputs on the host.

Every length is a trace, so few are made: each number of ranks a row is tried at the lengths around the one
that the previous number predicts, and only the leanest layout climbs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.memory import CONTEXT_BYTES
from fsdp_tune.planner.search.alternatives import (
    BATCH,
    CHECKPOINTING,
    MLP_SLICES,
    SEQUENCE,
    SLICES,
    Changes,
    batch_changes,
    changed,
    differences,
    layout,
    least_state_bytes,
    sequence_sizes,
    with_shared_rows,
)
from fsdp_tune.planner.search.candidates import PlannedRecipe, Search, any_fits, describe, rank
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe


def longest(search: Search, base: Recipe, trace: Trace) -> list[PlannedRecipe]:
    """Plan one row per forward, doubling its length while it fits and the model has positions for it, for
    each number of ranks a row.

    Parameters are offloaded only if nothing fits without.
    """
    found: list[PlannedRecipe] = []
    for parameters in (False, True):
        if any_fits(found):
            break
        climb = _Climb(search, base, trace.facts.max_positions, parameters=parameters)
        for size in sequence_sizes(base, trace.counts.attention_heads, base.world_size):
            climb.with_ranks(size)
        found += climb.found
    return found


@dataclass(slots=True)
class _Climb:
    """Search for the longest rows, with parameters on the host or without."""

    search: Search
    base: Recipe
    positions: int | None
    parameters: bool
    found: list[PlannedRecipe] = field(default_factory=list[PlannedRecipe])
    best: tuple[int, int] | None = None
    """Doublings of the longest row that fits, and its ranks."""
    sliced: bool = True
    """Whether the MLP may be sliced; False once a trace was refused."""

    def with_ranks(self, size: int) -> None:
        """Plan the longest rows that `size` ranks share, with the leanest layout, then with faster ones while
        they fit."""
        doublings, least = (
            (self.best[0] + (size // self.best[1]).bit_length() - 1, self.best[0]) if self.best else (0, 0)
        )
        while doublings > least and not self._has_positions(doublings):
            doublings -= 1
        fits = self._fits(size, doublings)
        if fits:
            while self._has_positions(doublings + 1) and self._fits(size, doublings + 1):
                doublings += 1
        while not fits and doublings > least:
            doublings -= 1
            fits = self._fits(size, doublings)
        if not fits:
            return
        self.best = (doublings, size)
        for rung in list(self._rungs(size, doublings))[1:]:
            planned = self._plan(size, doublings, rung)
            if planned is not None and planned.plan.fits != "yes":
                break

    def _has_positions(self, doublings: int) -> bool:
        return self.positions is None or self.base.data.max_length << doublings <= self.positions

    def _rungs(self, size: int, doublings: int) -> Iterator[Changes]:
        """Yield layouts, the leanest first. The MLP is only sliced if a rank has more tokens than a slice."""
        tokens = (self.base.data.max_length << doublings) // size
        strategy = self.base.fsdp.sharding_strategy if self.base.world_size == 1 else "FULL_SHARD"
        offload = {"fsdp.offload_params": self.parameters, "fsdp.activation_checkpointing_offload": True}
        full = layout(self.base, strategy, "full") | {SLICES: None, "fsdp.offload_params": self.parameters}
        yield from (
            full | offload | {SLICES: slices}
            for slices in reversed(MLP_SLICES)
            if self.sliced and slices < tokens
        )
        yield full | offload
        yield full
        for kind in ("selective", "none"):
            yield full | {"fsdp.activation_checkpointing": kind}

    def _fits(self, size: int, doublings: int) -> bool:
        """Return whether the leanest layout that is not refused fits."""
        for rung in self._rungs(size, doublings):
            planned = self._plan(size, doublings, rung)
            if planned is not None:
                return planned.plan.fits == "yes"
            if rung[SLICES] is not None and not any(
                each.recipe.kernels.mlp_slice_tokens for each in self.found
            ):
                self.sliced = False
        return False

    def _plan(self, size: int, doublings: int, rung: Changes) -> PlannedRecipe | None:
        base = self.base
        length = base.data.max_length << doublings
        rows = base.global_batch_size * size // base.world_size
        recipe = changed(base, rung | {SEQUENCE: size, "data.max_length": length} | batch_changes(1, rows))
        if recipe is None:
            return None
        self.search.progress(f"{describe(rung)}, {size} ranks a row of {length:,}")
        traced = next(self.search.trace([recipe]))
        if traced is None:
            return None
        planned = self.search.price(recipe, traced, base)
        self.found.append(planned)
        return planned


def less_recomputed(
    search: Search, base: Recipe, trace: Trace, found: Sequence[PlannedRecipe]
) -> list[PlannedRecipe]:
    """Plan what replaces recomputation or offloading in the best layout of `found`: slices of the MLP, and
    rows shared within a machine.

    Nothing is planned if the best layout recomputes nothing: sharing rows adds traffic. More ranks share a
    row only until a layout without recomputation fits.
    """
    best = min(found, key=rank, default=None)
    if best is None or (best.plan.fits == "yes" and _cost(best.recipe) == 0):
        return []
    strategy = best.recipe.fsdp.sharding_strategy if best.plan.fits == "yes" else "FULL_SHARD"
    tried: list[PlannedRecipe] = []
    for size in sequence_sizes(base, trace.counts.attention_heads, base.local_world_size):
        shared = base if size == base.topology.sequence else with_shared_rows(base, size)
        if shared is None or base.local_world_size % size:
            continue
        wanted = [
            each for each in _cheaper(shared, best, strategy) if _may_fit(search, shared, each, found, trace)
        ]
        planned = search.layouts(shared, trace, wanted)
        tried += planned
        if any(each.plan.fits == "yes" and _cost(each.recipe) == 0 for each in planned):
            break
    return tried


def _cheaper(shared: Recipe, best: PlannedRecipe, strategy: str) -> Iterator[Changes]:
    """Yield layouts that recompute less than the best one, or everything if it does not fit."""
    loss = {"kernels.loss": best.recipe.kernels.loss}
    most = _cost(best.recipe) if best.plan.fits == "yes" else len(CHECKPOINTING)
    tokens = shared.data.max_length // shared.topology.row_parts
    if shared.topology.row_parts > 1:
        yield from (layout(shared, strategy, kind) | loss for kind in CHECKPOINTING[:most])
    if most > CHECKPOINTING.index("selective") and MLP_SLICES[0] < tokens:
        yield layout(shared, strategy, "none") | loss | {SLICES: MLP_SLICES[0]}


def _cost(recipe: Recipe) -> int:
    """Return 0 without recomputation, more with more of it, and most with tensors on the host."""
    if recipe.fsdp.offload_params or recipe.fsdp.activation_checkpointing_offload:
        return len(CHECKPOINTING)
    return CHECKPOINTING.index(recipe.fsdp.activation_checkpointing)


def _may_fit(
    search: Search, shared: Recipe, changes: Changes, found: Sequence[PlannedRecipe], trace: Trace
) -> bool:
    """Return whether a layout can fit if sharing divides all that is not state, judged by the same layout
    with complete rows."""
    recipe = changed(shared, changes)
    if recipe is None:
        return False
    state = least_state_bytes(recipe, trace.counts) / GIB
    same = [
        each
        for each in found
        if not differences(each.recipe, recipe).keys() - {SEQUENCE, *BATCH, "kernels.loss"}
    ]
    complete = min((each.plan.device_gib for each in same), default=0.0)
    least = state + (complete - state) / recipe.topology.row_parts
    return max(least, state + CONTEXT_BYTES / GIB) <= search.hardware.usable_bytes / GIB
