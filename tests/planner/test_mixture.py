"""The plan of a recipe with `fsdp.ep_size`: memory and time are those of divided experts, wherever a trace is
used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.topology import Topology
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.divided_memory import divided_memory
from fsdp_tune.planner.predict.divided_step import step_work
from fsdp_tune.planner.predict.memory import fit
from fsdp_tune.planner.predict.mixture import LOADS_ASSUMED, imbalance, with_ep_size
from fsdp_tune.planner.predict.predict import plan
from fsdp_tune.planner.predict.timing import undivided_work
from fsdp_tune.planner.search.auto_recomputation import MemoryBudget, decide
from fsdp_tune.planner.trace_format import PHASES, Trace
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved
from tests.planner.test_experts import (
    EFFICIENCY,
    ELEMENTS,
    EXPERTS,
    H100,
    MODULES,
    ROWS,
    TOKENS,
    UNLINKED,
    mixture,
    rows_of,
)

EXPERTS_BYTES = ELEMENTS * 4 * 9 // 10
"""Of the layer's experts, when gathered."""

ADAPTED = replace(mixture(), modules=(*MODULES[:4], "model.layers.0.mlp.experts.base_layer"))


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_plan_of_a_recipe_is_the_row_of_its_ranks(ep: int) -> None:
    trace = with_ep_size(mixture(), ep)
    made, rows = plan(resolved(fsdp={"ep_size": ep}), H100, trace, efficiency=EFFICIENCY), rows_of(trace)
    row = rows[ep]
    assert (made.step_seconds, made.peak_allocated_gib, made.device_gib) == (
        row.step_seconds,
        row.peak_allocated_gib,
        row.device_gib,
    )
    assert [size for size, each in rows.items() if each.is_yours] == [ep]
    assert (LOADS_ASSUMED in made.assumptions) is (ep > 1)


def test_unknown_link_is_named_and_memory_is_predicted() -> None:
    made = plan(resolved(fsdp={"ep_size": 8}), UNLINKED, with_ep_size(mixture(), 8))
    assert (made.step_seconds, made.fits) == (None, "yes")
    assert any(text.startswith("step_seconds: the link speed of H100") for text in made.unknown)


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (mixture(experts=12), "8 ranks do not divide 12 experts and 8 shards"),
        (Hand().op("mm", flops=1e12).trace(topology=Topology(shard=8)), "no grouped product"),
        (ADAPTED, "its stacks of experts have adapters"),
    ],
)
def test_model_that_is_not_predicted_is_refused(trace: Trace, reason: str) -> None:
    with pytest.raises(FsdpTuneError, match=f"`fsdp.ep_size: 8` is not predicted for this model: .*{reason}"):
        fit(with_ep_size(trace, 8), H100)


def test_recomputation_is_decided_by_the_memory_of_divided_experts() -> None:
    """With all experts gathered, no recomputation fits."""
    recipe = resolved(fsdp={"ep_size": 8, "activation_checkpointing": "auto"})
    budget = MemoryBudget("a GPU", 4 * GIB)
    divided = decide(recipe, budget, lambda each: with_ep_size(mixture(), each.fsdp.ep_size))
    assert (divided.recipe.fsdp.activation_checkpointing, divided.notices) == ("none", ())
    (notice,) = decide(recipe, budget, lambda _: mixture()).notices
    assert notice.code == "recomputation-is-not-enough"


def with_copies(*, inside: bool = False) -> Trace:
    """FSDP2's copies out of a gather and into a reduction; the buffer of the gather is alive."""
    made = mixture()
    hand = Hand()
    hand.hold(1, ELEMENTS * 4, kind="all-gather buffers")
    hand.op("split_with_sizes_copy", moved=2 * ELEMENTS * 4, dtype="fp32")
    hand.hold(1, -ELEMENTS * 4, kind="all-gather buffers")
    hand.op("_grouped_mm", flops=2e12, moved=10**9)
    hand.op("chunk_cat", moved=2 * ELEMENTS * 4, dtype="fp32", phase="backward")
    found = hand.trace(topology=Topology(shard=8), tokens=made.shapes.tokens)
    events, ops = found.events.copy(), found.ops.copy()
    events["layer"] = ops["layer"] = 0
    held = made.events[:2].copy()
    held["block"] += 10
    events = np.concatenate([held, events])
    facts = replace(made.facts, experts_inside=inside)
    return replace(found, events=events, ops=ops, modules=made.modules, units=made.units, facts=facts)


@pytest.mark.parametrize(("ep", "copied"), [(2, True), (8, False)])
def test_shards_inside_of_experts_are_copied_once_more(ep: int, copied: bool) -> None:
    """Not with all experts of a rank in one piece. The copies are read and written, and that of a gather is
    alive beside its buffer."""
    trace = with_copies()
    alone = undivided_work(trace, H100, 1, EFFICIENCY).ops["moved_bytes"]
    moved = step_work(with_ep_size(trace, ep), H100, 1, EFFICIENCY).ops["moved_bytes"]
    kept = 1 - 0.9 * (1 - 1 / ep)
    for copy in (0, 2):
        assert moved[copy] == pytest.approx(alone[copy] * kept + copied * 2 * EXPERTS_BYTES / ep)
    peak = fit(with_ep_size(trace, ep), H100).memory.components["all-gather buffers"]
    assert peak == pytest.approx(ELEMENTS * 4 * kept + copied * EXPERTS_BYTES / ep, rel=1e-6)


def test_copies_that_were_traced_are_not_added() -> None:
    moved = step_work(with_ep_size(with_copies(inside=True), 2), H100, 1, EFFICIENCY).ops["moved_bytes"]
    assert moved[0] == pytest.approx(2 * ELEMENTS * 4 * 0.55)


def test_only_rows_of_experts_grow_with_the_fullest_rank() -> None:
    """An activation of attention with a row for each token divides by the number of rows of experts as
    well."""
    of_tokens, of_experts = TOKENS * 2816 * 2, ROWS * 704 * 2
    hand = Hand()
    for block, size in enumerate((of_tokens, of_experts, of_experts, of_tokens), start=10):
        hand.hold(block, size)
    for block, size in enumerate((of_tokens, of_experts, of_experts, of_tokens), start=10):
        hand.hold(block, -size)
    own = hand.trace().events
    # in the backward the layer, or experts in which a recomputation ended
    own["module"], own["layer"] = (
        [2, 4, 3, 4, 0, 0, 0, 0],
        0,
    )
    own["phase"][2:4] = PHASES.index("backward")
    given = mixture()
    own["at"] += int(given.events["at"].max())
    found = divided_memory(with_ep_size(replace(given, events=np.concatenate([given.events, own])), 8)).events
    load = imbalance(8, EXPERTS)
    held = {int(each["block"]): int(each["bytes"]) for each in found if each["bytes"] > 0}
    assert [held[block] for block in (10, 13)] == [of_tokens] * 2
    assert [held[block] for block in (11, 12)] == [round(of_experts * load)] * 2
    assert all(
        sum(int(each["bytes"]) for each in found if each["block"] == block) == 0 for block in range(10, 14)
    )
