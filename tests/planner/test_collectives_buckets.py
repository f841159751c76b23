"""DDP's buckets: filled in the order in which gradients become ready, the first one small."""

from __future__ import annotations

from typing import Any

from fsdp_tune.core.topology import Topology
from fsdp_tune.core.units import MIB
from fsdp_tune.planner.predict.collectives import BUCKET_BYTES, FIRST_BUCKET_BYTES, in_buckets
from fsdp_tune.planner.trace_format import Records, Trace
from tests.planner.hand_trace import Hand


def steps_of(*sizes: int, **shapes: Any) -> tuple[Trace, Records]:
    hand = Hand()
    for size in sizes:
        hand.collective("all_reduce", size, group="world", phase="backward")
    trace = hand.collective("all_reduce", 4, group="world", phase="clip").trace(
        **({"topology": Topology(replicate=8), "is_sharded": False} | shapes)
    )
    return trace, trace.collectives


def test_bucket_closes_at_its_size_limit() -> None:
    joined = in_buckets(*steps_of(MIB // 2, MIB // 2, 10 * MIB, 14 * MIB, 2 * MIB, 64 * MIB, MIB))
    assert joined["bytes"].tolist() == [FIRST_BUCKET_BYTES, 26 * MIB, 64 * MIB, MIB, 4], (
        "the norm's sum is no gradient's"
    )
    assert joined["at"].tolist() == [2, 5, 6, 7, 8], "each begins when its last gradient is ready"


def test_remaining_parameters_are_the_last_bucket() -> None:
    assert in_buckets(*steps_of(MIB, BUCKET_BYTES - 1))["bytes"].tolist() == [MIB, BUCKET_BYTES - 1, 4]


def test_sharded_collectives_are_not_bucketed() -> None:
    trace, collectives = steps_of(100, 200, topology=Topology(replicate=4, shard=2), is_sharded=True)
    assert in_buckets(trace, collectives)["bytes"].tolist() == [100, 200, 4]
