"""Candidates of the search: the same training with another layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.planner.search.alternatives import (
    batch_changes,
    changed,
    differences,
    layouts,
    least_state_bytes,
    micro_batches,
)
from fsdp_tune.planner.search.candidates import ranks_of_machine
from fsdp_tune.planner.trace_format import Counts
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved


def test_every_micro_batch_makes_the_same_global_batch() -> None:
    recipe = resolved(gpus=8, global_batch=96)
    assert micro_batches(recipe) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    for micro, accumulation in micro_batches(recipe):
        other = changed(recipe, batch_changes(micro, accumulation))
        assert other is not None
        assert other.global_batch_size == 96
        assert differences(other, recipe).keys() <= {
            "training.per_device_train_batch_size",
            "training.gradient_accumulation_steps",
        }


def test_token_budget_is_searched_by_its_longest_rows_and_reported_in_tokens() -> None:
    recipe = resolved(gpus=8, global_batch=64, micro_batch=4, training={"per_device_train_batch_tokens": 512})
    smaller, same = changed(recipe, batch_changes(2, 4)), changed(recipe, batch_changes(4, 2))
    assert smaller is not None
    assert same is not None
    assert (smaller.global_batch_size, same.global_batch_size) == (64, 64)
    assert differences(recipe, smaller) == {"training.per_device_train_batch_tokens": 256}
    assert differences(recipe, same) == {}
    kept = changed(recipe, {"fsdp.sharding_strategy": "SHARD_GRAD_OP"})
    assert kept is not None
    assert kept.training == recipe.training


def test_keys_that_depend_on_a_change_are_resolved_again() -> None:
    other = changed(resolved(gpus=16, machines=2), {"fsdp.sharding_strategy": "HYBRID_SHARD"})
    assert other is not None
    assert (other.parallelism.dp_replicate_size, other.parallelism.dp_shard_size) == (2, 8)
    assert changed(other, {"fsdp.sharding_strategy": "FULL_SHARD"}) == changed(
        resolved(gpus=16, machines=2), {}
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"fsdp.sharding_strategy": "NO_SHARD", "fsdp.offload_params": True},  # contradicts itself
        {"parallelism.cp_size": 2},  # not in this release
        {"launch.num_processes": 9, "launch.num_machines": 2},  # does not divide
    ],
)
def test_recipe_that_train_would_refuse_is_not_a_candidate(changes: dict[str, object]) -> None:
    assert changed(resolved(), changes) is None


def test_hybrid_layouts_are_tried_over_machines_only() -> None:
    alone = {layout["fsdp.sharding_strategy"] for layout in layouts(resolved(), offload="nothing")}
    over = {
        layout["fsdp.sharding_strategy"]
        for layout in layouts(resolved(gpus=16, machines=2), offload="nothing")
    }
    assert alone == {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"}
    assert over - alone == {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}
    assert {layout["fsdp.sharding_strategy"] for layout in layouts(resolved(gpus=1), offload="nothing")} == {
        "FULL_SHARD"
    }


def test_coarse_units_are_replaced_by_decoder_layers() -> None:
    coarse = resolved(fsdp={"auto_wrap_policy": "NO_WRAP"})
    assert all(
        layout["fsdp.auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
        for layout in layouts(coarse, offload="nothing")
    )


def counts(parameter_bytes: int, trained: int) -> Counts:
    return replace(Hand().trace().counts, parameter_bytes=parameter_bytes, trained_parameters=trained)


def test_minimum_state_is_sixteen_bytes_per_parameter_over_shards() -> None:
    full = counts(4000, 1000)
    assert least_state_bytes(resolved(gpus=8), full) == 16 * 1000 / 8
    assert least_state_bytes(resolved(gpus=8, fsdp={"sharding_strategy": "NO_SHARD"}), full) == 16 * 1000
    assert least_state_bytes(resolved(gpus=8, model={"dtype": "bf16"}), counts(2000, 1000)) == 8 * 1000 / 8
    assert least_state_bytes(resolved(gpus=8, fsdp={"offload_params": True}), full) == 0


def test_minimum_state_depends_on_optimizer_and_trained_parameters() -> None:
    full = counts(4000, 1000)
    assert least_state_bytes(resolved(training={"optim": "sgd"}), full) == 8 * 1000 / 8
    blocks = 4 + 4 + 2 * (1 + 4 / 256)
    assert least_state_bytes(resolved(training={"optim": "adamw_torch_8bit"}), full) == blocks * 1000 / 8
    assert least_state_bytes(resolved(), counts(4 * 100 + 2 * 900, 100)) == (16 * 100 + 2 * 900) / 8, (
        "frozen ones are in the compute dtype"
    )


def test_minimum_state_counts_frozen_weights_in_4_bits_by_their_bytes() -> None:
    qlora = resolved(
        model={"from_config": None, "name_or_path": "meta-llama/Llama-3.1-8B"}, lora={}, quantization={}
    )
    assert least_state_bytes(qlora, counts(4 * 100 + 576 * 9 // 16, 100)) == (16 * 100 + 576 * 9 / 16) / 8


def test_machine_holds_no_fewer_ranks_than_the_recipe_has_on_it() -> None:
    card = find_hardware("A100-40GB")
    assert ranks_of_machine(resolved(gpus=4), card) == 8, "as the vendor's machine"
    assert ranks_of_machine(resolved(gpus=16, global_batch=64), card) == 16
    assert ranks_of_machine(resolved(gpus=8, machines=2), card) == 4
    assert ranks_of_machine(resolved(gpus=2), find_hardware("RTX4090")) == 8
