"""What `fsdp.ep_size` was not shown to train is refused by name, with the other key; what it was shown to
train is not."""

from __future__ import annotations

import pytest

from tests.planner.recipes import resolved
from tests.recipe.loading import load_with, problems_with

REFUSED = [
    ("fsdp: {ep_size: 2, version: 1}", "`fsdp.version: 1`"),
    ("fsdp: {ep_size: 2, sharding_strategy: NO_SHARD}", "NO_SHARD"),
    ("fsdp: {ep_size: 2}\nparallelism: {sp_size: 2}", "`parallelism.sp_size: 2`"),
    ("fsdp: {ep_size: 2, auto_wrap_policy: SIZE_BASED_WRAP}", "SIZE_BASED_WRAP"),
    ("fsdp: {ep_size: 2, ignored_modules: lm_head}", "`fsdp.ignored_modules`"),
    ("fsdp: {ep_size: 2, reshard_after_forward: 2}", "`fsdp.reshard_after_forward: 2` (ranks)"),
    ("fsdp: {ep_size: 2, offload_params: true}", "`fsdp.offload_params: true`"),
    ("fsdp: {ep_size: 2, activation_checkpointing: selective}", "selective"),
    (
        "fsdp: {ep_size: 2, activation_checkpointing: full, activation_checkpointing_offload: true}",
        "_offload: true`",
    ),
    ("fsdp: {ep_size: 2}\nprecision: {mixed_precision: fp8}", "`precision.mixed_precision: fp8`"),
    ("fsdp: {ep_size: 2}\nprecision: {mixed_precision: fp16}", "`precision.mixed_precision: fp16`"),
    ("fsdp: {ep_size: 2}\nprecision: {reduce_dtype: fp16}", "`precision.reduce_dtype: fp16`"),
    ("fsdp: {ep_size: 2}\nkernels: {compile: true}", "`kernels.compile: true`"),
    ("fsdp: {ep_size: 2}\nlaunch: {device: cuda}\nkernels: {liger: true}", "`kernels.liger: true`"),
    (
        "fsdp: {ep_size: 2}\nlaunch: {device: cuda}\nkernels: {experts: sonicmoe}",
        "`kernels.experts: sonicmoe`",
    ),
    ("fsdp: {ep_size: 2}\nkernels: {mlp_slice_tokens: 512}", "`kernels.mlp_slice_tokens: 512`"),
    ("fsdp: {ep_size: 2}\nlora: {}\nquantization: {}", "`quantization`"),
    ("fsdp: {ep_size: 2}\nquantization: {train: int4}", "`quantization`"),
    ("fsdp: {ep_size: 2}\ntraining: {optim: muon}", "`training.optim: muon`"),
    ("fsdp: {ep_size: 2}\ntraining: {optim: sgd}", "`training.optim: sgd`"),
    ("fsdp: {ep_size: 2}\ntraining: {optim: adamw_torch_8bit}", "`training.optim: adamw_torch_8bit`"),
    ('fsdp: {ep_size: 2}\ntraining: {optim_args: "state_dtype=bf16"}', "`state_dtype`"),
]
TAKEN = [
    "fsdp: {ep_size: 2, activation_checkpointing: full, sharding_strategy: SHARD_GRAD_OP, "
    "reshard_after_backward: false}",
    "fsdp: {ep_size: 2, activation_checkpointing: auto, reshard_after_backward: auto}",
    "fsdp: {ep_size: 2}\nlora: {}",
    "fsdp: {ep_size: 2}\nlora: {target_parameters: [experts.down_proj]}",
    "fsdp: {ep_size: 2}\nkernels: {experts: eager}",
]


@pytest.mark.parametrize(("text", "what"), REFUSED, ids=[text.replace("\n", ", ") for text, _ in REFUSED])
def test_combination_that_was_not_shown_is_refused_by_name(text: str, what: str) -> None:
    found = [
        problem for problem in problems_with(text) if "`fsdp.ep_size: 2` does not support" in problem.message
    ]
    assert [(problem.code, what in problem.message, bool(problem.hint)) for problem in found] == [
        ("contradiction", True, True)
    ]


def open_files(ranks: int, **fsdp: object) -> int:
    return resolved(gpus=ranks, fsdp=fsdp).open_files_needed


def test_groups_of_the_experts_mesh_need_open_files() -> None:
    """Its dimensions, each with the connections of a group; as for shards that fewer ranks share after the
    forward."""
    assert open_files(8, ep_size=2) == open_files(8) + 2 * 8
    assert (
        open_files(8, ep_size=2, sharding_strategy="HYBRID_SHARD")
        == open_files(8, sharding_strategy="HYBRID_SHARD") + 3 * 8
    )
    assert open_files(8, reshard_after_forward=2) == open_files(8) + 2 * 8


@pytest.mark.parametrize("text", TAKEN)
def test_combination_that_was_shown_is_taken(text: str) -> None:
    assert load_with(text).recipe.fsdp.ep_size == 2
