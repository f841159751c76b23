"""Training LoRA adapters gives the trajectory of a plain loop with PEFT's own model on one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity import runs
from tests.parity.bench import Bench, assert_as_near_as_bf16, assert_follows_one_device
from tests.parity.cases import SHORT, Case

LORA = (("r", 4), ("lora_alpha", 4))
EXPERTS = (
    *LORA,
    ("target_modules", ("q_proj", "v_proj")),
    ("target_parameters", ("experts.gate_up_proj", "experts.down_proj")),
)
CASES = [
    Case(lora=LORA),
    Case(lora=LORA, ranks=4, strategy="HYBRID_SHARD", recomputation="full", accumulation=2),
    Case(lora=(*LORA, ("use_dora", True)), recomputation="full"),
    Case(lora=LORA, strategy="NO_SHARD", packed=True),
    Case(lora=LORA, strategy="SHARD_GRAD_OP", offload=True),
    Case(lora=LORA, resumed="other", packed=True, kernels=(("loss", "chunked"),)),
    Case(lora=LORA, kernels=(("compile", True),)),
    Case("qwen3", lora=LORA),
    Case(lora=LORA, recomputation="full", kernels=(("mlp_slice_tokens", 5),)),
    Case(lora=(*LORA, ("use_rslora", True), ("modules_to_save", ("lm_head",))), packed=True),
    Case("gpt2", lora=(*LORA, ("bias", "lora_only"))),
    Case(lora=(*LORA, ("target_modules", ("q_proj", "v_proj")), ("layers_to_transform", (1,)))),
    Case(lora=LORA, wrap="size"),
    Case(lora=LORA, wrap="none", recomputation="selective"),
    Case(lora=(*LORA, ("use_dora", True)), wrap="size", ranks=4, offload=True),
    Case(lora=(*LORA, ("target_modules", ("q_proj", "embed_tokens", "lm_head")))),
    Case("gpt2", lora=(*LORA, ("bias", "all")), strategy="NO_SHARD"),
    Case("mixtral", lora=(*LORA, ("target_modules", ("q_proj", "k_proj", "v_proj", "o_proj")))),
    Case("mixtral", lora=EXPERTS),
    Case("mixtral", lora=EXPERTS, ranks=4, strategy="HYBRID_SHARD", recomputation="full", packed=True),
    Case("mixtral", lora=EXPERTS, strategy="NO_SHARD", recomputation="selective", accumulation=2),
    Case("mixtral", lora=EXPERTS, wrap="size", offload=True, resumed="other"),
    Case(lora=LORA, fsdp=(("state_dict_type", "FULL_STATE_DICT"),), resumed="same"),
    Case(lora=LORA, fsdp=(("cpu_ram_efficient_loading", False),)),
    Case(lora=(*LORA, ("use_dora", True)), ranks=1, packed=True),
]
IN_BF16 = [
    # Trained positions are fp32, as is then the input of nn.LayerNorm, whose kernel on the CPU takes no bf16
    # weights with it.
    Case("gpt2", lora=(*LORA, ("modules_to_save", ("wpe",))), strategy="NO_SHARD", precision="bf16"),
    Case("gpt2", lora=(*LORA, ("target_modules", ("wpe", "c_attn"))), strategy="NO_SHARD", precision="bf16"),
    Case("gpt2", lora=LORA, strategy="NO_SHARD", precision="bf16"),
    Case("gpt2", lora=(*LORA, ("modules_to_save", ("wpe",))), precision="bf16", packed=True),
    Case(lora=LORA, precision="bf16"),
    Case("gpt2", lora=LORA, precision="bf16", recomputation="full"),
    Case(lora=LORA, strategy="NO_SHARD", precision="bf16", packed=True),
    Case("gpt2", lora=(*LORA, ("bias", "all")), strategy="NO_SHARD", precision="bf16", accumulation=2),
    Case("qwen3", lora=LORA, strategy="NO_SHARD", precision="bf16", recomputation="full"),
    Case(lora=(*LORA, ("use_dora", True)), precision="bf16", ranks=4, strategy="HYBRID_SHARD"),
    Case(
        lora=(*LORA, ("use_rslora", True), ("modules_to_save", ("lm_head",))),
        strategy="NO_SHARD",
        precision="bf16",
    ),
    Case(lora=LORA, strategy="SHARD_GRAD_OP", precision="bf16", offload=True),
    Case("mixtral", lora=EXPERTS, strategy="NO_SHARD", precision="bf16"),
    Case("mixtral", lora=EXPERTS, precision="bf16", packed=True),
    Case(lora=LORA, ranks=1, precision="bf16", packed=True),
]
BLOCKS = "llama-blocks"
IN_4_BITS = [
    Case(BLOCKS, lora=LORA, nf4="fp32", recomputation="full"),
    Case(BLOCKS, lora=LORA, nf4="bf16", ranks=4, strategy="HYBRID_SHARD", accumulation=2),
    Case(BLOCKS, lora=(*LORA, ("use_dora", True)), nf4="fp32", packed=True),
    Case(BLOCKS, lora=LORA, nf4="fp32", strategy="NO_SHARD"),
    Case(BLOCKS, lora=LORA, nf4="fp32", kernels=(("mlp_slice_tokens", 5),)),
    Case(BLOCKS, lora=LORA, nf4="fp32", strategy="SHARD_GRAD_OP", offload=True),
    Case(BLOCKS, lora=LORA, nf4="bf16", resumed="other", kernels=(("loss", "chunked"),)),
    Case(BLOCKS, lora=LORA, nf4="fp32", recomputation="selective", kernels=(("compile", True),)),
    Case(BLOCKS, lora=LORA, nf4="fp32", ranks=4, wrap="size"),
    Case(BLOCKS, lora=LORA, nf4="fp32", fsdp=(("cpu_ram_efficient_loading", False),)),
    Case(
        "mixtral-16", lora=(*LORA, ("target_modules", ("q_proj", "k_proj", "v_proj", "o_proj"))), nf4="fp32"
    ),
    Case(BLOCKS, lora=LORA, nf4="fp32", ranks=1, packed=True),
]


def with_first_shortened(cases: list[Case]) -> list[object]:
    """The first case in few steps, which every test run includes, and all of them for the slow tests."""
    first = replace(cases[0], steps=SHORT)
    return [
        pytest.param(first, id=str(first)),
        *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in cases),
    ]


@pytest.mark.ranks
@pytest.mark.slow  # over 4 bits: below
@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapters_follow_the_reference(case: Case, bench: Bench, record_property) -> None:
    run = assert_follows_one_device(case, bench, record_property, "LoRA in fp32 against PEFT on one device")
    # Nothing of the base is in a checkpoint.
    names = runs.saved_parameters(run, case.steps)
    assert all(".lora_" in name or "lm_head" in name or name.endswith("bias") for name in names)


@pytest.mark.ranks
@pytest.mark.slow  # half precision: test_matrix.py; adapters: below
@pytest.mark.parametrize("case", IN_BF16, ids=str)
def test_adapters_in_bf16_are_as_close_to_fp32_as_one_device(
    case: Case, bench: Bench, record_property
) -> None:
    assert_as_near_as_bf16(case, bench, record_property, "LoRA in bf16 against PEFT on one device in fp32")


@pytest.mark.ranks
@pytest.mark.parametrize("case", with_first_shortened(IN_4_BITS))
def test_adapters_over_4_bits_follow_the_reference_with_the_same_weights(
    case: Case, bench: Bench, record_property
) -> None:
    run = assert_follows_one_device(
        case, bench, record_property, "QLoRA in fp32 against PEFT on one device with the same 4-bit weights"
    )
    assert all(".lora_" in name for name in runs.saved_parameters(run, case.steps))
