"""A name in `lora:` that would train nothing, or something else than it says, is refused with the names that exist."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.adapters.lora import inject_lora
from fsdp_tune.model.adapters.lora_targets import find_targets
from fsdp_tune.model.loading.construct import build_empty
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(make_model(name, tmp_path_factory.mktemp(name))) for name in ("llama", "gpt2", "qwen3", "mixtral")}


def targets(models: dict[str, str], family: str, **lora: Any) -> list[str]:
    recipe = recipe_of({"name_or_path": models[family]}, lora={"r": 4, **lora})
    bare = build_empty(recipe.model_copy(update={"lora": None}))
    return list(find_targets(recipe, bare))


def test_all_linear_leaves_the_head_out(models: dict[str, str]) -> None:
    found = targets(models, "llama")
    assert len(found) == 3 * 7
    assert "lm_head" not in found


def test_names_are_last_parts_and_a_text_is_a_regular_expression(models: dict[str, str]) -> None:
    assert targets(models, "llama", target_modules=["self_attn.q_proj"]) == [f"model.layers.{n}.self_attn.q_proj" for n in range(3)]
    assert targets(models, "llama", target_modules=r".*\.1\..*_proj", layers_to_transform=[1])[0] == "model.layers.1.self_attn.q_proj"
    assert targets(models, "llama", target_modules=r".*q_proj", layers_to_transform=[2]) == ["model.layers.2.self_attn.q_proj"]
    assert targets(models, "llama", modules_to_save=["mlp"])[-1].endswith("self_attn.o_proj")
    assert targets(models, "gpt2", target_modules=["c_attn"])[0] == "transformer.h.0.attn.c_attn"


@pytest.mark.parametrize(
    ("family", "lora", "code", "words"),
    [
        ("llama", {"target_modules": ["q_proj", "qproj"]}, "lora-target", "did you mean `q_proj`"),
        ("llama", {"target_modules": "q_proj"}, "lora-target", "matches no module"),
        ("llama", {"target_modules": "(q_proj"}, "lora-target", "not a valid regular expression"),
        ("llama", {"target_modules": ["mlp"]}, "lora-target", "is a LlamaMLP"),
        ("llama", {"target_modules": ["xyz"]}, "lora-target", "its linear layers are q_proj"),
        ("llama", {"modules_to_save": ["lmhead"]}, "lora-target", "did you mean `lm_head`"),
        ("llama", {"layers_to_transform": [3]}, "lora-target", "the layers 0 to 2"),
        ("llama", {"rank_pattern": {"x_proj": 2}}, "lora-target", "`lora.rank_pattern`: `x_proj`"),
        ("llama", {"alpha_pattern": {"(": 2.0}}, "lora-target", "not a valid regular expression"),
        ("llama", {"r": 31}, "lora-rank", "above the rank"),
        ("qwen3", {"target_modules": ["lm_head"]}, "lora-tied", "shares its weight with `model.embed_tokens`"),
        ("qwen3", {"modules_to_save": ["embed_tokens"]}, "lora-tied", "shares its weight with `lm_head`"),
        ("llama", {"target_modules": ["embed_tokens"], "use_dora": True}, "lora-dora", "is a Embedding"),
        ("gpt2", {"use_dora": True}, "lora-dora", "is a Conv1D"),
    ],
    ids=str,
)
def test_targets_that_cannot_be_trained_are_refused(
    models: dict[str, str], family: str, lora: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        targets(models, family, **lora)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert words in f"{problem.message} {problem.hint}"
    assert str(problem.where.key).startswith("lora.")


def test_a_run_is_no_base(models: dict[str, str], tmp_path: Any) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "model").mkdir()
    recipe = recipe_of({"name_or_path": str(tmp_path)}, lora={"r": 4})
    bare = build_empty(recipe_of({"name_or_path": models["llama"]}))
    with pytest.raises(FsdpTuneError) as caught:
        inject_lora(recipe, bare, next(bare.parameters()).dtype)
    assert caught.value.problems[0].code == "lora-on-run"
