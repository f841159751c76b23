"""Training continues from a PEFT adapter that fits the recipe and the model, and from no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.core.tensors.peft_config import CONFIG_FILE, WEIGHTS_FILE
from fsdp_tune.model.adapters.lora import name_in_file
from fsdp_tune.model.loading.adapter_files import check_base
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import BASE_FILE, describe_base
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model
from tests.parity.peft_adapters import make_adapter


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    return make_adapter(base, {"r": 4}, tmp_path / "adapter")


def recipe_with(base: Path, adapter: Path, **lora: Any) -> Recipe:
    return recipe_of({"name_or_path": str(base)}, lora={"r": 4, "adapter": str(adapter), **lora})


def refusals(recipe: Recipe) -> tuple[Problem, ...]:
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(recipe)
    assert {(problem.code, problem.where.key) for problem in caught.value.problems} == {
        ("adapter-does-not-fit", "lora.adapter")
    }
    return caught.value.problems


def refusal(recipe: Recipe) -> Problem:
    (problem,) = refusals(recipe)
    return problem


def assert_computes_what_peft_computes(recipe: Recipe, base: Path, adapter: Path) -> None:
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
        )(input_ids=ids).logits
        ours = build_full(recipe)(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 7, "use_rslora": True}),
        ("llama", {"use_dora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
        ("llama", {"target_modules": r".*\.(up|down)_proj", "modules_to_save": ["lm_head"]}),
        ("llama", {"layers_to_transform": 1, "target_modules": ["q_proj"]}),
        ("llama", {"layers_to_transform": [0, 2], "layers_pattern": "layers", "target_modules": ["q_proj"]}),
        ("llama", {"target_modules": "all-linear", "exclude_modules": ["down_proj", "lm_head"]}),
        ("llama", {"target_modules": ["embed_tokens", "o_proj"], "bias": "lora_only"}),
        ("mixtral", {**EXPERTS, "exclude_modules": ["lm_head"]}),
    ],
    ids=str,
)
def test_adapter_alone_tells_how_it_was_trained(
    family: str, lora: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    base = base if family == "llama" else make_model(family, tmp_path / "base")
    adapter = make_adapter(base, {"r": 4, **lora}, tmp_path / "adapter")
    assert_computes_what_peft_computes(
        recipe_of({"name_or_path": str(base)}, lora={"adapter": str(adapter)}), base, adapter
    )


@pytest.mark.parametrize(
    "lora", [{"use_dora": True}, {"modules_to_save": ["lm_head"], "use_rslora": True}], ids=str
)
def test_recipe_may_repeat_how_the_adapter_was_trained(
    base: Path, lora: dict[str, Any], tmp_path: Path
) -> None:
    adapter = make_adapter(base, {"r": 4, **lora}, tmp_path / "adapter")
    assert_computes_what_peft_computes(recipe_with(base, adapter, **lora), base, adapter)


def test_frozen_embedding_and_head_in_the_file_are_ignored(base: Path, tmp_path: Path) -> None:
    lora = {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}
    adapter = make_adapter(base, {"r": 4, **lora}, tmp_path / "adapter")
    stored = load_file(adapter / WEIGHTS_FILE)
    assert "base_model.model.lm_head.base_layer.weight" in stored
    trained = {
        name_in_file(name): p
        for name, p in build_full(recipe_with(base, adapter, **lora)).named_parameters()
        if p.requires_grad
    }
    assert len(trained) == 2 * (3 + 1 + 1)
    assert all(torch.equal(p, stored[name]) for name, p in trained.items())


CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "IA3": ({"peft_type": "IA3"}, "it is of the type IA3", ""),
    "rank": ({"r": 8}, "its `r` is 8, and the recipe has 4", "--set lora.r=8"),
    "scale": (
        {"lora_alpha": 16},
        "its `lora_alpha` is 16, and the recipe has 32",
        "--set lora.lora_alpha=16",
    ),
    "rsLoRA": (
        {"use_rslora": True},
        "its `use_rslora` is true, and the recipe has false",
        "--set lora.use_rslora=true",
    ),
    "another base": (
        {"base_model_name_or_path": "org/other"},
        "it was trained on org/other",
        "--set model.name_or_path=org/other",
    ),
    "activated LoRA": (
        {"alora_invocation_tokens": [1, 2]},
        "it was trained with `alora_invocation_tokens`",
        "",
    ),
    "PiSSA": (
        {"init_lora_weights": "pissa_niter_4"},
        "changes the base under the adapter",
        "convert it with PEFT",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_adapter_of_another_kind_is_refused(case: str, base: Path, adapter: Path) -> None:
    change, message, hint = CONFIGS[case]
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    problem = refusal(recipe_with(base, adapter, lora_alpha=32, use_rslora=False))
    assert message in problem.message
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": ["q_proj"]}, "which the recipe does not train"),
        ({"target_modules": ["q_proj", "lm_head"]}, "it lacks `base_model.model.lm_head.lora_A.weight`"),
        ({"modules_to_save": ["lm_head"]}, "it lacks `base_model.model.lm_head.weight`"),
    ],
    ids=str,
)
def test_adapter_with_other_modules_is_refused(
    lora: dict[str, Any], words: str, base: Path, adapter: Path
) -> None:
    assert any(words in problem.message for problem in refusals(recipe_with(base, adapter, **lora)))


def test_trained_head_of_an_adapter_is_not_ignored(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, {"r": 4, "modules_to_save": ["lm_head"]}, tmp_path / "adapter")
    problem = refusal(recipe_with(base, adapter, modules_to_save=[]))
    assert "it has `base_model.model.lm_head.weight`, which the recipe does not train" in problem.message


def test_all_differences_are_reported_at_once(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(
        base, {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}, tmp_path / "adapter"
    )
    settings = {
        "r": 8,
        "lora_alpha": 32,
        "use_rslora": True,
        "target_modules": ["q_proj", "up_proj"],
        "modules_to_save": ["lm_head"],
    }
    messages = [problem.message for problem in refusals(recipe_with(base, adapter, **settings))]
    differences = [
        "its `r` is 4",
        "its `lora_alpha` is 16",
        "its `use_rslora` is false",
        "it lacks `",
        "it has `",
    ]
    for words in [*differences, "q_proj.lora_A.weight` is"]:
        assert any(words in message for message in messages), words
    assert len(messages) == 6


def test_adapter_of_other_weights_of_the_same_name_is_refused(base: Path, adapter: Path) -> None:
    recipe = recipe_with(base, adapter)
    check_base(recipe, {})  # PEFT does not record the weights
    describe_base(str(base), None).write(adapter / BASE_FILE)
    assert check_base(recipe, {}) == []
    replace(describe_base(str(base), None), nf4_scales="fp32").write(adapter / BASE_FILE)
    [notice] = check_base(recipe, {})
    assert (
        "was trained on a base in 4 bits with scales in fp32, and the recipe holds it in 16 or 32 bits"
        in notice.message
    )
    replace(describe_base(str(base), None), digest="blake2b:of other weights").write(adapter / BASE_FILE)
    with pytest.raises(FsdpTuneError, match="trained on other weights than those of") as caught:
        check_base(recipe, {})
    assert caught.value.problems[0].code == "adapter-does-not-fit"


@pytest.mark.parametrize("content", [None, "[]", "{"], ids=["missing", "not an object", "not JSON"])
def test_adapter_without_a_readable_config_is_refused(content: str | None, base: Path, adapter: Path) -> None:
    (adapter / CONFIG_FILE).unlink()
    if content is not None:
        (adapter / CONFIG_FILE).write_text(content)
    assert f"its {CONFIG_FILE} cannot be read" in refusal(recipe_with(base, adapter)).message


def test_adapter_in_pickles_is_refused_unread(base: Path, adapter: Path) -> None:
    (adapter / WEIGHTS_FILE).rename(adapter / "adapter_model.bin")
    assert f"there is no {WEIGHTS_FILE}" in refusal(recipe_with(base, adapter)).message
