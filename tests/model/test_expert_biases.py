"""Gradients of the biases of experts are sums in fp32, also where the experts are computed in bf16."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_tune.model.internals.transformers_internals import EXPERTS
from fsdp_tune.model.loading.construct import build_full
from fsdp_tune.model.shard import expert_biases
from fsdp_tune.model.shard.expert_biases import sum_biases_in_fp32
from tests.model.recipes import recipe_of
from tests.ranks import Ranks

TOKENS, CHOSEN = 4096, 2


def experts_of(family: str, kernel: str) -> Any:
    torch.manual_seed(3)
    model: Any = build_full(recipe_of(family))
    EXPERTS.set(model.config, kernel)
    return model.model.layers[0].mlp.experts


def gradients(experts: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Of a sum over thousands of rows, by parameter, in fp32."""
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, experts.hidden_size, generator=draw).bfloat16().to(dtype)
    chosen = torch.rand(TOKENS, experts.num_experts, generator=draw).argsort(-1)[..., :CHOSEN]
    weights = torch.rand(TOKENS, CHOSEN, generator=draw).bfloat16().to(dtype)
    experts(hidden, chosen, weights).sum().backward()
    return {name: parameter.grad.float() for name, parameter in experts.named_parameters()}


def test_bias_gradients_in_bf16_are_summed_in_fp32() -> None:
    experts = experts_of("gpt_oss", "grouped_mm").bfloat16()
    exact = gradients(copy.deepcopy(experts).float(), torch.float32)
    plain = gradients(copy.deepcopy(experts), torch.bfloat16)
    sum_biases_in_fp32(experts)
    summed = gradients(experts, torch.bfloat16)

    def errors(found: dict[str, torch.Tensor]) -> list[float]:
        return [float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact]

    assert max(errors(summed)) < 0.005
    assert max(errors(plain)) > 0.01, "transformers has changed: is `sum_biases_in_fp32` still needed?"


@pytest.mark.parametrize(("family", "kernel"), [("mixtral", "grouped_mm"), ("gpt_oss", "eager")])
def test_experts_whose_kernel_indexes_no_bias_are_left_alone(family: str, kernel: str) -> None:
    experts = experts_of(family, kernel)
    sum_biases_in_fp32(experts)
    assert "forward" not in vars(experts)


def indexed_in_a_step(fsdp: dict[str, Any]) -> int:
    """On a rank: how often a step in bf16 indexes biases whose gradients are summed in fp32."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.shard.process_groups import make_mesh
    from fsdp_tune.model.step import forward_backward

    recipe = recipe_of("gpt_oss", 2, fsdp=fsdp, precision={"mixed_precision": "bf16"})
    wrapped = wrap_whole(recipe, build_full(recipe), make_mesh(recipe, "cpu"), torch.device("cpu")).wrapped
    ids, found = torch.randint(0, 250, (1, 12)), list[torch.dtype]()
    original = expert_biases._Biases.__getitem__

    def index(biases: Any, experts: torch.Tensor) -> torch.Tensor:
        found.append(biases._stack.dtype)
        return original(biases, experts)

    with patch.object(expert_biases._Biases, "__getitem__", index):
        forward_backward(recipe, wrapped.train(), {"input_ids": ids, "labels": ids}, 1.0)
    return len(found)


@pytest.mark.ranks
@pytest.mark.parametrize("fsdp", [{}, {"version": 1}, {"ep_size": 2}], ids=str)
def test_each_bias_of_a_sharded_model_is_summed_in_fp32(fsdp: dict[str, Any], on_ranks: Ranks) -> None:
    """Two biases of each of two layers."""
    assert on_ranks.run(2, indexed_in_a_step, fsdp) == [4, 4]
