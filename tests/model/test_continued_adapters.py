"""An adapter whose training continues is compared with the recipe and the model before it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.peft_fields import CONFIG_FILE, WEIGHTS_FILE
from fsdp_tune.model.adapters.lora import name_in_file
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.recipe.schema import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "embed_tokens", "lm_head"], "bias": "none"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    fields = {name: value for name, value in FAMILIES["llama"].items() if name != "model_type"}
    AutoModelForCausalLM.from_config(LlamaConfig(**fields)).save_pretrained(folder)
    return folder


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """An adapter as PEFT writes it, with the frozen weights of the embedding and the head in the same file."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **LORA))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)  # as PEFT does by itself for these targets
    return tmp_path / "adapter"


def recipe_with(base: Path, adapter: Path, **changes: Any) -> Recipe:
    return recipe_of({"name_or_path": str(base)}, lora=LORA | {"adapter": str(adapter)} | changes)


def test_adapter_of_peft_is_read_and_its_copies_of_the_base_are_ignored(base: Path, adapter: Path) -> None:
    stored = load_file(adapter / WEIGHTS_FILE)
    assert "base_model.model.lm_head.base_layer.weight" in stored
    model = build_full(recipe_with(base, adapter))
    trained = {name_in_file(name): p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * (2 + 1 + 1)
    assert all(torch.equal(p, stored[name]) for name, p in trained.items())


CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "IA3": ({"peft_type": "IA3"}, "it is of the type IA3", ""),
    "rank": ({"r": 8}, "its `r` is 8, and the recipe has 4", "--set lora.r=8"),
    "scale": ({"lora_alpha": 16}, "its `lora_alpha` is 16", "--set lora.lora_alpha=16"),
    "rsLoRA": ({"use_rslora": True}, "its `use_rslora` is True", "--set lora.use_rslora=true"),
    "another base": ({"base_model_name_or_path": "org/other"}, "it was trained on org/other", "--set model.name_or_path=org/other"),
    "activated LoRA": ({"alora_invocation_tokens": [1, 2]}, "it was trained with `alora_invocation_tokens`", ""),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "changes the base under the adapter", "convert it with PEFT"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_adapter_of_another_kind_is_refused(case: str, base: Path, adapter: Path) -> None:
    change, message, hint = CONFIGS[case]
    config = json.loads((adapter / CONFIG_FILE).read_text())
    (adapter / CONFIG_FILE).write_text(json.dumps(config | change))
    problem = refused(recipe_with(base, adapter))
    assert message in problem.message
    assert hint in (problem.hint or "")


def refused(recipe: Recipe) -> Any:
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(recipe)
    (problem,) = caught.value.problems
    assert problem.code == "adapter-does-not-fit"
    return problem


def test_adapter_with_other_modules_is_refused(base: Path, adapter: Path) -> None:
    more = refused(recipe_with(base, adapter, target_modules=["q_proj", "v_proj", "embed_tokens", "lm_head"]))
    assert "it lacks `base_model.model.model.layers.0.self_attn.v_proj.lora_A.weight`" in more.message
    fewer = refused(recipe_with(base, adapter, target_modules=["q_proj"]))
    assert "which the recipe does not train" in fewer.message


@pytest.mark.parametrize("content", [None, "[]", "{"], ids=["missing", "not an object", "not JSON"])
def test_adapter_without_a_config_is_refused(content: str | None, base: Path, adapter: Path) -> None:
    (adapter / CONFIG_FILE).unlink()
    if content is not None:
        (adapter / CONFIG_FILE).write_text(content)
    assert f"its {CONFIG_FILE} cannot be read" in refused(recipe_with(base, adapter)).message


def test_adapter_in_pickles_is_refused_unread(base: Path, adapter: Path) -> None:
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    assert f"there is no {WEIGHTS_FILE}" in refused(recipe_with(base, adapter)).message
