"""Expert parallelism: what the step of a mixture of experts becomes if ranks divide the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.topology import Group, Topology
from fsdp_tune.planner.predict.collectives import collective_seconds
from fsdp_tune.planner.predict.divided_step import step_time, step_work
from fsdp_tune.planner.predict.efficiency import UnknownFigure, efficiency_of
from fsdp_tune.planner.predict.experts import expert_rows, why_experts
from fsdp_tune.planner.predict.mixture import imbalance, with_ep_size
from fsdp_tune.planner.predict.roofline import tile_share
from fsdp_tune.planner.trace_format import PHASES, Trace, TraceFacts, Unit
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

UNLINKED = replace(find_hardware("H100-SXM"), nvlink_gb_s=None, pcie_gb_s=None)
H100, B200 = find_hardware("H100-SXM"), find_hardware("B200")
EFFICIENCY = efficiency_of(H100)
ELEMENTS, HIDDEN, EXPERTS, CHOSEN, TOKENS = 1_000_000_000, 64, 16, 2, 4096
ROWS = TOKENS * CHOSEN
RECIPE = resolved()
MODULES = (
    "",
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0",
    "model.layers.0.mlp.experts",
)


def mixture(*, products: int = 4, recomputed: bool = False, shards: int = 8, experts: int = EXPERTS) -> Trace:
    """One layer, of which experts are nine tenths: a gather, a forward of two products, and a backward of
    `products`, after those of the forward again if it is recomputed."""
    hand = Hand()
    hand.hold(1, ELEMENTS // 10 * 9 * 4 // shards, kind="parameters").hold(
        2, ELEMENTS // 10 * 4 // shards, kind="parameters"
    )
    hand.hold(3, ELEMENTS * 4, kind="all-gather buffers").hold(3, -ELEMENTS * 4, kind="all-gather buffers")
    hand.collective("all_gather", ELEMENTS * 4).wait(0, 1)
    for phase, count in (("forward", 2), ("backward", products + 2 * recomputed)):
        hand.op("mul", phase=phase, moved=10)
        for _ in range(count):
            hand.op("_grouped_mm", flops=2e12, moved=10**9, phase=phase)
        hand.op("add", phase=phase, moved=10)
    hand.collective("reduce_scatter", ELEMENTS * 4, phase="backward")
    found = hand.trace(topology=Topology(shard=shards), tokens=TOKENS)
    events, ops = found.events.copy(), found.ops.copy()
    events["phase"][:2], events["step"][:2], events["module"][:2] = PHASES.index("load"), -1, (1, 2)
    for table in (events, ops):
        table["layer"] = 0
    # A recomputation ends early, inside of the experts, which stay the innermost module
    # (`trace/test_cuda_kernels_experts.py`).
    ops["module"][ops["phase"] == PHASES.index("backward")] = 4 if recomputed else 3
    unit = Unit("model.layers.0", 0, ELEMENTS, ELEMENTS * 4, ELEMENTS * 4)
    facts = TraceFacts(config={"num_experts": experts, "num_experts_per_tok": CHOSEN})
    return replace(found, events=events, ops=ops, modules=MODULES, units=(unit,), facts=facts)


def rows_of(trace: Trace) -> dict[int, Any]:
    return {row.ep_size: row for row in expert_rows(trace, H100, 1, EFFICIENCY)}


@pytest.mark.parametrize(("shards", "sizes"), [(16, [1, 2, 4, 8]), (24, [1, 4, 8]), (40, [])])
def test_numbers_of_ranks_that_leave_parts_of_experts_uneven_are_left_out(
    shards: int, sizes: list[int]
) -> None:
    """`fsdp.ep_size` refuses them. Of 24 ranks, 12 would shard each expert, and divide neither 64 nor 42; of
    40 ranks 20, 10 or 5."""
    trace = mixture(shards=shards)
    trace = replace(trace, facts=replace(trace.facts, expert_shapes=[[EXPERTS, 64, 42], [EXPERTS, 96, 64]]))
    assert list(rows_of(trace)) == sizes


def seconds(kind: str, size: float, ranks: int) -> float:
    found = collective_seconds(kind, size, Group(ranks, 1), H100)
    assert found is not None
    return found


def test_one_rank_is_the_plan_itself() -> None:
    trace = mixture()
    timed, alone = step_time(trace, H100, 1, EFFICIENCY), rows_of(trace)[1]
    assert (alone.step_seconds, alone.exchange_seconds, alone.imbalance) == (timed.step_seconds, 0.0, 1.0)
    assert alone.rows_of_expert == ROWS / EXPERTS


def test_experts_of_all_ranks_are_not_gathered() -> None:
    """The rest of the unit is, a tenth; with two ranks, half of the experts are, among four."""
    found, size = rows_of(mixture()), ELEMENTS * 4
    both = ("all_gather", "reduce_scatter")
    assert found[1].gather_seconds == pytest.approx(sum(seconds(kind, size, 8) for kind in both))
    assert found[8].gather_seconds == pytest.approx(sum(seconds(kind, size / 10, 8) for kind in both))
    assert found[2].gather_seconds == pytest.approx(
        sum(seconds(kind, size / 10, 8) + seconds(kind, size * 0.45, 4) for kind in both)
    )
    assert found[8].step_seconds < found[1].step_seconds


@pytest.mark.parametrize("products", [4, 2], ids=["trained", "frozen"])
@pytest.mark.parametrize(("recomputed", "passes"), [(False, 4), (True, 5)])
def test_tokens_are_exchanged_around_each_pass(products: int, recomputed: bool, passes: int) -> None:
    """Recomputation sends tokens again, and ends before it needs their results."""
    load, size = imbalance(8, EXPERTS), ROWS * HIDDEN * 2
    sorting = (
        2 * size * load / (H100.bandwidth_bytes_per_second * EFFICIENCY.bandwidth) + EFFICIENCY.kernel_seconds
    )
    numbers = seconds("all_to_all", 8 * EXPERTS, 8) * (1 + recomputed)
    expected = passes * (seconds("all_to_all", size * load, 8) + sorting) + numbers
    assert rows_of(mixture(products=products, recomputed=recomputed))[8].exchange_seconds == pytest.approx(
        expected
    )


def test_tokens_of_ranks_on_two_machines_cross_the_network() -> None:
    """Twelve ranks on three machines: of six ranks that divide the experts, four are on one machine."""
    trace, load, size = with_ep_size(mixture(shards=12, experts=12), 6), imbalance(6, 12), ROWS * HIDDEN * 2
    exchanges = step_work(trace, H100, 3, EFFICIENCY).exchanges
    assert exchanges is not None
    sorting = (
        2 * size * load / (H100.bandwidth_bytes_per_second * EFFICIENCY.bandwidth) + EFFICIENCY.kernel_seconds
    )
    tokens = collective_seconds("all_to_all", size * load, Group(6, 2), H100)
    assert tokens is not None
    assert exchanges.seconds.min() == pytest.approx(tokens + sorting)
    assert exchanges.sent.network_bytes > 0


def test_products_read_fewer_weights_and_fill_more_of_a_tile() -> None:
    trace = mixture()
    for column in ("flops", "moved_bytes"):
        ops = trace.ops.copy()
        ops[column] = np.where(ops["flops"] > 0, 1, ops[column])  # bound by the other one
        found = rows_of(replace(trace, ops=ops))
        assert found[8].product_seconds < found[1].product_seconds * imbalance(8, EXPERTS)


def test_buffers_of_gathered_experts_shrink_and_state_does_not() -> None:
    found = rows_of(mixture())
    gathered = ELEMENTS * 4 / 2**30
    assert found[1].peak_allocated_gib - found[8].peak_allocated_gib == pytest.approx(
        gathered * 0.9 * 7 / 8, rel=1e-6
    )


def test_sizes_that_divide_neither_ranks_nor_experts_are_left_out() -> None:
    assert list(rows_of(mixture(shards=4))) == [1, 2, 4]
    assert list(rows_of(mixture(experts=4))) == [1, 2, 4]
    assert list(rows_of(with_ep_size(mixture(shards=16), 16))) == [1, 2, 4, 8, 16]


def test_dense_models_adapted_experts_and_single_ranks_have_no_rows() -> None:
    trace = mixture()
    assert rows_of(replace(trace, facts=TraceFacts(config={}))) == {}
    assert rows_of(mixture(shards=1)) == {}
    adapted = replace(mixture(), modules=(*MODULES[:4], "model.layers.0.mlp.experts.base_layer"))
    assert rows_of(adapted) == {}
    with pytest.raises(UnknownFigure, match="link speed of H100"):
        expert_rows(trace, UNLINKED, 1, EFFICIENCY)


def test_reason_names_gains_and_costs() -> None:
    rows = tuple(rows_of(mixture()).values())
    assert why_experts((), RECIPE) is None
    text = why_experts(rows, RECIPE)
    assert text is not None
    assert text.startswith("8 ranks that divide the experts are ")
    assert f"all-to-all adds {rows[-1].exchange_seconds:.3g} s" in text
    slow = tuple(replace(row, step_seconds=float(row.ep_size)) for row in rows)
    assert "2 ranks that divide the experts are 50% slower than without expert parallelism: " in str(
        why_experts(slow, RECIPE)
    )
    close = (replace(rows[0], step_seconds=1.1), replace(rows[1], step_seconds=1.0))
    assert (
        "10% faster than without expert parallelism, within the error of such gains (a factor of 1.2): "
        in str(why_experts(close, RECIPE))
    )


def test_fullest_rank_has_more_rows_the_fewer_experts_it_has() -> None:
    assert imbalance(1, 128) == 1.0
    assert 1.0 < imbalance(2, 128) < imbalance(8, 128) < imbalance(8, 32) < 1.5


def test_tiles_of_a_grouped_product_are_torchs() -> None:
    """`GroupMM.cu`: 256 rows on Blackwell, 128 on Hopper, half of it for few rows; the last tile of a group
    is half full."""
    assert tile_share(256, H100) == 256 / (256 + 64)
    assert tile_share(256, B200) == 256 / (256 + 128)
    assert tile_share(64, H100) == 64 / (64 + 32)


def test_recipe_that_excludes_divided_experts_is_told_why() -> None:
    rows = tuple(rows_of(mixture()).values())
    assert str(why_experts(rows, RECIPE)).endswith("; `fsdp.ep_size` sets them")
    text = str(why_experts(rows, resolved(kernels={"compile": True})))
    assert text.endswith(
        "; not with this recipe: `fsdp.ep_size: 8` does not support `kernels.compile: true` (leave "
        "`compile` out)"
    )
