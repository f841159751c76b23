"""Divided experts compute what undivided ones do, for every kernel that is allowed, and other models are
refused."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_tune.core.errors import Problem, collected
from fsdp_tune.core.expert_kernels import EXPERTS_KERNELS
from fsdp_tune.model.loading.inspect import find_facts
from fsdp_tune.model.shard.expert_parallel import divide_experts, divided_experts, require_divisible_experts
from fsdp_tune.model.shard.fsdp_units import plan_units
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.parity.architectures import ARCHITECTURES
from tests.ranks import Ranks

TOKENS, CHOSEN = 12, 2
NO_EXPERT = 4
"""An index that stands for no expert, which transformers' eager loop leaves out."""


def compared(family: str, kernel: str, ranks: int) -> None:
    """On a rank: compare output, gradients and exchanges of divided experts with those of the undivided ones
    on the tokens of all ranks."""
    from fsdp_tune.model.internals.transformers_internals import EXPERTS
    from fsdp_tune.model.loading.construct import build_full

    recipe = recipe_of(family, ranks, fsdp={"ep_size": ranks})
    torch.manual_seed(3)
    model: Any = build_full(recipe)
    EXPERTS.set(model.config, kernel)
    name = divided_experts(recipe, model)[0]
    whole: Any = copy.deepcopy(model.get_submodule(name))
    width = model.config.hidden_size
    generator = torch.Generator().manual_seed(1)
    # micro-batches of different lengths
    me, counts = (
        dist.get_rank(),
        [TOKENS >> rank for rank in range(ranks)],
    )
    tokens, own = sum(counts), slice(sum(counts[:me]), sum(counts[: me + 1]))
    hidden = torch.randn(tokens, width, generator=generator)
    chosen = torch.rand(tokens, NO_EXPERT, generator=generator).argsort(-1)[..., :CHOSEN]
    if kernel == "eager":  # the first rank computes all tokens
        chosen[:] = 0
        if family == "mixtral":
            chosen[0] = NO_EXPERT
    weights, target = (
        torch.rand(tokens, CHOSEN, generator=generator),
        torch.randn(tokens, width, generator=generator),
    )
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("expert_shard", "ep"))
    divide_experts(model.get_submodule(name), mesh, torch.device("cpu"))
    exchange, calls = dist.all_to_all_single, []
    inputs = [hidden[own].clone().requires_grad_(), weights[own].clone().requires_grad_()]
    with patch.object(
        dist, "all_to_all_single", lambda *given, **options: (calls.append(1), exchange(*given, **options))[1]
    ):
        found = model.get_submodule(name)(inputs[0], chosen[own], inputs[1])
        (found * target[own]).sum().backward()
    assert len(calls) == 5, "counts, rows and results; gradients of both"
    outside = [hidden.requires_grad_(), weights.requires_grad_()]
    expected = whole(outside[0], chosen, outside[1])
    (expected * target).sum().backward()
    torch.testing.assert_close(found, expected[own])
    for mine, theirs in zip(inputs, outside, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad[own])
    for key, parameter in model.get_submodule(name).named_parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.shape == getattr(whole, key).shape
        assert parameter.grad is not None, "also on a rank that no token reaches"
        torch.testing.assert_close(parameter.grad.to_local(), getattr(whole, key).grad.chunk(ranks)[me])


def compare_all(ranks: int, cases: list[tuple[str, str]]) -> None:
    for family, kernel in cases:
        compared(family, kernel, ranks)


FEW = [("mixtral", "eager"), ("gpt_oss", "grouped_mm")]
ALL = [
    (family, kernel)
    for family in ("mixtral", "gpt_oss")
    for kernel, each in EXPERTS_KERNELS.items()
    if each.divided_in
]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, FEW), pytest.param(4, ALL, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"]
)
def test_divided_experts_compute_what_undivided_ones_do(
    ranks: int, cases: list[tuple[str, str]], on_ranks: Ranks
) -> None:
    on_ranks.run(ranks, compare_all, ranks, cases)


def errors_of_bf16(kernels: list[str]) -> dict[str, float]:
    """On a rank: the largest relative error of a stack's gradient in bf16, by kernel. Many tokens, so that
    adding them in bf16 shows."""
    from fsdp_tune.model.internals.transformers_internals import EXPERTS
    from fsdp_tune.model.loading.construct import build_full

    tokens, ranks, found = 2048, dist.get_world_size(), {}
    recipe = recipe_of("gpt_oss", ranks, fsdp={"ep_size": ranks})
    generator = torch.Generator().manual_seed(1)
    for kernel in kernels:
        torch.manual_seed(3)
        model: Any = build_full(recipe)
        EXPERTS.set(model.config, kernel)
        name = divided_experts(recipe, model)[0]
        experts: Any = model.get_submodule(name).to(torch.bfloat16)
        exact: Any = copy.deepcopy(experts).float()
        hidden = torch.randn(ranks, tokens, model.config.hidden_size, generator=generator).bfloat16()
        chosen = torch.rand(ranks, tokens, NO_EXPERT, generator=generator).argsort(-1)[..., :CHOSEN]
        weights = torch.rand(ranks, tokens, CHOSEN, generator=generator).bfloat16()
        exact(
            hidden.flatten(0, 1).float(), chosen.flatten(0, 1), weights.flatten(0, 1).float()
        ).sum().backward()
        divide_experts(
            experts,
            init_device_mesh("cpu", (1, ranks), mesh_dim_names=("expert_shard", "ep")),
            torch.device("cpu"),
        )
        me = dist.get_rank()
        experts(hidden[me], chosen[me], weights[me]).sum().backward()
        for key, parameter in experts.named_parameters():
            assert parameter.grad.dtype == torch.bfloat16
            expected = getattr(exact, key).grad.chunk(ranks)[me]
            error = (parameter.grad.to_local().float() - expected).norm() / expected.norm()
            found[kernel] = max(found.get(kernel, 0.0), error.item())
    return found


