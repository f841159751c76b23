"""A plan as data: complete, with unknown figures marked, and valid JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest

from fsdp_tune.core.command import MergedDtype
from fsdp_tune.core.gpus import ModelDimensions, find_hardware, mfu
from fsdp_tune.core.tensors.dtypes import OF_OPTION
from fsdp_tune.core.topology import Topology
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.memory import DTYPE_BYTES, fit_into
from fsdp_tune.planner.predict.predict import Plan, SentGib, plan
from fsdp_tune.planner.trace_format import Trace, TraceFacts
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

A100 = find_hardware("A100-40GB")
PROMISED = {
    *("peak_allocated_gib", "peak_reserved_gib", "fits", "step_seconds"),
    *("tokens_per_second_per_device", "components", "alternatives"),
}


def step(size_gib: float = 10, **shapes: Any) -> Trace:
    size = int(size_gib * GIB)
    hand = (
        Hand()
        .hold(0, 2 * GIB, kind="parameters")
        .hold(1, size)
        .op("mm", flops=1e12)
        .collective("all_gather", GIB)
    )
    return hand.hold(1, -size).trace(**shapes)


def test_plan_document_is_json_with_documented_fields() -> None:
    made = plan(resolved(), A100, step())
    document = json.loads(json.dumps(made.as_dict(), allow_nan=False))
    assert document.keys() >= PROMISED
    assert document["fits"] == "yes"
    assert document["peak_allocated_gib"] == pytest.approx(12.0, abs=0.01), "and cuBLAS's workspace"
    inside = {
        name: size for name, size in document["components"].items() if name not in ("CUDA context", "NCCL")
    }
    assert sum(inside.values()) == pytest.approx(document["peak_allocated_gib"])
    assert document["tokens_per_second_per_device"] == pytest.approx(128 / document["step_seconds"])
    assert set(document["accuracy"]) == {"peak_allocated_gib", "peak_reserved_gib", "step_seconds"}


def test_host_assumption_is_listed_with_host_work() -> None:
    on_host = Hand().hold(0, GIB).op("mm", flops=1e12).op("host _fused_adamw_", moved=10**9).trace()
    assert any("host memory bandwidth" in text for text in plan(resolved(), A100, on_host).assumptions)
    assert not any("host memory bandwidth" in text for text in plan(resolved(), A100, step()).assumptions)


def test_time_with_casts_to_fp8_is_reported_as_an_upper_bound() -> None:
    with_fp8 = Hand().hold(0, GIB).op("_scaled_mm", flops=1e12).trace()
    assert any("cast to fp8" in text for text in plan(resolved(), A100, with_fp8).assumptions)
    assert not any("cast to fp8" in text for text in plan(resolved(), A100, step()).assumptions)


def test_alternatives_have_the_same_keys_and_their_changes() -> None:
    other = replace(plan(resolved(), A100, step(5)), recipe_changes={"fsdp.activation_checkpointing": "full"})
    document = replace(plan(resolved(), A100, step()), alternatives=(other,)).as_dict()
    assert (PROMISED - {"alternatives"}) | {"recipe_changes"} <= document["alternatives"][0].keys()


def test_unknown_figures_are_null_and_named() -> None:
    made = plan(resolved(), find_hardware("V100-32GB"), step())
    assert (made.step_seconds, made.tokens_per_second_per_device, made.mfu) == (None, None, None)
    assert made.communication_gib == SentGib(None, None)
    assert any(text.startswith("step_seconds: V100-32GB") for text in made.unknown)
    assert made.run.dollars is None
    assert plan(resolved(), replace(A100, dollars_per_hour=2.0), step()).run.dollars is not None


@pytest.mark.parametrize(
    ("size_gib", "answer"),
    [(10, "yes"), (33, "yes"), (36, "tight"), (38, "tight"), (41, "tight"), (42, "no"), (100, "no")],
)
def test_fits_is_yes_with_margin_and_no_only_when_certain(size_gib: float, answer: str) -> None:
    assert plan(resolved(), A100, step(size_gib - 2)).fits == answer


def test_reserved_memory_beyond_the_gpu_and_the_error_does_not_fit() -> None:
    """Freed memory that the next allocation cannot use stays reserved: 27 of 20 GiB are allocated at the
    peak."""
    trace = Hand().hold(0, 13 * GIB).hold(0, -13 * GIB).hold(1, 20 * GIB).trace()
    found = fit_into(trace, int(23.5 * GIB), segments="plain")
    assert found.memory.peak_allocated_bytes < 21 * GIB < 32 * GIB < found.memory.peak_reserved_bytes
    assert found.answer == "no"


def test_removing_work_from_the_step_changes_the_prediction() -> None:
    whole = (
        Hand()
        .hold(0, GIB)
        .hold(1, GIB, kind="optimizer state")
        .op("mm", flops=1e12)
        .op("_fused_adamw_", moved=10**9)
    )
    without = Hand().hold(0, GIB).op("mm", flops=1e12)
    full, less = plan(resolved(), A100, whole.trace()), plan(resolved(), A100, without.trace())
    assert less.peak_allocated_gib == full.peak_allocated_gib - 1
    assert "optimizer state" not in less.components
    assert (less.step_seconds or 0) < (full.step_seconds or 0)


def test_disk_and_host_memory_follow_the_recipe() -> None:
    """The hand-made model has 1,000 parameters of 4 bytes; AdamW keeps two more."""
    made = plan(resolved(), A100, step(), rows=1000, tokens=5000)
    assert made.disk_gib.checkpoint == 12_000 / GIB
    assert made.disk_gib.checkpoints_at_most == 3 * 12_000 / GIB, "two are kept, and one is being written"
    assert made.disk_gib.merged == 2000 / GIB
    assert made.disk_gib.cache == 5 * 5000 / GIB, "an id and a flag a token"
    assert made.host_gib_per_machine.staging == 12_000 / GIB
    synchronous = plan(resolved(checkpoint={"async": False}), A100, step())
    assert synchronous.host_gib_per_machine.staging == 0
    whole = resolved(
        gpus=16, machines=2, checkpoint={"async": False}, fsdp={"state_dict_type": "FULL_STATE_DICT"}
    )
    assert (
        plan(whole, A100, step(topology=Topology(shard=16))).host_gib_per_machine.staging == 12_000 / GIB
    ), "rank 0 gathers it all"
    assert made.run.steps == 10


def test_pinned_memory_is_counted_in_the_powers_of_two_that_torch_pins() -> None:
    """Freed as it was taken; the optimizer's state is ordinary memory."""
    third = 3 * GIB
    hand = (
        Hand()
        .hold(0, GIB)
        .hold(1, third, kind="parameters", host=True)
        .hold(2, third, kind="optimizer state", host=True)
    )
    moved = hand.hold(3, third, host=True).hold(3, -third, host=True).hold(4, 2 * GIB, host=True)
    assert plan(resolved(), A100, moved.op("mm", flops=1e12).trace()).host_gib_per_machine.offloaded == 8 * (
        4 + 3 + 4
    )


