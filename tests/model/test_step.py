"""Norm, clipping, decay groups and the fp16 scale, against torch's own arithmetic on whole tensors."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.shard.local import decayed_names, decays
from fsdp_tune.model.step import (
    LossScale,
    clip_factor,
    compute_context,
    parameter_groups,
    scale_gradients,
    total_norm,
)
from tests.model.families import FAMILIES, XLNET
from tests.model.recipes import recipe_of
from tests.ranks import Ranks


def with_gradients(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draw).to(dtype)
    return parameters


def test_norm_of_plain_gradients_equals_torch() -> None:
    parameters = with_gradients((3, 5), (7,), (2, 2, 2))
    assert float(total_norm(parameters)) == pytest.approx(
        float(nn.utils.get_total_norm([p.grad for p in parameters])), rel=1e-6
    )


def test_norm_of_bf16_gradients_is_not_rounded_to_bf16() -> None:
    parameters = with_gradients((37, 11), (5,), dtype=torch.bfloat16)
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters))
    assert float(total_norm(parameters)) == pytest.approx(exact, rel=1e-6)


def test_norm_without_gradients_is_zero() -> None:
    assert float(total_norm([nn.Parameter(torch.zeros(3))])) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_norm_is_not_finite_when_one_gradient_is_not(bad: float) -> None:
    parameters = with_gradients((3, 5), (7,))
    parameters[1].grad[2] = bad
    assert not math.isfinite(float(total_norm(parameters)))


def norms_on_meshes() -> dict[str, float]:
    """On four ranks: gradients sharded over all, over half with copies, whole, and all of them together."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    sharded, hybrid, plain = with_gradients((5, 3), (7, 2), (11,))

    def on(mesh: object, parameter: nn.Parameter, placements: list[object]) -> nn.Parameter:
        gradient = parameter.grad
        result = nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))
        result.grad = distribute_tensor(gradient, mesh, placements)
        assert isinstance(result.grad, DTensor)
        return result

    sharded = on(flat, sharded, [Shard(0)])  # 5 rows over 4 ranks: uneven, and the last rank has none
    hybrid = on(grid, hybrid, [Replicate(), Shard(0)])
    groups = {"sharded": [sharded], "hybrid": [hybrid], "plain": [plain], "all": [sharded, hybrid, plain]}
    return {name: float(total_norm(members)) for name, members in groups.items()}


@pytest.mark.ranks
def test_norm_of_mixed_meshes_equals_that_of_full_tensors(on_ranks: Ranks) -> None:
    gradients = [parameter.grad for parameter in with_gradients((5, 3), (7, 2), (11,))]
    expected = {
        "sharded": float(gradients[0].norm()),
        "hybrid": float(gradients[1].norm()),
        "plain": float(gradients[2].norm()),
        "all": float(torch.cat([gradient.flatten() for gradient in gradients]).norm()),
    }
    for found in on_ranks.run(4, norms_on_meshes):
        assert found == pytest.approx(expected, rel=1e-6)


@given(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3))
def test_clipping_equals_torch(norm: float, max_norm: float) -> None:
    [parameter] = with_gradients((4,))
    parameter.grad *= norm / float(parameter.grad.norm())
    clipped = nn.Parameter(parameter.detach().clone())
    clipped.grad = parameter.grad.clone()
    nn.utils.clip_grad_norm_([clipped], max_norm)
    scale_gradients([parameter], clip_factor(total_norm([parameter]), max_norm))
    assert torch.allclose(parameter.grad, clipped.grad, rtol=1e-5)


def test_gradient_scaling_covers_every_dtype() -> None:
    parameters = [
        *with_gradients((2, 2)),
        *with_gradients((3,), dtype=torch.bfloat16),
        nn.Parameter(torch.zeros(2)),
    ]
    before = [p.grad.clone() for p in parameters[:2]]
    scale_gradients(parameters, 0.5)
    assert all(torch.equal(p.grad, 0.5 * old) for p, old in zip(parameters, before, strict=False))
    assert parameters[2].grad is None


_SMALL = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4}

