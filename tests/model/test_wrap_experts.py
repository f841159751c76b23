"""Divided experts as FSDP2 units inside their layers: what is on the device, the order of gathers, and the
mean of gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of
from tests.ranks import Ranks

LAYERS = 3
_MODEL = {"from_config": FAMILIES["qwen2_moe"] | {"num_hidden_layers": LAYERS, "num_experts": 6}}
"""A shared expert follows the divided ones, so that the recomputation of a layer runs the forward of
these."""


def built(**sections: Any) -> tuple[Any, Any]:
    """On a rank: a recipe for all ranks, and its model with all weights."""
    from fsdp_tune.model.loading.construct import build_full

    recipe = recipe_of(_MODEL, dist.get_world_size(), **sections)
    torch.manual_seed(1)
    return recipe, build_full(recipe)


def stepped(recipe: Any, model: Any) -> Any:
    """On a rank: the wrapped model after the backward of one micro-batch."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.shard.process_groups import make_mesh
    from fsdp_tune.model.step import forward_backward

    wrapped: Any = wrap_whole(recipe, model, make_mesh(recipe, "cpu"), torch.device("cpu")).wrapped.train()
    ids = torch.randint(0, 60, (1, 12), generator=torch.Generator().manual_seed(dist.get_rank()))
    forward_backward(recipe, wrapped, {"input_ids": ids, "labels": ids}, 1 / 22)
    return wrapped


def unsharded_parts() -> list[int]:
    """On a rank: at each call of `fully_shard`, the number of modules that hold a part of the experts and are
    not sharded yet."""
    from fsdp_tune.model.shard import wrap
    from fsdp_tune.model.shard.expert_parallel import exchange_group

    recipe, model = built(fsdp={"ep_size": 2, "cpu_ram_efficient_loading": False})
    found, original = [], wrap.fully_shard

    def shard(modules: Any, **options: Any) -> Any:
        found.append(
            sum(
                exchange_group(each) is not None and not isinstance(each, FSDPModule)
                for each in model.modules()
            )
        )
        return original(modules, **options)

    with patch.object(wrap, "fully_shard", shard):
        stepped(recipe, model)
    return found


@pytest.mark.ranks
def test_experts_of_one_module_at_a_time_are_unsharded(on_ranks: Ranks) -> None:
    for found in on_ranks.run(2, unsharded_parts):
        assert sorted(found)[-LAYERS - 1 :] == [0] + [1] * LAYERS


def gathers_of_backward(recomputation: str, depth: int | str, forward_depth: int | bool) -> list[str]:
    """On a rank: the units that a backward gathers, in order."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    fsdp = {
        "ep_size": 2,
        "activation_checkpointing": recomputation,
        "backward_prefetch": depth,
        "forward_prefetch": forward_depth,
    }
    recipe, model = built(fsdp=fsdp)
    found: list[str] = []
    gather, loss_backward = FSDPParamGroup.unshard, torch.Tensor.backward

    def unshard(self: Any, *given: Any, **options: Any) -> None:
        if self._all_gather_result is None and not self.is_unsharded:
            found.append(self._module_fqn)
        gather(self, *given, **options)

    def backward(self: torch.Tensor, *given: Any, **options: Any) -> None:
        found.clear()
        loss_backward(self, *given, **options)

    with patch.object(FSDPParamGroup, "unshard", unshard), patch.object(torch.Tensor, "backward", backward):
        stepped(recipe, model)
    return found


CASES: list[tuple[str, int | str, int | bool]] = [
    ("none", 1, False),
    ("none", "BACKWARD_PRE", 1),
    ("full", "BACKWARD_PRE", 1),
    ("full", 3, 2),
]


def all_gathers_of_backward() -> list[list[str]]:
    return [gathers_of_backward(*case) for case in CASES]


@pytest.mark.ranks
def test_backward_gathers_a_layer_before_its_experts(on_ranks: Ranks) -> None:
    """A layer's backward starts before that of the experts inside of it. Gathers in another order would wait
    for each other.

    A recomputation gathers nothing ahead, although it runs the forward of experts.
    """
    expected = [
        name
        for index in reversed(range(LAYERS))
        for name in (f"model.layers.{index}", f"model.layers.{index}.mlp.experts")
    ]
    for rank in on_ranks.run(2, all_gathers_of_backward):
        for case, found in zip(CASES, rank, strict=True):
            assert [name for name in found if ".layers." in name] == expected, case


def rounding_of_gradients() -> float:
    """On a rank: how far three times the gradients of experts, which three ranks divide, are from numbers of
    bf16."""
    recipe, model = built(fsdp={"ep_size": 3}, precision={"mixed_precision": "bf16"})
    wrapped = stepped(recipe, model)
    sums: list[torch.Tensor] = []
    for parameter in (each for name, each in wrapped.named_parameters() if ".experts." in name):
        assert isinstance(parameter.grad, DTensor)
        sums.append(parameter.grad.to_local().flatten() * 3)
    found = torch.cat(sums)
    assert found.norm() > 0
    return ((found - found.bfloat16().float()).norm() / found.norm()).item()


@pytest.mark.ranks
def test_mean_over_ranks_is_not_rounded(on_ranks: Ranks) -> None:
    """The gradient of an expert is rounded once, when its products are summed: dividing it by 3 in bf16 would
    round it again."""
    assert max(on_ranks.run(3, rounding_of_gradients)) < 1e-6
