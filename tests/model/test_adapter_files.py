"""Training continues from a PEFT adapter that fits, and from no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.recipe.schema import Recipe
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model
from tests.parity.peft_adapters import make_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("base"))


def recipe_with(base: Path, adapter: Path, **lora: Any) -> Recipe:
    return recipe_of({"name_or_path": str(base)}, lora={"r": 4, "adapter": str(adapter), **lora})


@pytest.mark.parametrize(
    "lora",
    [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"], "use_rslora": True}, {"target_modules": ["embed_tokens", "q_proj"]}],
    ids=str,
)
def test_model_with_an_adapter_computes_what_peft_computes(base: Path, lora: dict[str, Any], tmp_path: Path) -> None:
    adapter = make_adapter(base, {"r": 4, **lora}, tmp_path / "adapter")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)(input_ids=ids).logits
        ours = build_full(recipe_with(base, adapter, **lora))(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("config", "lora", "words"),
    [
        ({}, {"r": 8}, "its `r` is 4, and the recipe has 8"),
        ({}, {"lora_alpha": 16}, "its `lora_alpha` is 32, and the recipe has 16"),
        ({}, {"use_rslora": True}, "its `use_rslora` is False"),
        ({}, {"target_modules": ["q_proj"]}, "which the recipe does not train"),
        ({}, {"modules_to_save": ["lm_head"]}, "it lacks `base_model.model.lm_head.weight`"),
        ({"peft_type": "IA3"}, {}, "of the type IA3"),
        ({"base_model_name_or_path": "org/another"}, {}, "it was trained on org/another"),
    ],
    ids=str,
)
def test_adapter_that_does_not_fit_is_refused(base: Path, config: dict[str, Any], lora: dict[str, Any], words: str, tmp_path: Path) -> None:
    adapter = make_adapter(base, {"r": 4}, tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(recipe_with(base, adapter, **lora))
    (problem,) = caught.value.problems
    assert (problem.code, problem.where.key) == ("adapter-does-not-fit", "lora.adapter")
    assert words in problem.message


def test_trained_head_of_an_adapter_is_not_ignored(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, {"r": 4, "modules_to_save": ["lm_head"]}, tmp_path / "adapter")
    with pytest.raises(FsdpTuneError, match=r"it has `base_model.model.lm_head.weight`, which the recipe does not train"):
        build_empty(recipe_with(base, adapter))


@pytest.mark.parametrize("content", [None, "[]", "{"])
def test_directory_without_a_readable_adapter_is_refused(base: Path, content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(recipe_with(base, tmp_path))
    assert caught.value.problems[0].code == "adapter-does-not-fit"