def test_merge_that_keeps_dtypes_has_the_size_of_the_checkpoint() -> None:
    half_frozen = step()
    half_frozen = replace(
        half_frozen, counts=replace(half_frozen.counts, trained_parameters=500, parameter_bytes=3000)
    )
    assert plan(resolved(merge={"dtype": "keep"}), A100, half_frozen).disk_gib.merged == 3000 / GIB
    assert plan(resolved(merge={"dtype": "fp32"}), A100, half_frozen).disk_gib.merged == 4000 / GIB


@pytest.mark.parametrize(("epochs", "steps"), [(1, 16), (1.5, 24), (0.1, 2), (2.01, 33)])
def test_part_of_an_epoch_is_rounded_up_to_steps_as_the_trainer_does(epochs: float, steps: int) -> None:
    recipe = resolved(training={"max_steps": -1, "num_train_epochs": epochs})
    assert plan(recipe, A100, step(), rows=1000).run.steps == steps, (
        "sixteen steps of 64 rows an epoch, the last one short"
    )


@pytest.mark.parametrize("active", [1000, 400, None])
def test_mfu_counts_the_parameters_that_a_token_uses(active: int | None) -> None:
    mixture = step()
    made = plan(resolved(), A100, replace(mixture, counts=replace(mixture.counts, active_parameters=active)))
    assert made.step_seconds is not None
    if active is None:
        assert made.mfu is None
        assert (
            "mfu: the model's configuration does not define the number of experts per token" in made.unknown
        )
    else:
        size = ModelDimensions(
            active,
            mixture.counts.trained_parameters,
            mixture.counts.layers,
            mixture.counts.attention_heads,
            mixture.counts.head_dim,
        )
        assert made.mfu == mfu(
            size, mixture.shapes.tokens, made.tokens_per_second_per_device or 0.0, A100.peak_flops("bf16")
        )


@pytest.mark.parametrize(
    ("shards", "told"),
    [(8, ""), (4, ""), (16, "the fullest of 16 ranks, with 1 of a layer's 8"), (6, "with 2 of")],
)
def test_experts_that_do_not_divide_over_the_ranks_are_named(shards: int, told: str) -> None:
    mixture = replace(
        step(topology=Topology(shard=shards)), facts=TraceFacts(config={"num_local_experts": 8})
    )
    named = [text for text in plan(resolved(), A100, mixture).assumptions if "experts" in text]
    assert len(named) == (1 if told else 0)
    assert not told or told in named[0]
    inside = replace(mixture, facts=replace(mixture.facts, experts_inside=True))
    assert not [text for text in plan(resolved(), A100, inside).assumptions if "experts" in text]


def test_every_plan_reports_its_errors() -> None:
    over: Plan = plan(resolved(gpus=16, machines=2), A100, step(topology=Topology(shard=16)))
    alone: Plan = plan(resolved(), A100, step())
    assert over.accuracy["step_seconds"] != alone.accuracy["step_seconds"]
    assert alone.accuracy["step_seconds"].rows > 0
    assert alone.accuracy["step_seconds"].median_percent <= 10
    assert over.accuracy["step_seconds"].median_percent <= 20


def test_every_dtype_of_a_merge_has_its_bytes() -> None:
    assert {"keep", *OF_OPTION} == set(get_args(MergedDtype))
    assert DTYPE_BYTES == {"bf16": 2, "fp16": 2, "fp32": 4}
