"""A model's configuration in a small form builds the same architecture class, for any architecture."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_tune.core.families import CHOSEN_EXPERTS
from fsdp_tune.core.small_config import EXPERTS, HEADS, HIDDEN_SIZE, scale_down_config
from tests.architectures.tiny import known
from tests.model.families import FAMILIES

CARRIED: dict[str, dict[str, Any]] = json.loads(
    resources.files("fsdp_tune.recipe").joinpath("model_configs.json").read_bytes()
)


@pytest.mark.parametrize("facts", [*CARRIED.values(), *FAMILIES.values()], ids=[*CARRIED, *FAMILIES])
def test_scaled_down_config_builds_for_any_architecture(facts: dict[str, Any]) -> None:
    fields = dict(facts)
    config = AutoConfig.for_model(
        fields.pop("model_type"), **{name: value for name, value in fields.items() if name != "architectures"}
    )
    small = scale_down_config(json.loads(config.to_json_string(use_diff=False)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(small.pop("model_type"), **small))
    without_vocabulary = (
        sum(p.numel() for p in model.parameters()) - 2 * model.config.vocab_size * HIDDEN_SIZE
    )
    assert without_vocabulary < 3_000_000
    assert type(model).__name__ == (facts.get("architectures") or [type(model).__name__])[0]


@pytest.mark.parametrize("name", ["bamba", "gemma4_text", "granitemoehybrid", "mamba2"])
def test_default_config_with_sizes_that_depend_on_each_other_scales_down(name: str) -> None:
    small = scale_down_config(AutoConfig.for_model(name).to_dict())
    AutoConfig.for_model(**small)


@pytest.mark.parametrize("name", known("bailing_hybrid", "deepseek_v3", "gptj", "plbart"))
def test_scaled_down_config_with_grouped_experts_or_own_names_of_sizes_computes(name: str) -> None:
    small = scale_down_config(AutoConfig.for_model(name).to_dict())
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small))
    assert model(input_ids=torch.arange(4)[None]).logits.isfinite().all()


@pytest.mark.parametrize("name", CHOSEN_EXPERTS.names)
def test_a_token_uses_at_most_the_experts_that_are_left(name: str) -> None:
    small = scale_down_config({"num_experts": 128, name: 8})
    assert (small["num_experts"], small[name]) == (4, 2)


def test_one_of_two_layers_is_dense_where_some_are() -> None:
    assert scale_down_config({"num_hidden_layers": 8, "mlp_only_layers": [0, 1, 2]})["mlp_only_layers"] == [0]
    assert scale_down_config({"num_hidden_layers": 8, "mlp_only_layers": []})["mlp_only_layers"] == []


def test_sizes_of_single_layers_follow_the_kept_layers() -> None:
    config = {
        "num_hidden_layers": 6,
        "head_dim": 256,
        "layer_types": ["sliding"] * 5 + ["full"],
        "per_layer_config": {"05": {"head_dim": 512}},
    }
    assert scale_down_config(config)["per_layer_config"] == {"1": {"head_dim": 16}}


def test_head_and_inner_size_ratios_are_kept() -> None:
    small = scale_down_config(CARRIED["meta-llama/Llama-2-70b-hf"])
    assert (small["num_attention_heads"], small["num_key_value_heads"]) == (HEADS, 1)
    assert small["intermediate_size"] / small["hidden_size"] == pytest.approx(28672 / 8192, abs=0.13)
    assert small["vocab_size"] == 32000


def test_each_type_of_layer_is_kept_once_and_in_order() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 5 + ["full_attention"]
    small = scale_down_config({"num_hidden_layers": 12, "hidden_size": 512, "layer_types": types})
    assert (small["num_hidden_layers"], small["layer_types"]) == (2, ["sliding_attention", "full_attention"])


def test_experts_and_latent_ranks_scale_down_and_null_is_kept() -> None:
    config = {
        "num_hidden_layers": 8,
        "hidden_size": 512,
        "num_local_experts": 64,
        "num_experts_per_tok": 8,
        "q_lora_rank": None,
    }
    small = scale_down_config(config)
    assert (small["num_local_experts"], small["num_experts_per_tok"], small["q_lora_rank"]) == (
        EXPERTS,
        2,
        None,
    )


def test_transformers_version_of_config_is_kept() -> None:
    """Else a field that no class declares would be refused as a typo."""
    assert (
        scale_down_config({"model_type": "qwen3_moe", "hidden_size": 64, "transformers_version": "5.23.0"})[
            "transformers_version"
        ]
        == "5.23.0"
    )
