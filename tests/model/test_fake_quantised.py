"""Which linear layers train with emulated quantisation, that their parameters stay, and that they compute as
the converted model does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp_tune.model.kernels.fake_quantised import (
    base_config,
    choose_quantised,
    is_quantised,
    plan_quantised,
    prepare_quantised,
    quantised_notices,
    weights_read_by_others,
)
from fsdp_tune.model.loading.construct import build_empty, build_full
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def quantised(
    model: str | dict[str, Any] = "llama",
    train: str = "int4",
    ranks: int = 2,
    *,
    left: list[str] | None = None,
    **sections: Any,
) -> Recipe:
    keys = {
        "train": train,
        "group_size": sections.pop("group_size", 16),
        "modules_to_not_convert": left or [],
    }
    return recipe_of(model, ranks, quantization=keys, **sections)


def last_names(names: Any) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "phi"))]
)
def test_only_layer_linears_are_quantised_and_parameters_stay(family: str) -> None:
    recipe = quantised({"from_config": FAMILIES[family], "freeze": ["*.0.*"]})
    model = build_empty(recipe)
    plan = plan_quantised(recipe, model)
    expected = {
        "llama": set(ALL),
        "mixtral": set(ALL[:4]),
        "phi": {"q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"},
    }
    assert last_names(plan.quantised) == expected[family]
    before = {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    prepare_quantised(recipe, model)
    assert {name for name, module in model.named_modules() if is_quantised(module)} == set(plan.quantised)
    assert {
        name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()
    } == before
    assert {requires for _, requires in before.values()} == {True, False}
    assert plan_quantised(recipe, model) == plan, "the planner's trace prepares a model before it is loaded"


def test_modules_left_out_are_counted() -> None:
    recipe = quantised(left=["down_proj", "model.layers.0.self_attn"])
    model = build_empty(recipe)
    prepare_quantised(recipe, model)
    left = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not is_quantised(module)
    }
    of_first = {f"model.layers.0.self_attn.{name}" for name in ALL[:4]}
    assert left == {"lm_head", *of_first, "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    reason = choose_quantised(recipe, model)["quantization.train"].reason
    assert (
        reason
        == "8 linear layers, a scale for 16 weights; 6 left, it is in `quantization.modules_to_not_convert`"
    )


@pytest.mark.parametrize(
    ("recipe", "code", "words"),
    [
        (quantised(left=["w1"]), "qat-matches-nothing", "`w1` matches no linear layer"),
        (
            quantised(group_size=24),
            "qat-group-size",
            "`quantization.group_size: 24` does not divide the 32 inputs of "
            "`model.layers.0.self_attn.q_proj`",
        ),
        (
            quantised("gpt2", data={"train": [{"path": "hand-made"}], "max_length": 64}),
            "qat-nothing-to-quantise",
            "Conv1D",
        ),
    ],
)
def test_unusable_recipes_are_refused_before_a_rank_starts(recipe: Recipe, code: str, words: str) -> None:
    (problem,) = find_facts(recipe).problems
    assert problem.code == code
    assert words in problem.message
    assert problem.hint


@pytest.mark.slow
def test_share_of_stacked_experts_is_reported() -> None:
    recipe = quantised("mixtral", fsdp={"activation_checkpointing": "full"})
    (notice,) = quantised_notices(recipe, build_empty(recipe))
    assert notice.code == "qat-without-experts"


@pytest.mark.parametrize(
    ("recomputation", "strategy", "expected"),
    [("none", "FULL_SHARD", 1), ("full", "FULL_SHARD", 0), ("none", "NO_SHARD", 0)],
)
def test_memory_of_rounded_weights_is_reported(recomputation: str, strategy: str, expected: int) -> None:
    recipe = quantised(fsdp={"activation_checkpointing": recomputation, "sharding_strategy": strategy})
    found = quantised_notices(recipe, build_empty(recipe))
    assert [notice.code for notice in found] == ["qat-keeps-weights"] * expected


class Holder(nn.Module):
    """Holds the only linear layers of a decoder, and uses them as `forward` does."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called, self.gate, self.one, self.other = (
            nn.Linear(32, rows) for rows in (32, 32, 1, 32, 32)
        )
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.called.weight.dtype == torch.float16:
            x = x.float()
        return self.other(self.one(self.called(x) @ self.read.weight)) * self.gate(x)


def test_weights_that_would_not_be_rounded_are_left() -> None:
    recipe = quantised()
    model = build_empty(recipe)
    model.model.layers[0].mlp = Holder()
    plan = plan_quantised(recipe, model)
    left = {name.removeprefix("model.layers.0.mlp."): why for name, why in plan.left.items()}
    shared = "it shares its weight with another layer"
    assert left == {
        "read": "other code of the model reads its weight",
        "gate": "it is a router or a gate, whose few outputs need precision",
        "one": shared,
        "other": shared,
    }
    assert "model.layers.0.mlp.called" in plan.quantised


