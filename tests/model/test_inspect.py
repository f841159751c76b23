"""Findings about a model before a rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.model_files import ModelInspection
from tests.model.families import FAMILIES, XLNET
from tests.model.recipes import lora_recipe, recipe_of

OPT, LLAMA = FAMILIES["opt"], FAMILIES["llama"]
BART = {
    "model_type": "bart",
    "vocab_size": 256,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "is_decoder": True,
    "is_encoder_decoder": False,
}


def codes(model: str | dict[str, Any], max_length: int) -> tuple[list[str], list[str]]:
    section = {"from_config": model} if isinstance(model, dict) else model
    document = find_facts(recipe_of(section, data={"train": [{"path": "x"}], "max_length": max_length}))
    return [each.code for each in document.problems], [each.code for each in document.notices]


@pytest.mark.parametrize("model", ["gpt2", OPT], ids=["gpt2", "opt"])
def test_row_beyond_the_table_of_positions_is_refused(model: str | dict[str, Any]) -> None:
    assert codes(model, 128) == ([], [])
    assert codes(model, 129) == (["max-length-beyond-positions"], [])


def test_row_beyond_the_trained_positions_is_reported() -> None:
    assert codes(LLAMA, 128) == ([], [])
    assert codes(LLAMA, 129) == ([], ["positions-never-trained"])


def document_of(model: dict[str, Any], **sections: Any) -> ModelInspection:
    return find_facts(
        recipe_of({"from_config": model, **sections}, data={"train": [{"path": "x"}], "max_length": 64})
    )


@pytest.mark.parametrize(
    ("model", "field"), [(OPT, "layerdrop"), (BART, "decoder_layerdrop")], ids=["opt", "bart"]
)
def test_model_that_skips_layers_at_random_is_refused(model: dict[str, Any], field: str) -> None:
    [problem] = document_of(model | {field: 0.25}).problems
    assert problem.code == "layerdrop-not-supported"
    assert f"`{field}: 0.25`" in problem.message
    assert problem.hint.startswith(f"--set model.config_overrides.{field}=0.0")
    assert document_of(model | {field: 0.25}, config_overrides={field: 0.0}).problems == ()


def test_frequencies_fixed_beyond_the_original_positions_are_reported() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    notices = {
        max_positions: document_of(
            {**LLAMA, "max_position_embeddings": max_positions, "rope_parameters": rope}
        ).notices
        for max_positions in (32, 64)
    }
    assert [notice.code for notice in notices[32]] == ["positions-never-trained", "rotary-frequencies-fixed"]
    assert notices[64] == ()


def test_unlimited_positions_are_none() -> None:
    document = document_of(XLNET)
    assert document.facts is not None
    assert document.facts.max_positions is None
    assert document.notices == ()


def test_kernel_that_a_model_lacks_is_refused_at_its_key() -> None:
    bloom = FAMILIES["bloom"]
    [problem] = document_of(bloom, attn_implementation="sdpa").problems
    assert (problem.code, problem.where.key) == ("model-refused", "model.attn_implementation")
    assert problem.hint.startswith("`auto` chooses")
    assert len(problem.message) < 200
    with pytest.raises(FsdpTuneError, match="transformers rejects this model"):
        build_empty(recipe_of({"from_config": bloom, "attn_implementation": "sdpa"}))


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ([], "mlp.experts.gate_up_proj, mlp.experts.down_proj of"),
        (["gate_up_proj"], "mlp.experts.down_proj of"),
        (["gate_up_proj", "down_proj"], None),
    ],
)
def test_experts_without_adapters_are_reported(
    parameters: list[str], names: str | None, tmp_path: Path
) -> None:
    notices = find_facts(lora_recipe(tmp_path, {"r": 4, "target_parameters": parameters}, "mixtral")).notices
    found = [each.message for each in notices if each.code == "lora-experts-frozen"]
    assert len(found) == (names is not None)
    assert all(
        message.startswith(str(names)) and "`lora.target_parameters` adapts them" in message
        for message in found
    )


def test_refused_adapters_bring_no_problem_of_a_training_without_adapters(tmp_path: Path) -> None:
    """A base in 4 bits is trained only with adapters, and groups may be of their parameters."""
    nf4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    sections: dict[str, Any] = {
        "data": {"train": [{"path": "x"}], "max_length": 64},
        "quantization": {"scales": "fp32"},
        "merge": {"adapter": "adapter"},
        "training": {"parameter_groups": [{"match": ["*lora_B*"], "learning_rate": 1e-3}]},
    }
    recipe = lora_recipe(
        tmp_path, {"r": 4, "target_modules": ["qq"]}, LLAMA | {"quantization_config": nf4}, **sections
    )
    assert [each.code for each in find_facts(recipe).problems] == ["lora-target"]


def test_target_that_matches_nothing_hides_no_problem_of_the_base(tmp_path: Path) -> None:
    recipe = lora_recipe(
        tmp_path,
        {"r": 4, "target_modules": ["qq"]},
        "opt",
        data={"train": [{"path": "x"}], "max_length": 129},
    )
    assert [each.code for each in find_facts(recipe).problems] == [
        "lora-target",
        "max-length-beyond-positions",
    ]
