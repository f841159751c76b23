"""Step time: rooflines of operations, and streams that wait for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.topology import Group, Topology
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.collectives import collective_seconds
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.efficiency import Efficiency, UnknownFigure
from fsdp_tune.planner.predict.timing import StepTime
from fsdp_tune.planner.trace_format import Trace, TraceFacts
from tests.planner.hand_trace import Hand

A100 = find_hardware("A100-80GB")
IDEAL = Efficiency(
    1.0,
    1.0,
    1.0,
    bandwidth=1.0,
    kernel_seconds=0.0,
    issue_seconds=0.0,
    collective_issue_seconds=0.0,
    overlap_cost=0.0,
)
FLOPS = 312e12
"""One second of multiplying."""
GATHER = collective_seconds("all_gather", 100 * GIB, Group(8, 1), A100) or 0.0


def timed(trace: Trace, efficiency: Efficiency = IDEAL, machines: int = 1) -> StepTime:
    return step_time(trace, A100, machines, efficiency)


def test_operation_time_is_max_of_compute_and_memory() -> None:
    moving = int(A100.bandwidth_bytes_per_second)
    assert timed(Hand().op("mm", flops=FLOPS, moved=moving // 4).trace()).step_seconds == pytest.approx(1.0)
    assert timed(Hand().op("mm", flops=FLOPS / 4, moved=moving).trace()).step_seconds == pytest.approx(1.0)
    assert timed(Hand().op("mul", moved=moving).trace()).step_seconds == pytest.approx(1.0)


def test_each_dtype_has_its_own_peak() -> None:
    assert timed(Hand().op("mm", flops=19.5e12, dtype="fp32").trace()).step_seconds == pytest.approx(1.0), (
        "no tensor cores: TF32 is off"
    )


def test_flash_attention_has_its_own_share_of_the_peak() -> None:
    plain = Hand().op("_scaled_dot_product_flash_attention", flops=FLOPS).trace()
    assert timed(plain, replace(IDEAL, attention_forward=0.5)).step_seconds == pytest.approx(2.0)


def test_flash_attention_3_is_faster_where_the_gpu_has_its_units() -> None:
    plain = Hand().op("_scaled_dot_product_flash_attention", flops=FLOPS).trace()
    third = replace(plain, facts=TraceFacts(flash_version=3))
    hopper = replace(IDEAL, flash_3_gain=(2.0, 1.5))
    assert timed(third, hopper).step_seconds == pytest.approx(0.5)
    assert timed(third).step_seconds == timed(plain, hopper).step_seconds == pytest.approx(1.0)


def test_missing_peak_makes_time_unknown() -> None:
    with pytest.raises(UnknownFigure, match="V100-16GB has no known peak in bf16"):
        step_time(Hand().op("mm", flops=1.0).trace(), find_hardware("V100-16GB"), 1, IDEAL)


def test_other_streams_overlap_until_a_wait() -> None:
    hidden = Hand().collective("all_gather", 100 * GIB).op("mm", flops=10 * FLOPS).trace()
    assert timed(hidden).step_seconds == pytest.approx(10.0)
    assert timed(hidden).exposed_seconds == pytest.approx(0.0)
    exposed = timed(Hand().collective("all_gather", 100 * GIB).wait(0, 1).op("mm", flops=10 * FLOPS).trace())
    assert exposed.step_seconds == pytest.approx(10.0 + GATHER)
    assert exposed.exposed_seconds == pytest.approx(GATHER)
    assert exposed.communication_seconds == pytest.approx(GATHER)


def test_prefetching_hides_all_but_the_first_gather() -> None:
    hand = Hand().collective("all_gather", 100 * GIB)
    for _ in range(3):
        hand.wait(0, 1).collective("all_gather", 100 * GIB).op("mm", flops=10 * FLOPS)
    assert timed(hand.trace()).exposed_seconds == pytest.approx(GATHER)


def test_wait_covers_earlier_work_only() -> None:
    hand = Hand().collective("all_gather", 100 * GIB).wait(0, 1)
    early = hand.rows["waits"][0]
    hand.rows["waits"][0] = early | {"until": 1}  # an event recorded before the gather
    assert timed(hand.op("mm", flops=FLOPS).trace()).exposed_seconds == 0.0


def test_one_communicator_runs_one_collective_at_a_time() -> None:
    both = (
        Hand()
        .collective("all_gather", 100 * GIB, stream=1)
        .collective("all_gather", 100 * GIB, stream=0)
        .trace()
    )
    assert timed(both).step_seconds == pytest.approx(2 * GATHER)


def test_hidden_communication_slows_concurrent_compute() -> None:
    hidden = Hand().collective("all_gather", 100 * GIB).op("mm", flops=10 * FLOPS).trace()
    assert timed(hidden, replace(IDEAL, overlap_cost=0.5)).step_seconds == pytest.approx(10.0 + GATHER / 2)


def test_many_small_kernels_wait_for_the_host() -> None:
    hand = Hand()
    for _ in range(1000):
        hand.op("mul", moved=1000)
    slow_host = timed(hand.trace(), replace(IDEAL, issue_seconds=10e-6))
    assert slow_host.step_seconds == pytest.approx(10e-3, rel=0.01)
    assert slow_host.issue_seconds == pytest.approx(10e-3, rel=0.01)


def test_offloaded_updates_run_on_the_host_when_all_has_arrived() -> None:
    hand = Hand().op("mm", flops=FLOPS).op("host _fused_adamw_", moved=int(25e9), phase="optimizer")
    assert timed(hand.trace()).step_seconds == pytest.approx(1.0 + 1.0), "25 GB at an eighth of 200 GB/s"


def test_micro_batches_that_were_not_traced_take_as_long_as_the_second() -> None:
    hand = (
        Hand()
        .op("mm", flops=FLOPS, micro=0)
        .op("mm", flops=2 * FLOPS, micro=1)
        .op("mm", flops=FLOPS, micro=-1, phase="optimizer")
    )
    made = timed(hand.trace(accumulation=5, traced_micro_batches=2))
    assert made.step_seconds == pytest.approx(1 + 4 * 2 + 1)
    assert made.compute_seconds == pytest.approx(10.0)
    assert made.phases == pytest.approx({"forward": 9.0, "optimizer": 1.0})


def test_one_trace_predicts_steps_with_and_without_accumulation() -> None:
    hand = (
        Hand()
        .op("mm", flops=FLOPS, micro=0)
        .op("mm", flops=FLOPS, micro=1)
        .op("mm", flops=FLOPS, micro=-1, phase="optimizer")
    )
    assert timed(hand.trace(accumulation=1, traced_micro_batches=2)).step_seconds == pytest.approx(2.0)


SUM = collective_seconds("all_reduce", 100 * GIB, Group(8, 1), A100) or 0.0


@pytest.mark.parametrize("traced", [2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 5])
def test_communication_of_the_last_micro_batch_counts_once_a_step(accumulation: int, traced: int) -> None:
    """DDP sums its gradients over the ranks in the last micro-batch alone, however many there are."""
    hand = Hand()
    for micro in range(traced):
        hand.op("mm", flops=FLOPS, micro=micro)
    hand.wait(1, 0).collective(
        "all_reduce", 100 * GIB, group="world", phase="backward", micro=traced - 1
    ).wait(0, 1)
    hand.op("_fused_adamw_", flops=FLOPS, micro=-1, phase="optimizer")
    made = timed(
        hand.trace(
            accumulation=accumulation,
            traced_micro_batches=traced,
            topology=Topology(replicate=8),
            is_sharded=False,
        )
    )
    assert made.step_seconds == pytest.approx(accumulation + SUM + 1)
    assert made.communication_seconds == pytest.approx(SUM)
    assert made.exposed_seconds == pytest.approx(SUM)
    assert made.volume.machine_link_bytes == round(2 * 7 / 8 * 100 * GIB)


def test_volume_counts_every_micro_batch_and_splits_by_link() -> None:
    hand = Hand().collective("all_gather", 16_000, micro=0).collective("reduce_scatter", 16_000, micro=0)
    alone = timed(hand.trace()).volume
    assert (alone.machine_link_bytes, alone.network_bytes) == (28_000, 0)
    accumulated = timed(hand.trace(accumulation=3)).volume
    assert accumulated.machine_link_bytes == 3 * 28_000
    over = timed(hand.trace(topology=Topology(shard=16)), machines=2).volume
    assert over.network_bytes > 0
    assert over.machine_link_bytes + over.network_bytes == 2 * 15_000


def test_exchange_of_shared_rows_uses_the_links_of_their_ranks() -> None:
    hand = (
        Hand().collective("all_gather", 16_000).collective("all_to_all", 16_000, group="sequence", stream=0)
    )
    one = timed(hand.trace(topology=Topology(shard=4, sequence=2))).volume
    assert (one.machine_link_bytes, one.network_bytes) == (14_000 + 8_000, 0)
    over = timed(hand.trace(topology=Topology(sequence=16)), machines=2).volume
    assert one.machine_link_bytes < over.machine_link_bytes + over.network_bytes == 15_000 + 15_000


def test_deleting_the_optimizer_from_the_step_makes_it_shorter() -> None:
    """The prediction follows the trace: nothing about a step is known to the planner."""
    whole = Hand().op("mm", flops=FLOPS).op("_fused_adamw_", moved=10**12, phase="optimizer")
    without = Hand().op("mm", flops=FLOPS)
    assert timed(without.trace()).step_seconds < timed(whole.trace()).step_seconds