@pytest.mark.ranks
def test_gradients_in_bf16_are_sums_in_fp32(on_ranks: Ranks) -> None:
    """Of every kernel that may divide experts in bf16, for weights and biases; a sum in bf16 is 8 % off or
    more."""
    kernels = [name for name, kernel in EXPERTS_KERNELS.items() if "bf16" in kernel.divided_in]
    assert "batched_mm" not in kernels
    for found in on_ranks.run(2, errors_of_bf16, kernels):
        assert found.keys() == set(kernels)
        assert max(found.values()) < 0.02, found


def gathers_of_experts() -> tuple[int, list[str]]:
    """On a rank: how often a step with recomputed layers gathers the experts of a layer, and the units that
    it leaves gathered."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from fsdp_tune.model.internals.transformers_internals import has_experts_kernel
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.gathered import gathered_units, units_of
    from fsdp_tune.model.shard.process_groups import make_mesh
    from fsdp_tune.model.step import forward_backward

    recipe = recipe_of(
        {"from_config": ARCHITECTURES["deepseek-divided"]},
        4,
        fsdp={"ep_size": 2, "activation_checkpointing": "full"},
    )
    torch.manual_seed(1)
    wrapped: Any = wrap_whole(
        recipe, build_full(recipe), make_mesh(recipe, "cpu"), torch.device("cpu")
    ).wrapped.train()
    original, found = _fsdp_param_group.foreach_all_gather, []

    def count(parameters: Any, *arguments: Any, **options: Any) -> Any:
        found.append(has_experts_kernel(parameters[0]._module_info.module))
        return original(parameters, *arguments, **options)

    ids = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    with patch.object(_fsdp_param_group, "foreach_all_gather", count):
        forward_backward(recipe, wrapped, {"input_ids": ids, "labels": ids}, 1 / 44)
    return sum(found), gathered_units(units_of(wrapped))


@pytest.mark.slow
@pytest.mark.ranks
def test_recomputed_layer_gathers_its_experts_once_in_the_backward(on_ranks: Ranks) -> None:
    """Experts are a unit inside the layer, whose recomputed forward ends, since a shared expert follows. Two
    layers have experts.

    FSDP2 must neither free them after that forward nor take it for one whose backward it prefetches.
    """
    assert on_ranks.run(4, gathers_of_experts) == [(2 * 2, [])] * 4


@pytest.mark.parametrize(
    ("model", "size", "reason"),
    [
        ("llama", 2, "has no stacked experts"),
        ("mixtral", 3, "has 4 experts, which do not divide by 3"),
        (
            {"from_config": FAMILIES["gpt_oss"], "dtype": "bf16"},
            2,
            "adds the gradients of all ranks' tokens in bf16",
        ),
        (
            {"from_config": FAMILIES["mixtral"] | {"hidden_size": 36, "intermediate_size": 50}},
            2,
            "cannot shard each expert evenly",
        ),
    ],
)
def test_model_whose_experts_cannot_be_divided_is_refused(model: Any, size: int, reason: str) -> None:
    """Also by `validate`, which inspects the model without weights."""
    kernels = {"experts": "batched_mm"} if "in bf16" in reason else {}
    recipe = recipe_of(model, 3 * size if size == 3 else 14, fsdp={"ep_size": size}, kernels=kernels)
    (problem,) = find_facts(recipe).problems
    assert (problem.code, problem.where and problem.where.key) == ("experts-not-divisible", "fsdp.ep_size")
    assert reason in problem.message


def _share(model: Any) -> None:
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.down_proj = first.down_proj


def _add_to_layer(model: Any) -> None:
    block = model.model.layers[1].mlp
    block.experts_of_images = copy.deepcopy(block.experts)


def _add_outside(model: Any) -> None:
    model.model.experts = copy.deepcopy(model.model.layers[1].mlp.experts)


def _rename_argument(model: Any) -> None:
    experts = model.model.layers[0].mlp.experts

    def forward(self: Any, hidden_states: Any, router_mask: Any, router_probs: Any) -> None: ...

    experts.__class__ = type("Experts", (type(experts),), {"forward": forward})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_share, "`model.layers.0.mlp.experts` (MixtralExperts) shares parameters with another module"),
        (
            _add_to_layer,
            "`model.layers.1` has 2 modules of experts, and a rank may call one that others do not",
        ),
        (_add_outside, "it has experts outside of its decoder layers"),
        (
            _rename_argument,
            "takes other arguments than hidden states, and indices and weights of the chosen experts",
        ),
    ],
)
def test_experts_that_ranks_may_not_all_call_or_own_are_refused(change: Any, reason: str) -> None:
    from fsdp_tune.model.loading.construct import build_empty
    from fsdp_tune.model.loading.model_config import config_or_facts

    recipe = recipe_of("mixtral", 2, fsdp={"ep_size": 2})
    model: Any = build_empty(recipe, config_or_facts(recipe)[0])
    change(model)
    problems: list[Problem] = []
    with collected(problems):
        plan_units(recipe, model)
        require_divisible_experts(recipe, model)
    assert [(problem.code, reason in problem.message) for problem in problems] == [
        ("experts-not-divisible", True)
    ]
