"""Adapters of experts that ranks divide compute what PEFT's layers compute with all experts on one rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_tune.core.tensors.peft_names import unwrapped
from fsdp_tune.model.shard.expert_adapters import adapters_around
from fsdp_tune.model.shard.expert_parallel import divide_experts, divided_experts
from tests.model.recipes import recipe_of
from tests.ranks import Ranks

STACKS = ["gate_up_proj", "down_proj"]
TOKENS, EXPERTS, CHOSEN = 12, 4, 2


def adapted_model(recipe: Any, stacks: list[str]) -> Any:
    """A model with PEFT's layers around its experts, none of whose factors is zero."""
    from peft import LoraConfig, inject_adapter_in_model

    from fsdp_tune.model.loading.construct import build_full

    torch.manual_seed(3)
    model = build_full(recipe)
    config = LoraConfig(
        r=2, lora_alpha=3, target_modules=[], target_parameters=[f"experts.{stack}" for stack in stacks]
    )
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def compare(family: str, kernel: str, stacks: list[str]) -> None:
    """On a rank: compare output and gradients with those of one rank on the tokens of all ranks."""
    from fsdp_tune.model.internals.transformers_internals import EXPERTS as KERNEL

    ranks, me = dist.get_world_size(), dist.get_rank()
    recipe = recipe_of(family, ranks, fsdp={"ep_size": ranks})
    model = adapted_model(recipe, stacks)
    KERNEL.set(model.config, kernel)
    name = divided_experts(recipe, model)[0]
    layers = adapters_around(model, name)
    assert layers.keys() == set(stacks)
    called, whole = model.get_submodule(unwrapped(name)), copy.deepcopy(model.get_submodule(unwrapped(name)))
    generator = torch.Generator().manual_seed(1)
    counts = [TOKENS >> rank for rank in range(ranks)]
    tokens, own = sum(counts), slice(sum(counts[:me]), sum(counts[: me + 1]))
    hidden = torch.randn(tokens, model.config.hidden_size, generator=generator)
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN]
    if kernel == "eager":  # no token reaches the last rank
        chosen[:] = 0
    weights = torch.rand(tokens, CHOSEN, generator=generator)
    target = torch.randn(tokens, model.config.hidden_size, generator=generator)
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("expert_shard", "ep"))
    divide_experts(model.get_submodule(name), mesh, torch.device("cpu"), layers)

    found = called(hidden[own], chosen[own], weights[own])
    (found * target[own]).sum().backward()
    expected = whole(hidden, chosen, weights)
    (expected * target).sum().backward()
    torch.testing.assert_close(found, expected[own])
    for (key, parameter), other in zip(called.named_parameters(), whole.parameters(), strict=True):
        if ".lora_" not in f".{key}":
            assert parameter.grad is None, key
            continue
        assert parameter.grad is not None, "also on a rank that no token reaches"
        dist.all_reduce(parameter.grad)
        distance = (parameter.grad - other.grad).norm() / other.grad.norm()
        assert distance <= 1e-6, (key, float(distance))


def compare_all(cases: list[tuple[str, str, list[str]]]) -> None:
    for case in cases:
        compare(*case)


CASES = [
    ("mixtral", "eager", STACKS),
    ("gpt_oss", "grouped_mm", STACKS),  # stored transposed, with biases
    ("mixtral", "grouped_mm", STACKS[1:]),
]


@pytest.mark.ranks
def test_adapted_experts_that_ranks_divide_compute_what_peft_does(on_ranks: Ranks) -> None:
    on_ranks.run(2, compare_all, CASES)


def test_experts_without_adapters_have_none_around_them() -> None:
    recipe = recipe_of("mixtral", 2, fsdp={"ep_size": 2})
    model = adapted_model(recipe, STACKS[:1])
    name = divided_experts(recipe, model)[0]
    assert adapters_around(model, name).keys() == {"gate_up_proj"}
    assert adapters_around(model, "model.layers.0.mlp") == {}
