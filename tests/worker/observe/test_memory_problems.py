"""Out-of-memory reports: live components, and three changes to the recipe, for the largest component
first."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.units import GIB
from fsdp_tune.worker.observe.memory_problems import (
    REST,
    Host,
    Moment,
    _less_activation,
    device_problem,
    host_problem,
    sizes_in,
)  # type: ignore[attr-defined]
from tests.launch.mortal import CUDA_MESSAGE
from tests.launch.test_accelerate import resolved

STATE = {"parameters": 20 * GIB, "gradients": 20 * GIB, "optimizer state": 30 * GIB}
SIZES = {"requested": 2 * GIB, "capacity": 80 * GIB, "free": GIB, "allocated": 74 * GIB, "unused": GIB}
ACTIVATIONS = Moment("forward", 12, {"parameters": GIB}, SIZES)
MODEL_STATE = Moment("optimizer step", 0, STATE, SIZES)


def ways(tmp_path: Path, moment: Moment, *overrides: str) -> list[str]:
    """The keys that are proposed."""
    return [way.split(":")[0] for way in device_problem(resolved(tmp_path, *overrides), moment).ways_out]


def test_sizes_in_torch_message_are_parsed() -> None:
    assert sizes_in(CUDA_MESSAGE) == {
        "requested": 2 * GIB,
        "capacity": round(79.10 * GIB),
        "free": round(1.05 * GIB),
        "allocated": round(74.02 * GIB),
        "unused": round(1.01 * GIB),
    }
    assert sizes_in("CUDA error: out of memory") == {}


def test_live_components_are_sorted_and_sum_to_allocated() -> None:
    assert MODEL_STATE.live == {
        "optimizer state": 30 * GIB,
        "gradients": 20 * GIB,
        "parameters": 20 * GIB,
        REST: 4 * GIB,
    }
    assert ACTIVATIONS.live == {REST: 73 * GIB, "parameters": GIB}
    assert sum(MODEL_STATE.live.values()) == SIZES["allocated"]


def test_message_has_phase_size_and_components(tmp_path: Path) -> None:
    message = device_problem(resolved(tmp_path), ACTIVATIONS).message
    assert message == (
        "out of device memory in `forward`: 2.00 GiB requested on a device with 80.00 GiB; "
        f"live: {REST} 73.00 GiB, parameters 1.00 GiB; 1.00 GiB held but not used"
    )


def test_message_has_the_module_whose_forward_was_running(tmp_path: Path) -> None:
    moment = Moment("forward", 12, {}, SIZES, module="model.layers.3.mlp")
    assert device_problem(resolved(tmp_path), moment).message.startswith(
        "out of device memory in `forward`, in `model.layers.3.mlp`: 2.00 GiB"
    )
    assert moment.as_dict()["module"] == "model.layers.3.mlp"


def test_gathered_parameters_are_freed_before_anything_else_changes(tmp_path: Path) -> None:
    keys = (
        "fsdp.reshard_after_backward=false",
        "training.gradient_accumulation_steps=2",
        "training.global_batch_size=null",
    )
    for moment in (ACTIVATIONS, MODEL_STATE):
        assert ways(tmp_path, moment, *keys)[0] == "fsdp.reshard_after_backward"


def test_activation_changes_are_suggested_first(tmp_path: Path) -> None:
    assert ways(
        tmp_path, ACTIVATIONS, "training.per_device_train_batch_size=8", "precision.mixed_precision=no"
    ) == [
        "training.per_device_train_batch_size",
        "fsdp.activation_checkpointing",
        "precision.mixed_precision",
    ]


def test_token_budget_suggestion_is_half(tmp_path: Path) -> None:
    keys = (
        "data.max_length=512",
        "training.global_batch_size=64",
        "training.per_device_train_batch_tokens=2560",
    )
    assert ways(tmp_path, ACTIVATIONS, *keys)[0] == "training.per_device_train_batch_tokens"
    assert "training.per_device_train_batch_tokens: 1024 (now 2560)" in str(
        device_problem(resolved(tmp_path, *keys), ACTIVATIONS).ways_out
    )


def test_sharding_is_suggested_first_if_state_is_largest(tmp_path: Path) -> None:
    found = ways(
        tmp_path,
        MODEL_STATE,
        "fsdp.sharding_strategy=SHARD_GRAD_OP",
        "training.per_device_train_batch_size=8",
    )
    assert found == ["fsdp.sharding_strategy", "fsdp.offload_params", "training.per_device_train_batch_size"]


def test_keys_already_set_are_not_suggested(tmp_path: Path) -> None:
    keys = (
        "fsdp.activation_checkpointing=full",
        "training.per_device_train_batch_size=1",
        "precision.mixed_precision=bf16",
    )
    found = ways(tmp_path, ACTIVATIONS, *keys)
    assert found == ["fsdp.activation_checkpointing_offload", "data.max_length", "fsdp.offload_params"]


def test_three_changes_are_always_suggested(tmp_path: Path) -> None:
    keys = (
        "fsdp.sharding_strategy=NO_SHARD",
        "fsdp.activation_checkpointing=full",
        "precision.mixed_precision=bf16",
        "data.max_length=1",
    )
    assert len(ways(tmp_path, ACTIVATIONS, *keys[:3])) == 3


def test_fragmentation_and_phase_changes_come_first(tmp_path: Path) -> None:
    fragmented = Moment("forward", 3, {}, SIZES | {"unused": 20 * GIB})
    assert ways(tmp_path, fragmented)[0] == "launch.env"
    given = "launch.env={PYTORCH_ALLOC_CONF: 'expandable_segments:True'}"
    assert ways(tmp_path, fragmented, given)[0] != "launch.env"
    evaluating = Moment("evaluating", 3, {}, SIZES)
    assert (
        ways(tmp_path, evaluating, "training.per_device_eval_batch_size=8")[0]
        == "training.per_device_eval_batch_size"
    )
    saving = Moment("saving", 3, STATE, SIZES)
    assert ways(tmp_path, saving, "fsdp.state_dict_type=FULL_STATE_DICT")[0] == "fsdp.state_dict_type"


def test_evaluation_is_offered_nothing_that_only_a_backward_pass_needs(tmp_path: Path) -> None:
    keys = (
        "training.per_device_eval_batch_size=1",
        "training.per_device_train_batch_size=4",
        "training.gradient_accumulation_steps=2",
        "training.global_batch_size=null",
        "fsdp.reshard_after_backward=false",
    )
    found = ways(tmp_path, Moment("evaluating", 3, {}, SIZES), *keys)
    assert found == ["data.max_length", "launch.num_processes", "a device with more memory"]


def test_unknown_moment_is_still_reported(tmp_path: Path) -> None:
    problem = device_problem(resolved(tmp_path), Moment("loading the model", 0))
    assert problem.message == "out of device memory in `loading the model`: an allocation failed"
    assert len(problem.ways_out) == 3


@pytest.mark.parametrize(
    ("phase", "overrides", "first"),
    [
        ("loading the model", ("fsdp.cpu_ram_efficient_loading=false",), "fsdp.cpu_ram_efficient_loading"),
        ("saving", (), "checkpoint.async"),
        ("forward", ("checkpoint.async=false", "fsdp.offload_params=true"), "fsdp.offload_params"),
    ],
)
def test_host_suggestions_fit_the_phase(
    tmp_path: Path, phase: str, overrides: tuple[str, ...], first: str
) -> None:
    problem = host_problem(resolved(tmp_path, *overrides), phase, Host(3 * GIB, GIB, 64 * GIB))
    assert problem.message == (
        f"out of host memory in `{phase}`: this rank has held up to 3.00 GiB, 1.00 GiB of the "
        "machine's 64.00 GiB are left"
    )
    assert problem.ways_out[0].startswith(first)
    assert len(problem.ways_out) == 3


def test_refused_page_locked_memory_is_named_first(tmp_path: Path) -> None:
    problem = host_problem(resolved(tmp_path), "saving", Host(3 * GIB, None, None), page_locked=True)
    assert problem.message == (
        "out of host memory in `saving`: page-locked memory for copies to the device was refused, "
        "this rank has held up to 3.00 GiB"
    )


def test_activation_offload_is_suggested_or_withdrawn_by_exhausted_memory(tmp_path: Path) -> None:
    full = ("fsdp.activation_checkpointing=full", "checkpoint.async=false")
    assert any(
        way.text.startswith("fsdp.activation_checkpointing_offload: true (now false)")
        for way in _less_activation(resolved(tmp_path, *full))
    )
    offloaded = resolved(tmp_path, *full, "fsdp.activation_checkpointing_offload=true")
    assert not any("activation_checkpointing_offload" in way.text for way in _less_activation(offloaded))
    assert (
        host_problem(offloaded, "backward", Host(None, None, None))
        .ways_out[0]
        .startswith("fsdp.activation_checkpointing_offload: false")
    )


@pytest.mark.parametrize(
    "keys",
    [
        ("fsdp.ep_size=2", "fsdp.activation_checkpointing=full"),
        ("fsdp.version=1", "launch.device=cpu"),  # FSDP1 needs a GPU for it
    ],
)
@pytest.mark.parametrize("moment", [ACTIVATIONS, MODEL_STATE])
def test_changes_that_a_rule_refuses_are_not_suggested(
    tmp_path: Path, moment: Moment, keys: tuple[str, ...]
) -> None:
    found = ways(tmp_path, moment, *keys, "training.per_device_train_batch_size=1")
    assert not {"fsdp.offload_params", "fsdp.activation_checkpointing_offload"} & {*found}
    assert len(found) == 3
