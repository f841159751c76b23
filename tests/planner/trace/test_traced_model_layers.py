"""Few traced layers represent all layers only if they are equal; patterns are matched on the full model."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.loading.model_config import config_or_facts
from fsdp_tune.model.shard.fsdp_units import plan_units
from fsdp_tune.planner.predict.depth import Repeated, full_depth, repeated_layers
from fsdp_tune.planner.predict.memory import peak_memory
from fsdp_tune.planner.trace.cuda_kernels import CudaAttention
from fsdp_tune.planner.trace.traced_model import (
    container_of,
    layer_signatures,
    shallow_recipe,
    without_dropped,
)
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.planner.trace.tracing import trace_of

PARTS = ("", "self_attn.", "mlp.", "self_attn.q_proj.", "input_layernorm.")


def deep(
    layers: int, *, family: str = "llama", config: dict[str, Any] | None = None, **sections: Any
) -> Recipe:
    document = {
        "precision": {"mixed_precision": "bf16"},
        "data": {"train": [{"path": "x"}], "max_length": 64},
    } | sections
    fields = FAMILIES[family] | {"num_hidden_layers": layers} | (config or {})
    return recipe_of({"from_config": fields} | document.pop("model", {}), **document)


def chosen(recipe: Recipe) -> tuple[Repeated | None, list[Any]]:
    config, _ = config_or_facts(recipe)
    model = build_empty(recipe, config)
    groups = plan_units(recipe, model).groups
    signatures = layer_signatures(recipe, model, groups)
    return repeated_layers(signatures), signatures


def random_freeze(seed: int, layers: int) -> list[str]:
    """Patterns that freeze random parts of random stretches of layers; the same part of each layer of a
    stretch."""
    draw = random.Random(seed)
    patterns: list[str] = ["model.embed_tokens.*"] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        begin = draw.randrange(layers)
        end, every = draw.randint(begin, layers), draw.choice((1, 1, 2))
        part = draw.choice(PARTS)
        patterns += [f"model.layers.{index}.{part}*" for index in range(begin, end, every)]
    return patterns or ["model.norm.*"]


def test_dropped_layers_equal_their_representatives() -> None:
    layers, dropping = 24, 0
    for seed in range(20):
        found, signatures = chosen(deep(layers, model={"freeze": random_freeze(seed, layers)}))
        if found is None:
            continue
        dropping += 1
        stretch = signatures[found.first : found.first + found.period]
        assert all(
            signatures[index] == stretch[(index - found.first) % found.period] for index in found.dropped
        ), seed
        assert found.first >= 2, f"{seed}: two layers stay before the repeated ones"
        assert found.dropped.stop + 2 <= layers, f"{seed}: two layers stay behind the dropped ones"
    assert dropping > 10


@pytest.mark.parametrize(
    ("family", "config", "period"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0, 1, 2], "decoder_sparse_step": 1}, 1),
        ("qwen2_moe", {"decoder_sparse_step": 2}, 2),
        ("gemma3_text", {"layer_types": [*["sliding_attention"] * 3, "full_attention"] * 7}, 4),
        ("gpt2", {"n_layer": 28, "scale_attn_by_inverse_layer_idx": True}, 1),
    ],
)
def test_layer_period_is_detected(family: str, config: dict[str, Any], period: int) -> None:
    found, signatures = chosen(deep(28, family=family, config=config))
    assert found is not None
    assert found.period == period
    assert len(signatures) == 28


def test_unique_layers_are_traced() -> None:
    found, _ = chosen(deep(24, family="qwen2_moe", config={"mlp_only_layers": [20]}))
    assert found is not None
    assert 20 not in found.dropped


def same_peaks(shallow: Trace, exact: Trace) -> None:
    assert shallow.traced_layers < exact.traced_layers
    assert shallow.counts == exact.counts
    assert shallow.units == exact.units
    spliced, whole = peak_memory(full_depth(shallow)), peak_memory(exact)
    assert spliced.peak_allocated_bytes == whole.peak_allocated_bytes
    assert spliced.peak_reserved_bytes == whole.peak_reserved_bytes
    assert spliced.components == whole.components


@pytest.mark.parametrize(
    "sections",
    [
        {"fsdp": {"auto_wrap_policy": "NO_WRAP"}},
        pytest.param(
            {"fsdp": {"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": ["model.layers.*.mlp"]}},
            marks=pytest.mark.slow,
        ),
        pytest.param({"training": {"optim": "adagrad"}}, marks=pytest.mark.slow),
    ],
    ids=["one unit", "MLPs are units", "state that the optimizer creates at once"],
)
def test_memory_that_no_single_layer_allocates_is_planned_for_all_layers(sections: dict[str, Any]) -> None:
    recipe = deep(7, **sections)
    planned, exact = (peak_memory(full_depth(trace_of(recipe, exact=exact))) for exact in (False, True))
    assert planned.components == exact.components


@pytest.mark.slow
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(
            ["model.embed_tokens.*", *(f"model.layers.{index}.*" for index in range(4))], id="first layers"
        ),
        pytest.param(
            [f"model.layers.{index}.mlp.*" for index in range(9, 12)],
            id="only later layers",
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(random_freeze(seed, 12), id=f"random {seed}", marks=pytest.mark.slow)
            for seed in range(6)
        ),
    ],
)
def test_frozen_layers_are_planned_as_with_all_layers_traced(frozen: list[str]) -> None:
    recipe = deep(12, model={"freeze": frozen})
    exact = trace_of(recipe, exact=True)
    if chosen(recipe)[0] is None:
        assert trace_of(recipe).traced_layers == exact.traced_layers
    else:
        same_peaks(trace_of(recipe), exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fsdp",
    [
        {
            "auto_wrap_policy": "MODULE_NAMES_WRAP",
            "modules_to_wrap": ["model.layers.*", "model.layers.7.mlp"],
        },
        {"ignored_modules": r"model\.layers\.(9|10|11)\.input_layernorm"},
    ],
    ids=["wrapped by name", "ignored"],
)
def test_patterns_may_name_layers_that_are_not_traced(fsdp: dict[str, Any]) -> None:
    freeze = [f"model.layers.{index}.input_layernorm.*" for index in (9, 10, 11)]
    recipe = deep(18, fsdp=fsdp, model={"freeze": freeze})
    same_peaks(trace_of(recipe), trace_of(recipe, exact=True))


def test_patterns_become_the_names_of_the_kept_layers() -> None:
    wrapped = ["model.layers.*", "model.layers.19.mlp"]
    recipe = deep(20, fsdp={"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": wrapped})
    model = build_empty(recipe, config_or_facts(recipe)[0])
    groups = plan_units(recipe, model).groups
    repeated = repeated_layers(layer_signatures(recipe, model, groups))
    container = container_of(recipe, model)
    assert repeated is not None
    assert container == "model.layers"
    left = 20 - repeated.missing
    shallow = shallow_recipe(recipe, container, repeated, model, groups)
    kept = without_dropped(model, container, repeated)
    names = {name for group in plan_units(shallow, kept).groups for name in group}
    assert names == {f"model.layers.{index}" for index in range(left)} | {f"model.layers.{left - 1}.mlp"}


def test_flash_attention_is_planned_without_its_package() -> None:
    """Packed rows need no mask there, which torch's own kernel needs."""
    data = {"train": [{"path": "x"}], "max_length": 64, "packing": True}
    flash = trace_of(deep(2, data=data, model={"attn_implementation": "flash_attention_2"}))
    plain = trace_of(deep(2, model={"attn_implementation": "sdpa"}))
    masked = trace_of(deep(2, data=data, model={"attn_implementation": "sdpa"}))
    assert flash.facts.attention == ["flash"]
    assert masked.facts.attention != ["flash"]
    assert peak_memory(flash).peak_allocated_bytes - peak_memory(plain).peak_allocated_bytes <= 2 * 64 * 8, (
        "position ids"
    )


