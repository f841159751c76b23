"""Ranks that divide the experts (`fsdp.ep_size`) follow one device, and resume on another division and
world."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load
from transformers import AutoModelForCausalLM

from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.run.directory import RunDir
from tests.parity import runs
from tests.parity.bench import Bench, assert_as_near_as_bf16, assert_follows, assert_follows_one_device
from tests.parity.cases import SHORT, Case


def ep(size: int, **others: Any) -> tuple[tuple[str, Any], ...]:
    return (("ep_size", size), *others.items())


SECTION = "expert parallelism"
_BASE = Case("mixtral-divided", fsdp=ep(2))
_LORA = (("r", 4), ("lora_alpha", 4), ("target_modules", ("q_proj", "k_proj", "v_proj", "o_proj")))
_OF_EXPERTS = (
    ("r", 4),
    ("lora_alpha", 4),
    ("target_modules", ()),
    ("target_parameters", ("experts.gate_up_proj", "experts.down_proj")),
)
_WITH_EXPERTS = (*_OF_EXPERTS[:2], ("target_modules", ("q_proj", "v_proj")), _OF_EXPERTS[3])
_QWEN, _OSS, _DEEPSEEK = (
    Case("qwen2-moe-divided", fsdp=ep(2)),
    Case("gpt-oss-divided", fsdp=ep(2)),
    Case("deepseek-divided", fsdp=ep(2)),
)
CASES = [
    _BASE,
    replace(_BASE, accumulation=2, packed=True, recomputation="full", kernels=(("loss", "chunked"),)),
    replace(_BASE, ranks=4, packed=True, accumulation=2),
    replace(_BASE, ranks=4, fsdp=ep(4, activation_checkpointing_every=2), recomputation="full"),
    replace(_BASE, strategy="SHARD_GRAD_OP", packed=True, recomputation="full"),
    replace(_BASE, ranks=4, strategy="HYBRID_SHARD", accumulation=2),
    replace(_BASE, ranks=4, strategy="HYBRID_SHARD_ZERO2", packed=True),
    replace(_BASE, ranks=4, tokens=64),
    replace(_BASE, accumulation=2, fsdp=ep(2, sync_each_batch=False)),
    replace(
        _BASE,
        accumulation=2,
        fsdp=ep(2, reshard_after_backward=False, forward_prefetch=1, backward_prefetch=2),
    ),
    replace(_BASE, fsdp=ep(2, cpu_ram_efficient_loading=False)),
    replace(_BASE, fsdp=ep(2, state_dict_type="FULL_STATE_DICT"), resumed="same"),
    replace(_BASE, ranks=4, resumed="other", packed=True),
    replace(_BASE, kernels=(("experts", "eager"),), packed=True),
    replace(_BASE, kernels=(("experts", "batched_mm"),)),
    replace(_BASE, lora=_LORA, packed=True, recomputation="full"),
    replace(_BASE, lora=_WITH_EXPERTS),
    replace(_BASE, ranks=4, lora=_WITH_EXPERTS, packed=True, recomputation="full", accumulation=2),
    replace(_BASE, ranks=4, fsdp=ep(4), lora=_OF_EXPERTS, packed=True, recomputation="full"),
    replace(_BASE, ranks=4, strategy="HYBRID_SHARD", lora=_WITH_EXPERTS, tokens=64),
    replace(_BASE, lora=_OF_EXPERTS, kernels=(("experts", "eager"),), fsdp=ep(2, forward_prefetch=1)),
    replace(_BASE, ranks=4, lora=_WITH_EXPERTS, resumed="other"),
    replace(_QWEN, ranks=4, recomputation="full", packed=True, accumulation=2),
    replace(_QWEN, ranks=4, fsdp=ep(4), kernels=(("experts", "eager"),)),
    _OSS,
    replace(_OSS, ranks=4, fsdp=ep(4), recomputation="full", packed=True),
    replace(_OSS, lora=_WITH_EXPERTS, recomputation="full", packed=True),
    replace(_DEEPSEEK, ranks=4, recomputation="full"),
    replace(_DEEPSEEK, ranks=4, fsdp=ep(4), accumulation=2, packed=True),
    replace(_DEEPSEEK, ranks=4, lora=_OF_EXPERTS, recomputation="full"),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_run_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    assert_follows_one_device(case, bench, record_property, SECTION)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        replace(_BASE, precision="bf16", accumulation=2, packed=True),
        replace(_OSS, precision="bf16"),
        replace(_OSS, precision="bf16", ranks=4, fsdp=ep(4), recomputation="full", packed=True),
        replace(_OSS, precision="bf16", kernels=(("experts", "eager"),)),
        replace(_BASE, precision="bf16", lora=_WITH_EXPERTS, packed=True, recomputation="full"),
    ],
    ids=str,
)
def test_run_in_bf16_is_as_near_as_one_device(case: Case, bench: Bench) -> None:
    assert_as_near_as_bf16(case, bench, lambda name, row: None, SECTION)


def resumed(bench: Bench, case: Case, donor: RunDir, step: int) -> RunDir:
    run = bench.prepared_run(replace(case, resumed="no"))
    runs.resume_from(run, donor, step)
    runs.train(bench.on_ranks, run, case.ranks)
    return run


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("lora", [(), _WITH_EXPERTS], ids=["full", "adapters of experts"])
def test_run_resumed_on_another_division_and_world_follows_the_reference(
    lora: tuple[tuple[str, Any], ...], bench: Bench, record_property
) -> None:
    """4 ranks that divide the experts, then 2, then one with all of them; and from one back to 4."""
    for sizes in ((4, 2, 1), (1, 4, 2)):
        cases = [
            replace(_BASE, ranks=size, fsdp=ep(size), lora=lora, steps=SHORT, training=(("save_steps", 3),))
            for size in sizes
        ]
        run = bench.run(cases[0])
        for case, step in zip(cases[1:], (3, 6), strict=True):
            run = resumed(bench, case, run, step)
        assert_follows(run, bench.reference_of(cases[0]), cases[-1], record_property, SECTION)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("lora", [(), _WITH_EXPERTS], ids=["full", "adapters of experts"])
def test_checkpoints_of_any_division_merge_to_the_same_bytes(
    lora: tuple[tuple[str, Any], ...], bench: Bench, tmp_path: Path
) -> None:
    """A step with a learning rate of 0 leaves the weights, so each merge is the model that the run started
    from."""
    still = (("learning_rate", 0.0), ("max_steps", 1), ("save_steps", 1), ("eval_steps", 1))
    whole = {"state_dict_type": "FULL_STATE_DICT"}
    divisions = [(2, ep(1)), (2, ep(2)), (4, ep(2)), (4, ep(4)), (2, ep(2, **whole))]
    adapter = bench.adapter(replace(_BASE, lora=lora)) if lora else None
    config = None if adapter is None else adapter / "adapter_config.json"
    merged: list[bytes] = []
    for index, (ranks, fsdp) in enumerate(divisions):
        run = bench.run(replace(_BASE, ranks=ranks, fsdp=fsdp, lora=lora, training=still))
        options = MergeOptions(tmp_path / str(index), dtype="fp32", verify="none", adapter_config=config)
        output = merge_checkpoint(run.checkpoint(1), options).output
        merged.append((output / "model.safetensors").read_bytes())
    assert all(each == merged[0] for each in merged)
    start: Any = AutoModelForCausalLM.from_pretrained(bench.model(_BASE.architecture), dtype=torch.float32)
    if adapter is None:
        state = start.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in load(merged[0]).items())
        return
    state = PeftModel.from_pretrained(start, adapter).merge_and_unload().state_dict()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "0", dtype=torch.float32).state_dict()
    torch.testing.assert_close(written, state, rtol=1e-6, atol=1e-6)