def test_layers_that_mamba_reads_are_found() -> None:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    with torch.device("meta"):
        mixer = MambaMixer(MambaConfig(hidden_size=32, state_size=8, time_step_rank=16), 0)
    assert {"dt_proj", "x_proj", "out_proj"} >= set(weights_read_by_others(mixer)) >= {"dt_proj"}


def test_rounding_under_cuda_autocast_computes_in_the_cast_dtype() -> None:
    """On CUDA, autocast computes reciprocals in fp32: with them, 1 % of the weights would have another value
    than after conversion."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from fsdp_tune.model.kernels.rounding import Rounding

    seen: list[torch.dtype] = []

    class Reciprocals(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.reciprocal.default:
                seen.append(found.dtype)
            return found

    recipe = quantised()
    model: Any = build_empty(recipe)
    prepare_quantised(recipe, model)
    rounding = model.model.layers[0].mlp.up_proj.weight_fake_quantizer
    assert type(rounding) is Rounding
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with FakeTensorMode(), Reciprocals():
            assert rounding(torch.empty(4, 64, device="cuda")).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert seen == [torch.bfloat16]


def test_no_scales_stay_on_a_layer() -> None:
    recipe = quantised(train="int8-int4")
    model: Any = build_full(recipe)
    prepare_quantised(recipe, model)
    layer = model.model.layers[0].mlp.up_proj
    layer(torch.randn(3, 32))
    assert not [
        each for each in layer.modules() for value in vars(each).values() if isinstance(value, torch.Tensor)
    ]


def test_older_torchao_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.17.0+cpu")
    (problem,) = find_facts(quantised()).problems
    assert problem.message == "`quantization.train: int4` needs torchao 0.18, and 0.17.0+cpu is installed"


@pytest.mark.parametrize(("dtype", "count"), [("bf16", 1), ("no", 0)])
def test_compiled_layers_that_round_in_fp32_are_refused(dtype: str, count: int) -> None:
    """A graph of inductor keeps scale and quotient in fp32, while the conversion rounds both to bf16."""
    from fsdp_tune.recipe.rules.adapters import quantised_training_limits

    found = [
        *quantised_training_limits(quantised(kernels={"compile": True}, precision={"mixed_precision": dtype}))
    ]
    assert ["`kernels.compile: true` in bf16" in each.message for each in found] == [True] * count


@pytest.mark.parametrize("train", ["int4", pytest.param("int8-int4", marks=pytest.mark.slow)])
def test_weights_are_rounded_as_converted_ones(train: str) -> None:
    """Also by hand: 15 steps over twice the largest magnitude of a group, and gradients that pass through."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    recipe = quantised(train=train, fsdp={"sharding_strategy": "NO_SHARD"})
    model = build_full(recipe)
    prepare_quantised(recipe, model)
    layer = model.model.layers[0].mlp.gate_proj
    tokens = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    found = layer(tokens)
    if train == "int4":
        groups = layer.weight.detach().view(-1, 16)
        scale = groups.abs().amax(dim=1, keepdim=True) / 7.5
        rounded = ((groups * (1 / scale)).round().clamp(-8, 7) * scale).view(layer.weight.shape)
        torch.testing.assert_close(found, tokens @ rounded.t(), rtol=1e-5, atol=1e-6)
    found.sum().backward()
    assert (layer.weight.grad != 0).float().mean() > 0.9
    converted = copy.deepcopy(model)
    quantize_(converted, QATConfig(base_config(recipe), step="convert"))
    assert torch.equal(converted.model.layers[0].mlp.gate_proj(tokens), found)


def test_weight_is_cast_before_it_is_rounded_under_autocast() -> None:
    """As under FSDP2, which casts a weight when it gathers it, and as in the merged model, whose weights are
    in the compute dtype."""
    recipe = quantised(train="int8-int4", fsdp={"sharding_strategy": "NO_SHARD"})
    layer: Any = build_full(recipe).model.layers[0].mlp
    alone = copy.deepcopy(layer)
    holder: Any = build_full(recipe)
    holder.model.layers[0].mlp = layer
    prepare_quantised(recipe, holder)
    tokens = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = holder.model.layers[0].mlp.up_proj(tokens.float())
    holder.model.layers[0].mlp = alone.bfloat16()
    prepare_quantised(recipe, holder)
    assert torch.equal(found, holder.model.layers[0].mlp.up_proj(tokens))


def test_torchao_still_loses_gradients_of_emulated_fp8() -> None:
    """Why `fp8-int4` is refused; when this fails, it can be supported (`_NOT_EMULATED` in
    recipe/schema/sections.py)."""
    from torchao.quantization.granularity import PerRow
    from torchao.quantization.qat import Float8FakeQuantizeConfig
    from torchao.quantization.qat.fake_quantizer import Float8FakeQuantizer

    values = torch.randn(4, 64, requires_grad=True)
    (Float8FakeQuantizer(Float8FakeQuantizeConfig(granularity=PerRow()))(values) * 1e-4).sum().backward()
    assert values.grad is not None
    assert (values.grad == 0).float().mean() > 0.9