# By hand: the vectors of each family, by the last part of their names; everything else is a matrix and
# decays.
VECTORS = {
    "gpt2": {"bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"},
    "llama": {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"},
    "qwen3": {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "norm.weight",
        "q_norm.weight",
        "k_norm.weight",
    },
    "phi": {"bias", "input_layernorm.weight", "final_layernorm.weight"},
    "mixtral": {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"},
}


@pytest.mark.parametrize("family", VECTORS)
def test_norms_and_biases_do_not_decay(family: str) -> None:
    model = build_empty(recipe_of(family))
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    names = decayed_names(model)
    decayed, kept = parameter_groups(model, lambda name: {"weight_decay": 0.1 if name in names else 0.0})
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    for parameter in kept["params"]:
        assert any(name_of[id(parameter)].endswith(end) for end in VECTORS[family]), name_of[id(parameter)]
    for parameter in decayed["params"]:
        assert not any(name_of[id(parameter)].endswith(f".{end}") for end in VECTORS[family]), name_of[
            id(parameter)
        ]
    assert len(decayed["params"]) + len(kept["params"]) == len(name_of)


TWO_DIMENSIONAL_BIASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "gpt_oss": (FAMILIES["gpt_oss"], {"gate_up_proj_bias", "down_proj_bias"}),
    "xlnet": (XLNET, {"r_w_bias", "r_r_bias", "r_s_bias"}),
    "recurrent_gemma": (
        {"model_type": "recurrent_gemma", **_SMALL, "num_hidden_layers": 3, "lru_width": 32},
        {"input_gate_bias", "recurrent_gate_bias"},
    ),
}


@pytest.mark.parametrize("family", TWO_DIMENSIONAL_BIASES)
def test_biases_of_two_dimensions_do_not_decay(family: str) -> None:
    section, biases = TWO_DIMENSIONAL_BIASES[family]
    model = build_empty(recipe_of({"from_config": section}))
    decayed = decayed_names(model)
    of_two_dimensions = {
        name for name, p in model.named_parameters() if p.ndim == 2 and name.rpartition(".")[2] in biases
    }
    assert {name.rpartition(".")[2] for name in of_two_dimensions} == biases
    assert not of_two_dimensions & decayed
    assert decayed


def test_frozen_parameters_are_in_no_group() -> None:
    model = build_empty(
        recipe_of({"from_config": FAMILIES["llama"], "freeze": ["model.layers.0.*", "model.norm.weight"]})
    )
    grouped = {
        id(p)
        for group in parameter_groups(model, lambda name: {"weight_decay": 0.0})
        for p in group["params"]
    }
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}
    assert not any(id(p) in grouped for p in model.model.layers[0].parameters())


def test_loss_scale_backs_off_grows_and_round_trips() -> None:
    scale = LossScale(scale=8.0)
    scale.update(finite=False)
    scale.update(finite=False)
    assert (scale.scale, scale.skipped_in_a_row) == (2.0, 2)
    for _ in range(LossScale.growth_interval_steps):
        scale.update(finite=True)
    assert (scale.scale, scale.skipped_in_a_row) == (4.0, 0)
    for _ in range(5):
        scale.update(finite=True)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    for each in (scale, other):
        for _ in range(LossScale.growth_interval_steps - 5):
            each.update(finite=True)
    assert other.scale == scale.scale == 8.0


@pytest.mark.parametrize(
    ("strategy", "mixed", "computes"),
    [
        ("NO_SHARD", "bf16", "bfloat16"),
        ("NO_SHARD", "no", "float32"),
        ("FULL_SHARD", "bf16", "float32"),
        ("NO_SHARD", "fp16", "float16"),
    ],
)
def test_only_plain_ddp_needs_autocast(strategy: str, mixed: str, computes: str) -> None:
    recipe = recipe_of(fsdp={"sharding_strategy": strategy}, precision={"mixed_precision": mixed})
    with compute_context(recipe, "cpu"):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == getattr(torch, computes)


def test_norm_is_more_accurate_than_torch_for_many_values() -> None:
    """torch adds up a norm on CPU in fp32 from end to end; the day it does not, `_pieces` can go."""
    parameter = nn.Parameter(torch.zeros(1 << 23, 1))
    parameter.grad = torch.randn(1 << 23, 1, generator=torch.Generator().manual_seed(0))
    exact = float(parameter.grad.double().norm())
    assert float(total_norm([parameter])) == pytest.approx(exact, rel=1e-7)
    assert abs(float(nn.utils.get_total_norm([parameter.grad])) / exact - 1.0) > 1e-5


def test_magnitudes_of_dora_are_not_decayed_unlike_by_transformers() -> None:
    """The guide on coming from other tools states this difference."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    theirs = set(Trainer.get_decay_parameter_names(cast(Any, None), adapted))
    differing = {
        name
        for name, p in adapted.named_parameters()
        if p.requires_grad and decays(name, p) != (name in theirs)
    }
    assert [name.rpartition("q_proj.")[2] for name in differing] == ["lora_magnitude_vector.default.weight"]
    assert differing <= theirs