@pytest.mark.parametrize(
    ("written", "family"),  # mistral: windows, for which sdpa needs a mask
    [
        ("auto", "llama"),
        ("torch_varlen", "mistral"),
        pytest.param("auto", "mistral", marks=pytest.mark.slow),
        pytest.param("torch_varlen", "llama", marks=pytest.mark.slow),
    ],
)
def test_variable_length_attention_is_planned_without_a_gpu(written: str, family: str) -> None:
    data = {"train": [{"path": "x"}], "max_length": 64, "packing": True}
    recipe = deep(2, family=family, data=data, model={"attn_implementation": written})
    recipe = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"device": "cuda"})})
    assert trace_of(recipe).facts.attention == ["flash"]


def test_flash_kernels_of_a_model_without_sdpa_are_planned() -> None:
    """gpt-oss: its attention has sinks, which sdpa lacks, so that the class refuses it."""
    found = trace_of(
        deep(2, family="gpt_oss", model={"attn_implementation": "kernels-community/vllm-flash-attn3"})
    )
    assert found.facts.attention == ["flash"]


def test_flash_attention_of_a_model_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    from fsdp_tune.planner.trace.traced_model import build_traced

    monkeypatch.setattr(LlamaForCausalLM, "_supports_flash_attn", False)
    recipe = deep(2, model={"attn_implementation": "flash_attention_2"})
    with pytest.raises(FsdpTuneError, match="does not support FlashAttention"):
        build_traced(recipe, config_or_facts(recipe)[0], None)


def test_flex_attention_is_refused_with_the_reason() -> None:
    from fsdp_tune.planner.trace.traced_model import build_traced

    recipe = deep(2, model={"attn_implementation": "flex_attention"})
    with pytest.raises(
        FsdpTuneError, match="flex_attention` computes only in compiled code, which is not traced"
    ):
        build_traced(recipe, config_or_facts(recipe)[0], None)


@pytest.mark.parametrize(
    ("dtype", "key_heads", "declared", "masked", "kernel"),
    [
        (torch.bfloat16, 4, False, False, "flash"),
        (torch.bfloat16, 4, True, False, "flash"),
        (torch.bfloat16, 2, True, False, "flash"),
        # Falcon's one key for all heads, which it leaves to broadcasting
        (
            torch.bfloat16,
            1,
            False,
            False,
            "math",
        ),
        (torch.bfloat16, 4, False, True, "memory-efficient"),
        (torch.bfloat16, 2, True, True, "math"),
        (torch.float32, 4, True, False, "memory-efficient"),
        (torch.float32, 2, True, False, "math"),
        (torch.float32, 1, False, False, "math"),
    ],
)
def test_attention_has_the_kernel_that_cuda_selects(
    dtype: torch.dtype, key_heads: int, declared: bool, masked: bool, kernel: str
) -> None:
    """By `check_batch_size_and_num_heads_dense` of `sdp_utils_cpp.h`: no fused kernel broadcasts heads."""
    attention = CudaAttention()
    with FakeTensorMode():
        query, key, value = (torch.empty(2, heads, 16, 8, dtype=dtype) for heads in (4, key_heads, key_heads))
        mask = torch.ones(2, 1, 16, 16, dtype=torch.bool) if masked else None
        assert (
            attention.choose(query, key, value, mask, is_causal=not masked, enable_gqa=declared).shape
            == query.shape
        )
    assert attention.used == {kernel}
