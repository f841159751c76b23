"""PEFT's layers are put into the model as PEFT puts them, and start with the values that one process would
draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.adapters.lora import (
    adapter_config,
    draw_adapters,
    first_values,
    name_in_base,
    name_in_file,
    stacks_without_adapters,
)
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.inspect import adapter_facts
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.sections import Lora
from tests.model.families import FAMILIES
from tests.model.recipes import lora_recipe, recipe_of
from tests.parity.architectures import make_model
from tests.ranks import Ranks

BF16: dict[str, Any] = {"precision": {"mixed_precision": "bf16"}}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("llama", tmp_path_factory.mktemp("llama")))


def recipe_with(folder: str, lora: dict[str, Any], **sections: Any) -> Recipe:
    return recipe_of({"name_or_path": folder, **sections.pop("model", {})}, lora={"r": 4, **lora}, **sections)


def test_base_is_frozen_in_the_compute_dtype_and_adapters_are_trained_in_fp32(llama: str) -> None:
    model = build_full(recipe_with(llama, {}, **BF16))
    assert {
        (p.dtype, p.requires_grad) for name, p in model.named_parameters() if name_in_base(name) is None
    } == {(torch.float32, True)}
    assert {(p.dtype, p.requires_grad) for name, p in model.named_parameters() if name_in_base(name)} == {
        (torch.bfloat16, False)
    }
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
    uniform = first_values(Lora(r=64), "A", (64, 256), 64, "key")
    assert float(uniform.abs().max()) <= 1 / 16
    assert float(uniform.std()) == pytest.approx(1 / 16 / 3**0.5, rel=0.02)
    assert float(
        first_values(Lora(init_lora_weights="gaussian"), "A", (64, 256), 64, "key").std()
    ) == pytest.approx(1 / 64, rel=0.02)
    assert not first_values(Lora(), "B", (256, 64), 64, "key").any()
    assert first_values(Lora(init_lora_weights=False), "B", (256, 64), 64, "key").any()
    assert not first_values(Lora(), "embedding_A", (64, 256), 64, "key").any()
    assert not torch.equal(uniform, first_values(Lora(r=64), "A", (64, 256), 64, "another key"))


def test_facts_count_modules_and_trained_parameters(llama: str) -> None:
    model = build_empty(
        recipe_with(llama, {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 2]})
    )
    facts = adapter_facts(model)
    assert facts.modules == {"q_proj": 2, "v_proj": 2}
    assert facts.trained_parameters == sum(
        p.numel() for name, p in model.named_parameters() if ".lora_" in name
    )
    assert facts.trained_bytes == 4 * facts.trained_parameters


def test_facts_count_adapted_parameters_and_experts_without_adapters(tmp_path: Path) -> None:
    lora = {"r": 4, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    model = build_empty(lora_recipe(tmp_path, lora, "mixtral"))
    assert adapter_facts(model).modules == {"down_proj": 2, "q_proj": 2}
    stacks = stacks_without_adapters(model)
    assert list(stacks) == [f"model.layers.{index}.mlp.experts.gate_up_proj" for index in (0, 1)]
    assert sum(stacks.values()) == pytest.approx(
        2 * 4 * 96 * 32 / sum(p.numel() for name, p in model.named_parameters() if name_in_base(name))
    )
    model = build_empty(
        lora_recipe(tmp_path, lora | {"target_parameters": ["gate_up_proj", "down_proj"]}, "mixtral")
    )
    assert stacks_without_adapters(model) == {}


def test_new_tokens_need_a_trained_embedding(llama: str) -> None:
    grown = {"model": {"tokens": {"add": ["<x>"]}}}
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(recipe_with(llama, {}, **grown), vocabulary=260)
    assert caught.value.problems[0].code == "lora-new-tokens"
    model = build_empty(
        recipe_with(llama, {"modules_to_save": ["embed_tokens", "lm_head"]}, **grown), vocabulary=260
    )
    assert model.get_input_embeddings().weight.requires_grad


_DEEPSEEK = FAMILIES["llama"] | {
    "model_type": "deepseek_v3",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {}),
    "Conv1D": ("gpt2", {}),
    "biases of adapted layers": ("gpt2", {"bias": "lora_only"}),
    "all biases": ("gpt2", {"bias": "all"}),
    "DoRA": ("llama", {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "embedding and head": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
    "trained in full": ("llama", {"target_modules": "all-linear", "modules_to_save": ["norm", "lm_head"]}),
    "some layers": (
        "llama",
        {"target_modules": ["v_proj"], "layers_to_transform": [1], "rank_pattern": {"v_proj": 2}},
    ),
    "layers beside experts": ("mixtral", {}),
    "experts": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "experts alone": (
        "qwen2_moe",
        {"target_modules": [], "target_parameters": ["down_proj"], "layers_to_transform": [1]},
    ),
    "transposed experts": (
        "gpt_oss",
        {"target_parameters": ["gate_up_proj"], "rank_pattern": {"gate_up_proj": 2}},
    ),
}


# PEFT compares the keys with modules only, and `gate_up_proj` is a parameter.
@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize("kind", KINDS)
def test_trained_parameters_and_their_names_equal_those_of_peft(kind: str, tmp_path: Path) -> None:
    family, lora = KINDS[kind]
    recipe = lora_recipe(tmp_path, {"r": 4, **lora}, family)
    model = build_empty(recipe)
    ours = {name_in_file(name): tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    fields = adapter_config(recipe, model)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(model_config(recipe))
        theirs = peft.get_peft_model(base, peft.LoraConfig(**fields))
    written = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    assert ours == {name: tuple(tensor.shape) for name, tensor in written.items()}


def test_names_in_the_base_are_those_of_its_files(tmp_path: Path) -> None:
    recipe = lora_recipe(tmp_path, {"r": 4, "use_dora": True})
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(model_config(recipe))
    names = [name_in_base(name) for name, _ in build_empty(recipe).named_parameters()]
    assert [name for name in names if name is not None] == [name for name, _ in bare.named_parameters()]


def test_module_that_is_trained_in_full_is_kept_in_fp32(tmp_path: Path) -> None:
    recipe = lora_recipe(
        tmp_path, {"r": 4, "modules_to_save": ["lm_head"]}, precision={"mixed_precision": "bf16"}
    )
    model = build_empty(recipe)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_targets_that_peft_takes_for_fused_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        build_empty(lora_recipe(tmp_path, {"r": 4}, _DEEPSEEK))
    (problem,) = caught.value.problems
    assert problem.code == "lora-target"
    assert "instead of `model.layers.0.mlp.gate_proj`" in problem.message
    names = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    assert problem.hint == f"write `target_modules: [{', '.join(names)}]`"
    build_empty(lora_recipe(tmp_path, {"r": 4, "target_modules": names}, _DEEPSEEK))


def test_targets_that_peft_refuses_are_one_error(tmp_path: Path) -> None:
    mamba = {
        "model_type": "mamba2",
        "vocab_size": 257,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
    }
    with pytest.raises(FsdpTuneError, match="PEFT does not adapt these modules") as caught:
        build_empty(lora_recipe(tmp_path, {"r": 4}, mamba | {"num_heads": 8, "head_dim": 8, "n_groups": 1}))
    assert caught.value.problems[0].code == "lora-target"


def drawn(recipe: Recipe) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build_empty(recipe).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    draw_adapters(recipe, model)
    return model


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("mixtral", {"target_modules": [], "target_parameters": ["gate_up_proj"]}),
    ],
    ids=["modules", "experts"],
)
@pytest.mark.parametrize("init", [True, "gaussian", False])
def test_values_are_distributed_as_those_of_peft(
    init: bool | str, family: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    wide = FAMILIES[family] | {"hidden_size": 512, "num_hidden_layers": 1}
    recipe = lora_recipe(tmp_path, {"r": 16, "init_lora_weights": init, **lora}, wide)
    ours = drawn(recipe)
    fields = adapter_config(recipe, ours)
    torch.manual_seed(1)
    theirs = peft.get_peft_model(
        AutoModelForCausalLM.from_config(model_config(recipe)), peft.LoraConfig(**fields)
    ).base_model.model
    for name, own in ours.named_parameters():
        # which PEFT leaves at random numbers
        if own.requires_grad and not (init is False and "embedding" in name):
            other = theirs.get_parameter(name).detach()
            assert own.std().item() == pytest.approx(other.std().item(), rel=0.05), name
            assert own.abs().max().item() == pytest.approx(
                other.abs().max().item(), rel=0.05 if init is True else 0.3
            ), name


def gathered_adapters(recipe: Recipe) -> dict[str, torch.Tensor]:
    """On a rank: the trained parameters of a sharded model, gathered."""
    model = build_empty(recipe)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    model.to_empty(device="cpu")
    generator = torch.Generator()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            assert isinstance(parameter, DTensor)
            full = torch.randn(parameter.shape, generator=generator.manual_seed(index))
            start = sum(
                len(part)
                for part in full.chunk(torch.distributed.get_world_size())[: torch.distributed.get_rank()]
            )
            parameter.to_local().copy_(full[start : start + len(parameter.to_local())])
    draw_adapters(recipe, model)
    return {name: p.full_tensor().detach() for name, p in model.named_parameters() if p.requires_grad}  # type: ignore[attr-defined]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        pytest.param("llama", {"r": 1}, marks=pytest.mark.slow),
        ("llama", {"r": 3, "use_dora": True}),
        (
            "mixtral",
            {
                "r": 3,
                "target_modules": [],
                "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
            },
        ),
    ],
    ids=["fewer rows than ranks", "DoRA", "experts"],
)
def test_values_are_the_same_on_any_number_of_ranks(
    family: str, lora: dict[str, Any], on_ranks: Ranks, tmp_path: Path
) -> None:
    recipe = lora_recipe(tmp_path, lora, family)
    alone, *others = (on_ranks.run(ranks, gathered_adapters, recipe)[0] for ranks in (1, 2, 4))
    assert any(value.any() for name, value in alone.items() if "lora_A" in name)
    for other in others:
        assert all(torch.equal(alone[name], other[name]) for name in alone)


def test_magnitude_is_the_length_of_each_row_of_the_base(tmp_path: Path) -> None:
    model = drawn(lora_recipe(tmp_path, {"r": 4, "use_dora": True, "target_modules": ["q_proj"]}))
    layer: Any = model.get_submodule("model.layers.1.self_attn.q_proj")
    assert torch.equal(
        layer.lora_magnitude_vector["default"].weight, torch.linalg.norm(layer.base_layer.weight, dim=1)
    )
