"""Training LoRA adapters gives the trajectory of a plain loop with PEFT's own model on one device."""

from __future__ import annotations

import pytest

from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.parity.compare import deviation, spread

LORA = (("r", 4), ("lora_alpha", 4))
EXPERTS = (*LORA, ("target_modules", ("q_proj", "v_proj")), ("target_parameters", ("experts.gate_up_proj", "experts.down_proj")))
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
FAST = CASES[:1]
IN_BF16 = [
    # Trained positions are fp32, as is then the input of nn.LayerNorm, whose kernel on the CPU takes no bf16 weights with it.
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
    Case(lora=(*LORA, ("use_rslora", True), ("modules_to_save", ("lm_head",))), strategy="NO_SHARD", precision="bf16"),
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
    Case("mixtral-16", lora=(*LORA, ("target_modules", ("q_proj", "k_proj", "v_proj", "o_proj"))), nf4="fp32"),
    Case(BLOCKS, lora=LORA, nf4="fp32", ranks=1, packed=True),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=[] if case in FAST else pytest.mark.slow) for case in CASES])
def test_adapters_follow_the_reference(case: Case, bench: Bench, record_property) -> None:
    found = deviation(bench.run(case), bench.reference(case.architecture, packed=case.packed, adapter=bench.adapter(case)))
    record_property("parity", found.row("LoRA in fp32 against PEFT on one device", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"
    # Nothing of the base is in a checkpoint.
    assert all(
        ".lora_" in name or "lm_head" in name or name.endswith("bias") for name in runs.saved_parameters(bench.run(case), runs.STEPS)
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in IN_BF16[:1] else pytest.mark.slow) for case in IN_BF16]
)
def test_adapters_in_bf16_are_as_close_to_fp32_as_one_device(case: Case, bench: Bench, record_property) -> None:
    alone = {
        precision: bench.reference(case.architecture, packed=case.packed, precision=precision, adapter=bench.adapter(case))
        for precision in ("no", "bf16")
    }
    found, limit = spread(runs.trajectory(bench.run(case)), alone["no"]), spread(alone["bf16"], alone["no"])
    record_property("parity", found.row("LoRA in bf16 against PEFT on one device in fp32", case, limit))
    assert max(found.loss / limit.loss, found.grad_norm / limit.grad_norm, found.parameters / limit.parameters) <= 2, (found, limit)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if case in IN_4_BITS[:1] else pytest.mark.slow) for case in IN_4_BITS]
)
def test_adapters_over_4_bits_follow_the_reference_with_the_same_weights(case: Case, bench: Bench, record_property) -> None:
    assert case.nf4 is not None
    base = bench.model_in_4_bits(case.architecture, case.nf4)
    alone = bench.reference(case.architecture, packed=case.packed, model=base, adapter=bench.adapter(case))
    found = deviation(bench.run(case), alone)
    record_property("parity", found.row("QLoRA in fp32 against PEFT on one device with the same 4-bit weights", case))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"
    assert all(".lora_" in name for name in runs.saved_parameters(bench.run(case), runs.STEPS))
