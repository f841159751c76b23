"""What the read-back compares of adapters: each difference from the recipe is one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.model.adapters.nf4 import Nf4Linear
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.worker.readback.missing_gradients import (
    adapter_gradients,
    adapters_without_gradient,
    parameters_without_gradient,
)
from fsdp_tune.worker.readback.trained import read_trained, training_differences
from tests.model.recipes import recipe_of
from tests.parity.architectures import make_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model("mixtral", tmp_path_factory.mktemp("mixtral")))


EXPERTS: dict[str, Any] = {
    "r": 4,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


def found(
    base: str, change: Callable[[Any], None], sections: Mapping[str, Any] = MappingProxyType({}), **lora: Any
) -> list[str]:
    lora = {"r": 4, "lora_dropout": 0.1} | lora
    recipe = recipe_of({"name_or_path": base}, lora=lora, precision={"mixed_precision": "bf16"}, **sections)
    model = build_full(recipe)
    change(model)
    layers = tuple(decoder_layers(model, recipe.layer_classes))
    loaded: Any = SimpleNamespace(model=model, wrapped=model, layers=layers)
    return training_differences(recipe, loaded)


def layer(model: Any, index: int = 1) -> Any:
    return model.model.layers[index].self_attn


def without_adapter(model: Any) -> None:
    layer(model).q_proj = layer(model).q_proj.base_layer


def without_adapters_of_a_layer(model: Any) -> None:
    for part in (layer(model), model.model.layers[1].mlp):
        for name, child in list(part.named_children()):
            if hasattr(child, "base_layer"):
                setattr(part, name, child.base_layer)


def scaled_twice(model: Any) -> None:
    layer(model).q_proj.scaling["default"] *= 2


def dropout_off(model: Any) -> None:
    layer(model).q_proj.lora_dropout["default"] = nn.Identity()


def frozen_b(model: Any) -> None:
    layer(model).q_proj.lora_B["default"].weight.requires_grad_(False)


def trained_base(model: Any) -> None:
    layer(model).q_proj.base_layer.weight.requires_grad_(True)


def base_in_fp32(model: Any) -> None:
    layer(model).q_proj.base_layer.float()


def adapter_in_bf16(model: Any) -> None:
    layer(model).q_proj.lora_A["default"].bfloat16()


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"]},
        {"use_rslora": True},
    ],
    ids=str,
)
def test_adapters_of_a_recipe_are_accepted(base: str, lora: dict[str, Any]) -> None:
    assert found(base, lambda _: None, **lora) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_adapter, "`model.layers.1.self_attn.q_proj` has none"),
        (without_adapters_of_a_layer, "`model.layers.1.self_attn.q_proj` has none (7 linear layers)"),
        (scaled_twice, "scaled by 8, the run scales it by 16"),
        (dropout_off, "a dropout of 0.1 for model.layers.1.self_attn.q_proj, the run has 0"),
        (frozen_b, "to be trained, and the run has it frozen"),
        (trained_base, "to be frozen, and the run has it trained"),
        (base_in_fp32, "to be kept in torch.bfloat16, the run has torch.float32"),
        (adapter_in_bf16, "to be trained in torch.float32, the run has torch.bfloat16"),
    ],
)
def test_difference_from_the_recipe_is_reported(base: str, change: Callable[[Any], None], words: str) -> None:
    assert any(words in sentence for sentence in found(base, change))


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    ],
    ids=str,
)
def test_layer_without_its_adapter_is_reported(base: str, lora: dict[str, Any]) -> None:
    assert found(base, without_adapter, **lora) == [
        "adapters: `model.layers.1.self_attn.q_proj` has none (1 linear layers)"
    ]


def without_an_expert_adapter(model: Any) -> None:
    """Of `gate_up_proj`, which is the inner one."""
    mlp = model.model.layers[1].mlp
    mlp.experts.base_layer = mlp.experts.base_layer.base_layer


def expert_scaled_twice(model: Any) -> None:
    model.model.layers[1].mlp.experts.base_layer.scaling["default"] *= 2


def experts_in_fp32(model: Any) -> None:
    model.model.layers[1].mlp.experts.get_base_layer().float()


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (lambda _: None, []),
        (
            without_an_expert_adapter,
            ["adapters: `model.layers.1.mlp.experts.gate_up_proj` has none (1 parameters)"],
        ),
        (
            expert_scaled_twice,
            [
                "adapters: the recipe means model.layers.1.mlp.experts.gate_up_proj to be scaled by "
                "8, the run scales it by 16"
            ],
        ),
        (
            experts_in_fp32,
            [
                "adapters: the recipe means model.layers.1.mlp.experts.base_layer.base_layer.gate_up_proj to "
                "be kept in torch.bfloat16, the run has torch.float32"
            ],
        ),
    ],
    ids=["as in the recipe", "missing", "scale", "dtype"],
)
def test_adapters_of_experts_are_compared(
    experts: str, change: Callable[[Any], None], sentences: list[str]
) -> None:
    assert found(experts, change, **EXPERTS, lora_dropout=0.0) == sentences


def test_layers_without_the_named_modules_are_fine(base: str) -> None:
    """As in hybrid models, where only some layers have attention."""

    def without_attention(model: Any) -> None:
        del layer(model).q_proj

    assert found(base, without_attention, target_modules=["q_proj"]) == []


def test_trained_tensors_are_counted_by_dtype() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False).bfloat16(), nn.Linear(4, 5))
    model[2].requires_grad_(False)
    assert read_trained(model) == {"bfloat16": 1, "float32": 2}
    assert read_trained(torch.nn.Identity()) == {}


def test_bytes_of_4_bits_that_were_cast_are_reported(tmp_path: Path) -> None:
    base = str(make_model("llama-blocks", tmp_path / "base"))

    def cast(model: Any) -> None:
        weight = layer(model).q_proj.base_layer.weight_nf4
        weight.data = weight.data.bfloat16()

    assert found(base, lambda _: None, {"quantization": {}}) == []
    [sentence] = found(base, cast, {"quantization": {}})
    assert (
        "layers.1.self_attn.q_proj.base_layer.weight_nf4 is meant to hold bytes, the run has torch.bfloat16"
        in sentence
    )


def test_gradient_of_the_factor_that_starts_at_zero_counts(base: str, experts: str) -> None:
    recipe = recipe_of({"name_or_path": base}, lora={"r": 4, "target_modules": ["q_proj", "embed_tokens"]})
    model: Any = build_full(recipe)
    one, other, embedding = (
        layer(model, 0).q_proj.lora_B["default"].weight,
        layer(model).q_proj.lora_B["default"].weight,
        model.model.embed_tokens,
    )
    one.grad, other.grad = torch.zeros_like(one), torch.zeros_like(other)
    one.grad[-1, -1] = 1e-9
    embedding.lora_embedding_A["default"].grad = torch.ones_like(embedding.lora_embedding_A["default"])
    names = [f"model.layers.{index}.self_attn.q_proj" for index in range(3)]
    assert adapter_gradients(model) == {"model.embed_tokens": 2, names[0]: 2, names[1]: 1, names[2]: 0}
    stacks = build_full(recipe_of({"name_or_path": experts}, lora=EXPERTS))
    assert {name.rpartition(".")[2] for name in adapter_gradients(stacks)} == {
        "q_proj",
        "gate_up_proj",
        "down_proj",
    }


def test_adapters_without_gradient_on_every_rank_are_reported() -> None:
    """A row without tokens for it leaves a rank without a gradient."""
    ranks = [{"0.q_proj": 2, "1.q_proj": 0, "0.up": 0}, {"0.q_proj": 1, "1.q_proj": 1, "0.up": 2}]
    assert (
        adapters_without_gradient(ranks)
        == "adapters without a gradient in the first step: 1 of 2 q_proj, such as that of `1.q_proj`"
    )
    assert adapters_without_gradient([{"0.q_proj": 2, "0.up": 2}]) is None


def test_kind_of_module_that_the_model_never_calls_is_an_error() -> None:
    with pytest.raises(FsdpTuneError, match="adapters of `dt_proj` get no gradient in any layer") as caught:
        adapters_without_gradient(
            [{"0.q_proj": 2, "0.dt_proj": 0, "1.dt_proj": 0, "0.experts.down_proj": 2}] * 2
        )
    assert caught.value.problems[0].hint == "leave them out: name only q_proj, down_proj"


def test_trained_parameters_without_gradient_on_every_rank_are_reported() -> None:
    ranks = [["0.sinks", "0.bias", "1.sinks"], ["1.sinks", "0.sinks"]]
    warning = parameters_without_gradient(ranks)
    assert warning is not None
    assert warning.startswith("2 trained parameters have no gradient in the first step, such as `0.sinks`")
    assert parameters_without_gradient([["0.bias"], []]) is None


def in_16_bits(model: Any) -> None:
    attention = layer(model)
    attention.q_proj.base_layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)


def other_scales(model: Any) -> None:
    layer(model).v_proj.base_layer.scale_dtype = torch.bfloat16


def bare_in_4_bits(model: Any) -> None:
    layer(model).o_proj = layer(model).o_proj.base_layer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: None, None),
        (
            in_16_bits,
            "model.layers.1.self_attn.q_proj.base_layer to be in 4 bits, and the run has it in 16 (1 layers)",
        ),
        (other_scales, "to be in torch.float32, the run has torch.bfloat16"),
        (bare_in_4_bits, "`model.layers.1.self_attn.o_proj` has none"),
    ],
)
def test_layers_in_4_bits_are_compared_with_the_recipe(
    tmp_path: Path, change: Callable[[Any], None], words: str | None
) -> None:
    sentences = found(str(make_model("llama-blocks", tmp_path)), change, {"quantization": {}})
    assert sentences == [] if words is None else any(words in sentence for sentence in sentences), sentences


def test_layers_in_4_bits_without_quantization_are_reported(tmp_path: Path) -> None:
    def quantised(model: Any) -> None:
        projection = layer(model).q_proj
        projection.base_layer = Nf4Linear(projection.base_layer, torch.float32)

    assert "quantization: `model.layers.1.self_attn.q_proj.base_layer` is in 4 bits (1 layers)" in found(
        str(make_model("llama-blocks", tmp_path)), quantised
    )
