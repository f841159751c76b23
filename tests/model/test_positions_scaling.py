"""`model.rope_scaling`: the frequencies are transformers' own, and a scaling that contradicts the model is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

ORIGINAL = 64
LLAMA = FAMILIES["llama"] | {"max_position_embeddings": ORIGINAL}
GEMMA3 = FAMILIES["llama"] | {
    "model_type": "gemma3_text",
    "max_position_embeddings": ORIGINAL,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 16,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "factor": 4.0}


def scaled(
    scaling: dict[str, Any],
    model: dict[str, Any] = LLAMA,
    *,
    max_length: int = 4 * ORIGINAL,
    **model_keys: Any,
) -> Recipe:
    return recipe_of(
        {"from_config": model, "rope_scaling": scaling, **model_keys},
        data={"train": [{"path": "hand-made"}], "max_length": max_length},
    )


def problem_of(recipe: Recipe) -> tuple[str, str]:
    with pytest.raises(FsdpTuneError) as caught:
        model_config(recipe)
    [problem] = caught.value.problems
    assert problem.where.key == "model.rope_scaling"
    return problem.code, problem.message


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        YARN,
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False},
        YARN | {"factor": 8.0, "original_max_position_embeddings": ORIGINAL // 2},
        LLAMA3,
        LLAMA3 | {"low_freq_factor": 2.0, "high_freq_factor": 8.0},
    ],
    ids=str,
)
def test_frequencies_and_logits_are_those_of_transformers(scaling: dict[str, Any], tmp_path: Path) -> None:
    """The reference has the same fields in its config.json, and is built by transformers alone."""
    model = build_full(scaled(scaling)).eval()
    original = scaling.get("original_max_position_embeddings", ORIGINAL)
    assert model.config.max_position_embeddings == scaling["factor"] * original
    fields = {
        "original_max_position_embeddings": original,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 10000.0,
    }
    config = type(model.config)(
        **{name: value for name, value in LLAMA.items() if name != "model_type"}
        | {"rope_parameters": fields | scaling}
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    rotary: Any = model.model.rotary_emb
    assert torch.equal(rotary.inv_freq, frequencies)
    assert rotary.attention_scaling == factor
    model.save_pretrained(tmp_path)
    ids = torch.arange(2 * ORIGINAL)[None] % 50
    with torch.no_grad():
        assert torch.equal(
            AutoModelForCausalLM.from_pretrained(tmp_path).eval()(ids).logits, model(ids).logits
        )


def test_dynamic_keeps_the_positions_that_its_formula_reads() -> None:
    model = build_full(scaled({"rope_type": "dynamic", "factor": 4.0}))
    assert model.config.max_position_embeddings == ORIGINAL
    frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, "cpu", seq_len=4 * ORIGINAL)
    rotary: Any = model.model.rotary_emb
    assert torch.equal(rotary.inv_freq, frequencies)


def test_only_full_attention_is_scaled_by_default() -> None:
    config = model_config(scaled(YARN, GEMMA3))
    assert config.rope_parameters["full_attention"] | YARN == config.rope_parameters["full_attention"]
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"
    both = model_config(scaled(YARN | {"layer_types": ["full_attention", "sliding_attention"]}, GEMMA3))
    assert {each["rope_type"] for each in both.rope_parameters.values()} == {"yarn"}
    built: Any = build_full(scaled(YARN, GEMMA3)).model.rotary_emb
    assert not torch.equal(built.full_attention_inv_freq, built.sliding_attention_inv_freq)


def test_scaled_row_has_no_notice_and_a_longer_one_is_refused() -> None:
    for scaling in (YARN, {"rope_type": "dynamic", "factor": 4.0}):
        document = find_facts(scaled(scaling))
        assert "positions-never-trained" not in [notice.code for notice in document.notices]
        assert (document.problems, document.facts and document.facts.max_positions) == ((), 4 * ORIGINAL)
    code, message = problem_of(scaled(YARN, max_length=4 * ORIGINAL + 1))
    assert (code, "4 × 64 positions is 256" in message) == ("rope-scaling-too-short", True)


OWN = LLAMA | {
    "rope_parameters": {"rope_theta": 5000.0, **YARN, "original_max_position_embeddings": ORIGINAL // 4}
}


def test_another_scaling_of_the_model_is_replaced_only_on_request() -> None:
    linear = {"rope_type": "linear", "factor": 8.0, "original_max_position_embeddings": ORIGINAL // 2}
    assert problem_of(scaled(linear, OWN))[0] == "rope-scaling-exists"
    config = model_config(scaled(linear | {"replace_existing": True}, OWN))
    assert config.rope_parameters == {"rope_theta": 5000.0, "rope_type": "linear", "factor": 8.0}
    assert model_config(scaled(YARN, OWN, max_length=ORIGINAL)).rope_parameters == OWN["rope_parameters"]


def test_replacing_a_linear_scaling_needs_the_original_positions() -> None:
    """64 positions may be those before scaling by 4 or after it; yarn's frequencies and the length that is
    allowed depend on them."""
    linear = LLAMA | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 4.0}}
    for other in (YARN, {"rope_type": "linear", "factor": 8.0}):
        code, message = problem_of(scaled(other | {"replace_existing": True}, linear))
        assert (code, "does not declare its original number of positions" in message) == (
            "rope-scaling-contradicts",
            True,
        )
    config = model_config(
        scaled(
            {**YARN, "factor": 16.0, "original_max_position_embeddings": 16, "replace_existing": True}, linear
        )
    )
    assert config.max_position_embeddings == 4 * ORIGINAL
    same = {"rope_type": "linear", "factor": 4.0, "replace_existing": True}
    assert model_config(scaled(same, linear)).rope_parameters == linear["rope_parameters"]


@pytest.mark.parametrize(
    ("scaling", "model", "code"),
    [
        (YARN, FAMILIES["gpt2"], "rope-scaling-without-rope"),
        (YARN | {"layer_types": ["full_attention"]}, LLAMA, "rope-scaling-layer-types"),
        (YARN | {"layer_types": ["chunked_attention"]}, GEMMA3, "rope-scaling-layer-types"),
        (YARN | {"original_max_position_embeddings": 2 * ORIGINAL}, LLAMA, "rope-scaling-contradicts"),
        (
            YARN | {"factor": 1.5, "original_max_position_embeddings": ORIGINAL // 2},
            LLAMA,
            "rope-scaling-contradicts",
        ),
    ],
)
def test_scaling_that_contradicts_the_model_is_refused(
    scaling: dict[str, Any], model: dict[str, Any], code: str
) -> None:
    assert problem_of(scaled(scaling, model, max_length=32))[0] == code


def test_model_that_ignores_rope_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    built = LlamaRotaryEmbedding.__init__

    def without_type(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        self.rope_type = "default"

    monkeypatch.setattr(LlamaRotaryEmbedding, "__init__", without_type)
    with pytest.raises(FsdpTuneError) as caught:
        build_full(scaled(YARN))
    assert caught.value.problems[0].code == "rope-scaling-without-rope"
