"""Derived traces equal traces that were recorded at the same sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fsdp_tune.core.topology import Topology
from fsdp_tune.planner.predict.depth import DepthError, full_depth, repeated_layers
from fsdp_tune.planner.predict.derive import alike, at_micro_batch, at_shards, blend, prime_for, slice_for
from fsdp_tune.planner.trace_format import Trace, TraceFacts
from tests.planner.hand_trace import Hand


def traced(micro_batch: int, *, shards: int = 8, other: bool = False) -> Trace:
    hand = Hand().hold(0, 4096 // shards, kind="parameters").collective("all_gather", 4096)
    hand.op("mm", flops=100.0 * micro_batch, moved=50 + 7 * micro_batch, of_batch=7 * micro_batch)
    hand.hold(1, 20 * micro_batch)
    if other:
        hand.op("mul", moved=1)
    return hand.hold(1, -20 * micro_batch).trace(micro_batch=micro_batch, topology=Topology(shard=shards))


def same(left: Trace, right: Trace) -> bool:
    return all(
        np.array_equal(getattr(left, table), getattr(right, table))
        for table in ("events", "ops", "collectives", "waits")
    )


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 16])
def test_any_micro_batch_is_derived_from_a_prime_trace(micro_batch: int) -> None:
    made = at_micro_batch(traced(prime_for(traced(1))), micro_batch, 4)
    assert same(made, traced(micro_batch))
    assert (made.shapes.micro_batch, made.shapes.accumulation) == (micro_batch, 4)


def test_primes_dividing_a_model_size_are_skipped() -> None:
    usual = prime_for(traced(1))
    assert prime_for(Hand().hold(0, 4 * usual).trace()) != usual


def test_one_loss_slice_represents_all_slices() -> None:
    """In memory one at a time; in work as many as the tokens make, the constant part (the weight's gradient)
    each time."""
    prime = prime_for(traced(1))
    hand = Hand().hold(0, 10 * slice_for(prime)).hold(1, 4 * prime)
    hand.op(
        "mm",
        flops=2.0 * slice_for(prime),
        moved=100 + slice_for(prime),
        of_slice=slice_for(prime),
        in_slice=True,
    )
    hand.op("mul", moved=100)
    family = replace(hand.trace(micro_batch=prime, tokens=64), facts=TraceFacts(slice_tokens=128))
    few, many = at_micro_batch(family, 1, 1), at_micro_batch(family, 8, 1)
    assert few.events["bytes"].tolist() == [640, 4], "all 64 tokens are one slice"
    assert many.events["bytes"].tolist() == [1280, 32]
    assert many.ops["flops"].tolist() == [2.0 * 512, 0.0]
    assert many.ops["moved_bytes"].tolist() == [4 * (100 + 128), 100]
    assert many.ops["kernels"].tolist() == [4, 1]
    assert few.ops["kernels"].tolist() == [1, 1]


@pytest.mark.parametrize("shards", [1, 2, 16, 1024])
def test_predictions_are_linear_in_the_inverse_of_the_shards(shards: int) -> None:
    made = at_shards(traced(1, shards=4), traced(1, shards=8), Topology(shard=shards))
    assert same(made, traced(1, shards=shards))
    assert made.shapes.topology == Topology(shard=shards)


def test_predicted_allocations_hold_far_from_both_traces() -> None:
    """Shards of a few numbers are padded: a line through two of them would be below zero at one rank."""
    few, many = (
        Hand().hold(0, size).hold(1, -size).trace(topology=Topology(shard=shards))
        for size, shards in ((16, 512), (32, 1024))
    )
    assert at_shards(few, many, Topology()).events["bytes"].tolist() == [1, -1]


def test_traces_of_different_programs_are_refused() -> None:
    assert not alike(traced(1), traced(2, other=True))
    with pytest.raises(ValueError, match="two programs"):
        blend(traced(1), traced(2, other=True), 1.0, traced(1).shapes)


@pytest.mark.parametrize(
    ("kinds", "reach", "traced"),
    [
        pytest.param("a" * 32, 1, 5, id="equal layers"),
        pytest.param("a" * 32, 3, 9, id="a layer affects three others"),
        pytest.param("aaaaab" * 5, 1, 18, id="Gemma 4"),
        pytest.param("aaaaab" * 4 + "aa", 1, 20, id="Gemma 3"),
        pytest.param("ab" * 12, 1, 6, id="gpt-oss"),
        pytest.param("aaab" * 9, 1, 12, id="SmolLM3"),
        pytest.param("aaaaab", 1, 6, id="one period"),
    ],
)
def test_one_period_is_traced_with_margins_of_the_layers_that_one_affects(
    kinds: str, reach: int, traced: int
) -> None:
    found = repeated_layers(kinds, reach=reach)
    assert len(kinds) - (found.missing if found else 0) == traced
    if found is not None:
        margin, (before, after) = max(2, reach + 1), (kinds[: found.first], kinds[found.dropped.stop :])
        assert min(len(before), len(after)) >= margin
        assert set(before) == set(after) == set(kinds), "a layer of each kind, which may free what they share"
        assert all(kinds[index] == kinds[index - found.period] for index in found.dropped)


def of_twelve_layers(lasts: int) -> Trace:
    """A trace of layers 0 to 11 of 16, of which 3 to 6 are repeated. Each allocates a block, which the layer
    `lasts` after it frees."""
    hand, layers = Hand(), list[int]()
    for layer in range(12):
        hand.hold(layer, 512)
        layers.append(layer)
        if layer >= lasts:
            hand.hold(layer - lasts, -512)
            layers.append(layer)
    for block in range(12 - lasts, 12):
        hand.hold(block, -512)
        layers.append(-1)
    trace = hand.trace()
    trace.events["layer"] = layers
    return replace(
        trace, counts=replace(trace.counts, layers=16), traced_layers=12, first_repeated=3, period=4
    )


@pytest.mark.parametrize("lasts", [1, 2, 3])
def test_blocks_that_outlive_their_layers_are_freed_in_copies(lasts: int) -> None:
    alive = np.cumsum(full_depth(of_twelve_layers(lasts)).events["bytes"].astype(np.int64))
    assert (int(alive.max()), int(alive[-1])) == (512 * (lasts + 1), 0)


def test_block_that_outlives_the_margins_is_refused() -> None:
    """Layer 3 of the trace frees nothing, since it has no layer four before it. So a copy of layer 3 would
    keep its block for ever."""
    with pytest.raises(DepthError, match="an equal layer keeps it"):
        full_depth(of_twelve_layers(4))
