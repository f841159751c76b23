"""What adapters are called, what is trained, and what values they start with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.adapters.lora import adapter_facts, draw_adapters, first_values, name_in_base, name_in_file
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.recipe.schema import Lora, Recipe
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model
from tests.ranks import RankPool, shared_pool

BF16: dict[str, Any] = {"precision": {"mixed_precision": "bf16"}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("gpt2", tmp_path_factory.mktemp("gpt2")))


def recipe_with(folder: str, lora: dict[str, Any], **sections: Any) -> Recipe:
    return recipe_of({"name_or_path": folder, **sections.pop("model", {})}, lora={"r": 4, **lora}, **sections)


@pytest.mark.parametrize(
    ("family", "lora", "theirs"),
    [
        ("llama", {}, {}),
        ("llama", {"use_dora": True}, {}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}, {}),
        ("llama", {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, {}),
        ("gpt2", {"bias": "lora_only", "target_modules": ["c_attn"]}, {"fan_in_fan_out": True}),
        ("gpt2", {"bias": "all"}, {"fan_in_fan_out": True}),
    ],
    ids=str,
)
def test_names_and_shapes_are_those_that_peft_saves(family: str, lora: dict[str, Any], theirs: dict[str, Any], request: Any) -> None:
    folder = request.getfixturevalue(family)
    ours = {name_in_file(name): p.shape for name, p in build_empty(recipe_with(folder, lora)).named_parameters() if p.requires_grad}
    config = LoraConfig(task_type="CAUSAL_LM", r=4, **{"target_modules": "all-linear", **lora, **theirs})
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    saved = get_peft_model_state_dict(model, save_embedding_layers=False)
    assert ours == {name: tensor.shape for name, tensor in saved.items()}


def test_base_is_frozen_in_the_compute_dtype_and_adapters_are_trained_in_fp32(llama: str) -> None:
    model = build_full(recipe_with(llama, {}, **BF16))
    assert {(p.dtype, p.requires_grad) for name, p in model.named_parameters() if name_in_base(name) is None} == {(torch.float32, True)}
    assert {(p.dtype, p.requires_grad) for name, p in model.named_parameters() if name_in_base(name)} == {(torch.bfloat16, False)}
    stored = load_file(Path(llama) / "model.safetensors")
    for name, parameter in model.named_parameters():
        if (base := name_in_base(name)) is not None:
            assert torch.equal(parameter, stored[base].bfloat16()), name


def test_adapters_follow_the_storage_dtype_of_the_recipe(llama: str) -> None:
    model = build_empty(recipe_with(llama, {}, **BF16, model={"dtype": "bf16"}))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_first_output_is_that_of_the_base(llama: str) -> None:
    ids = torch.arange(20)[None]
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)(input_ids=ids).logits
        for lora in ({}, {"use_dora": True}):
            adapted = build_full(recipe_with(llama, lora))(input_ids=ids).logits
            torch.testing.assert_close(adapted, plain, rtol=1e-5, atol=1e-5)


def test_first_values_have_the_distribution_of_peft() -> None:
    uniform = first_values(Lora(r=64), "A", (64, 256), "key")
    assert float(uniform.abs().max()) <= 1 / 16
    assert float(uniform.std()) == pytest.approx(1 / 16 / 3**0.5, rel=0.02)
    assert float(first_values(Lora(init_lora_weights="gaussian"), "A", (64, 256), "key").std()) == pytest.approx(1 / 64, rel=0.02)
    assert not first_values(Lora(), "B", (256, 64), "key").any()
    assert first_values(Lora(init_lora_weights=False), "B", (256, 64), "key").any()
    assert not first_values(Lora(), "embedding_A", (64, 256), "key").any()
    assert not torch.equal(uniform, first_values(Lora(r=64), "A", (64, 256), "another key"))


def drawn_on_ranks(model: str) -> dict[str, torch.Tensor]:
    """On a rank: the adapters of a sharded model, whole."""
    recipe = recipe_with(model, {"use_dora": True})
    live = build_full(recipe)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in live.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(live, mesh=mesh)
    with torch.no_grad():
        for name, parameter in live.named_parameters():
            if name_in_base(name) is None:
                parameter.to_local().fill_(7.0)
    draw_adapters(recipe, live)
    return {name: parameter.full_tensor().detach() for name, parameter in live.named_parameters() if name_in_base(name) is None}


@pytest.mark.ranks
def test_first_values_are_the_same_on_any_number_of_ranks(llama: str) -> None:
    pool: RankPool = shared_pool()
    whole = {name: p for name, p in build_full(recipe_with(llama, {"use_dora": True})).named_parameters() if name_in_base(name) is None}
    for ranks in (2, 4):
        for found in pool.run(ranks, drawn_on_ranks, llama):
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_facts_count_modules_and_trained_parameters(llama: str) -> None:
    model = build_empty(recipe_with(llama, {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]}))
    facts = adapter_facts(model)
    assert facts["modules"] == {"q_proj": 2, "v_proj": 2}
    assert facts["trained_parameters"] == sum(p.numel() for name, p in model.named_parameters() if ".lora_" in name)
    assert facts["trained_bytes"] == 4 * facts["trained_parameters"]


def test_new_tokens_need_a_trained_embedding(llama: str) -> None:
    grown = {"model": {"tokens": {"add": ["<x>"]}}}
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(recipe_with(llama, {}, **grown), vocabulary=260)
    assert caught.value.problems[0].code == "lora-new-tokens"
    model = build_empty(recipe_with(llama, {"modules_to_save": ["embed_tokens", "lm_head"]}, **grown), vocabulary=260)
    assert model.get_input_embeddings().weight.requires_grad
