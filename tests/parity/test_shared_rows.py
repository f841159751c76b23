"""Ranks that share each row (`parallelism.sp_size`) follow one device: runs, models of many families, and
models that are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.store import IGNORE_INDEX, Row
from fsdp_tune.model import packed_documents
from fsdp_tune.model.sequence_parallel import require_shareable_rows
from fsdp_tune.model.shard.process_groups import join_groups
from fsdp_tune.model.step import forward_backward
from fsdp_tune.worker.readback import isolation
from fsdp_tune.worker.readback.isolation import deviations, not_shareable
from fsdp_tune.worker.rows.batches import Collator
from tests.model.recipes import recipe_of
from tests.parity.bench import Bench, assert_as_near_as_bf16, assert_follows_one_device, bits
from tests.parity.cases import SHORT, Case
from tests.ranks import Ranks

_IN_SLICES = (("loss", "chunked"),)
_SYNC_ONCE = (("sync_each_batch", False),)
_BASE = Case("llama-16", sequence=2)
LORA = (("r", 4), ("lora_alpha", 4))
SHARED = [
    replace(_BASE, packed=True, recomputation="full", kernels=_IN_SLICES),
    replace(_BASE, ranks=4, accumulation=2, packed=True),
    _BASE,
    replace(_BASE, ranks=4, sequence=4, packed=True, recomputation="full", kernels=_IN_SLICES),
    replace(_BASE, ranks=4, sequence=4, recomputation="selective"),
    Case("llama-blocks", sequence=2, packed=True),
    Case("llama-blocks", ranks=4, sequence=4, packed=True, recomputation="selective"),
    replace(_BASE, strategy="SHARD_GRAD_OP", packed=True),
    replace(_BASE, ranks=4, strategy="HYBRID_SHARD", packed=True, accumulation=2),
    replace(_BASE, ranks=4, strategy="HYBRID_SHARD_ZERO2", recomputation="full"),
    replace(_BASE, strategy="NO_SHARD", packed=True, kernels=_IN_SLICES),
    replace(_BASE, ranks=4, strategy="NO_SHARD", accumulation=2),
    replace(_BASE, packed=True, recomputation="full", fsdp=(("activation_checkpointing_offload", True),)),
    replace(
        _BASE, packed=True, offload=True, fsdp=(("activation_checkpointing_every", 2),), recomputation="full"
    ),
    replace(_BASE, wrap="size", packed=True),
    replace(_BASE, wrap="none"),
    replace(_BASE, ranks=4, tokens=64),
    replace(_BASE, packed=True, fsdp=(("state_dict_type", "FULL_STATE_DICT"),), resumed="same"),
    replace(_BASE, ranks=4, packed=True, resumed="other"),
    replace(_BASE, ranks=4, sequence=4, resumed="shared", kernels=_IN_SLICES),
    replace(_BASE, sequence=1, packed=True, resumed="shared"),
    replace(_BASE, ranks=4, fsdp=(("reshard_after_forward", 2),)),
    replace(_BASE, packed=True, kernels=(("mlp_slice_tokens", 5),)),
    replace(_BASE, ranks=4, recomputation="full", kernels=(("mlp_slice_tokens", 5), *_IN_SLICES)),
    replace(_BASE, ranks=4, accumulation=2, packed=True, fsdp=_SYNC_ONCE),
    replace(_BASE, ranks=4, strategy="HYBRID_SHARD", accumulation=2, fsdp=_SYNC_ONCE),
    replace(_BASE, ranks=4, strategy="NO_SHARD", accumulation=2, packed=True, fsdp=_SYNC_ONCE),
    Case("mixtral", sequence=2, packed=True, kernels=_IN_SLICES),
    Case("mixtral-balanced", sequence=2, packed=True, recomputation="full"),
    Case("mixtral-balanced", ranks=4, sequence=2, accumulation=2),
]
FAST = [
    replace(
        _BASE, ranks=4, accumulation=2, packed=True, recomputation="full", kernels=_IN_SLICES, steps=SHORT
    ),
]
SECTION = "ranks that share rows"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in SHARED)], ids=str
)
def test_run_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    assert_follows_one_device(case, bench, record_property, SECTION)


@pytest.mark.slow
@pytest.mark.ranks
def test_run_resumed_on_as_many_ranks_a_row_is_bitwise_equal(bench: Bench) -> None:
    assert bits(replace(_BASE, packed=True, resumed="shared"), bench) == bits(
        replace(_BASE, packed=True), bench
    )


SMOOTHED = replace(_BASE, packed=True, training=(("label_smoothing_factor", 0.1),))


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("case", [SMOOTHED, replace(SMOOTHED, ranks=4, kernels=_IN_SLICES)], ids=str)
def test_label_smoothing_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    """Evaluation is without smoothing in both."""
    assert_follows_one_device(case, bench, record_property, SECTION)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    "case",
    [
        replace(_BASE, lora=LORA, packed=True, recomputation="full"),
        replace(_BASE, ranks=4, strategy="HYBRID_SHARD", lora=(*LORA, ("use_dora", True))),
        replace(_BASE, lora=LORA, resumed="other", packed=True),
        replace(_BASE, lora=LORA, packed=True, recomputation="full", kernels=(("mlp_slice_tokens", 5),)),
        Case("llama-blocks", sequence=2, lora=LORA, nf4="fp32", packed=True, recomputation="full"),
        Case(
            "llama-blocks",
            ranks=4,
            sequence=2,
            lora=(*LORA, ("use_dora", True)),
            nf4="bf16",
            strategy="HYBRID_SHARD",
        ),
    ],
    ids=str,
)
def test_adapters_follow_the_reference(case: Case, bench: Bench, record_property) -> None:
    assert_follows_one_device(case, bench, record_property, SECTION)


@pytest.mark.slow
@pytest.mark.ranks
def test_half_precision_run_is_as_close_to_fp32_as_one_device(bench: Bench) -> None:
    case = replace(_BASE, packed=True, precision="bf16", recomputation="full")
    assert_as_near_as_bf16(case, bench, lambda name, row: None, SECTION)


VOCABULARY = 96
_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}
_SLIDING = {"sliding_window": 12}
_MIXED_LAYERS = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("sdpa", {"num_key_value_heads": 1}),
    "qwen3": ("sdpa", {"head_dim": 16}),
    "mistral": ("sdpa", _SLIDING),
    "phi3": ("sdpa", {}),
    "olmo2": ("eager", {}),
    "starcoder2": ("sdpa", {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "gemma2": ("eager", {"head_dim": 16, **_SLIDING}),
    "gemma3_text": ("sdpa", {"head_dim": 16, **_MIXED_LAYERS}),
    "gpt2": ("sdpa", _NO_DROPOUT),
    "gpt_neox": ("sdpa", {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
    "gpt_oss": ("eager", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING}),
    "qwen3_moe": ("sdpa", {"head_dim": 16, "num_experts": 4, **_FEW_EXPERTS}),
    "deepseek_v3": (
        "sdpa",
        {
            **_LATENT,
            **_FEW_EXPERTS,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def model_of(kind: str, kernel: str, fields: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=VOCABULARY, pad_token_id=0, **(_SMALL | fields))
    return AutoModelForCausalLM.from_config(config, attn_implementation=kernel, dtype=torch.float32)


def packed_rows(tokens: int = 64) -> list[Row]:
    """Rows whose examples cross the borders of ranks; of the first row the last rank has no target."""
    draw = torch.Generator().manual_seed(3)
    rows: list[Row] = []
    for index, lengths in enumerate([(tokens,), (9, 18, 14, 15, 8), (33, 31)]):
        ids = torch.randint(1, VOCABULARY, (sum(lengths),), generator=draw).numpy()
        labels = ids.copy()
        labels[[0, *[sum(lengths[:at]) for at in range(1, len(lengths))]]] = IGNORE_INDEX
        if index == 0:
            labels[tokens // 4 :] = IGNORE_INDEX
        rows.append(Row(ids, labels, lengths, index))
    return rows


def differences_of_a_step() -> dict[str, float]:
    """On a rank of two: for each family the largest relative difference of a gradient and of the loss from
    one process."""
    recipe = recipe_of(precision={"mixed_precision": "no"})
    rows = packed_rows()
    found: dict[str, float] = {}
    for kind, (kernel, fields) in FAMILIES.items():
        # transformers makes gpt-oss's masks without position ids, so that its packed examples see each other
        # on one device.
        batch = Collator(0, 8)([rows[0], rows[0]] if kind == "gpt_oss" else rows).tensors
        alone, shared = (model_of(kind, kernel, fields).train() for _ in range(2))
        join_groups(shared, {"sequence": dist.group.WORLD})
        _, expected = forward_backward(recipe, alone, batch, 1.0)
        _, loss = forward_backward(recipe, shared, batch, 1.0)
        dist.all_reduce(loss)
        differences = [abs(float(loss / expected) - 1)]
        for (name, parameter), other in zip(alone.named_parameters(), shared.parameters(), strict=True):
            # a key's bias has no gradient but rounding
            if parameter.grad is not None and "k_proj.bias" not in name:
                dist.all_reduce(other.grad)
                differences.append(
                    float((other.grad - parameter.grad).norm() / parameter.grad.norm().clamp(min=1e-6))
                )
        found[kind] = max(differences)
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_step_of_many_families_equals_one_process(on_ranks: Ranks) -> None:
    found = on_ranks.run(2, differences_of_a_step)[0]
    assert max(found.values()) <= 2e-5, {kind: f"{value:.1e}" for kind, value in found.items()}


RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {"num_hidden_layers": 2},
    "qwen3_next": {
        "head_dim": 16,
        "num_experts": 4,
        "layer_types": ["linear_attention", "full_attention"],
        **_FEW_EXPERTS,
    },
}


def errors_when_shared() -> dict[str, str | None]:
    recipe = recipe_of(precision={"mixed_precision": "no"}, parallelism={"sp_size": 2})
    rows = packed_rows()[:1] * 2
    found: dict[str, str | None] = {}
    for kind, fields in {"llama": {}, **RECURRENT}.items():
        model = model_of(kind, "eager" if kind == "mamba" else "sdpa", fields)
        join_groups(model, {"sequence": dist.group.WORLD})
        error = not_shareable(
            deviations(recipe, model, rows, Collator(0, 8), torch.device("cpu")), recipe, model
        )
        found[kind] = None if error is None else str(error)
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_models_that_look_across_tokens_outside_of_attention_are_refused(on_ranks: Ranks) -> None:
    found = on_ranks.run(2, errors_when_shared)[0]
    assert found.pop("llama") is None
    assert [
        kind
        for kind, error in found.items()
        if "layers besides attention that look across tokens" not in str(error)
    ] == []


def deviations_over_borders() -> tuple[float, float]:
    """On a rank of two: deviations of a complete packed row, without and with a leak over a late border."""
    recipe = recipe_of(precision={"mixed_precision": "no"}, parallelism={"sp_size": 2})
    model, row = model_of("llama", "sdpa", {}), packed_rows()[1]
    join_groups(model, {"sequence": dist.group.WORLD})
    numbers, found = packed_documents.example_numbers, list[float]()
    # so that logits of a part of each example are compared
    with patch.object(isolation, "BATCH_TOKENS", 24):
        for leak in (False, True):
            with patch.object(
                packed_documents,
                "example_numbers",
                lambda ids, leak=leak: numbers(ids).clamp(max=2 if leak else None, min=0),
            ):
                rows = [row] * 2
                cut = isolation.rows_to_check(rows, 2)  # type: ignore[arg-type]
                result = deviations(recipe, model, cut, Collator(0, 8), torch.device("cpu"), row)
                found.append(result.packed or 0.0)
    return found[0], found[1]


@pytest.mark.ranks
def test_borders_of_shared_rows_are_measured_by_the_ranks_that_hold_them(on_ranks: Ranks) -> None:
    found = on_ranks.run(2, deviations_over_borders)
    assert max(kept for kept, _ in found) <= isolation.ALLOWED["fp32"]
    assert max(leaks for _, leaks in found) > 1e-3


@pytest.mark.parametrize(
    ("kind", "size", "fields", "words"),
    [
        ("llama", 8, {}, "its 4 attention heads do not divide by 8"),
        ("lfm2", 2, RECURRENT["lfm2"], "`model.layers.0.conv` (Lfm2ShortConv) reads earlier tokens itself"),
        ("bloom", 2, {}, "BloomForCausalLM does not use transformers' attention interface in every layer"),
        ("doge", 2, {}, "DogeAttention takes its attention kernel from a table of its own"),
        ("gpt2", 2, {}, "it has dropout (attn_pdrop, embd_pdrop, resid_pdrop)"),
        ("llama", 2, {"attention_dropout": 0.1}, "it has dropout (attention_dropout)"),
    ],
)
def test_model_whose_rows_cannot_be_shared_is_refused_before_loading(
    kind: str, size: int, fields: dict[str, Any], words: str
) -> None:
    with torch.device("meta"):
        model = model_of(kind, "eager", fields)
    recipe = recipe_of(ranks=size, parallelism={"sp_size": size})
    with pytest.raises(FsdpTuneError) as caught:
        require_shareable_rows(recipe, model)
    assert caught.value.problems[0].code == "rows-not-shareable"
    assert words in caught.value.problems[0].message
    require_shareable_rows(recipe_of(), model)
