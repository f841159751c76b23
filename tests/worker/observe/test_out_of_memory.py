"""The live memory that a report names when an allocation failed: what this rank stores."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_tune.model.optim.adamw_in_blocks import torchao_class, with_plain_rates
from fsdp_tune.worker.observe.out_of_memory import live_components
from tests.model.recipes import recipe_of
from tests.ranks import Ranks


def test_moments_in_blocks_are_counted_as_stored() -> None:
    """A tensor of torchao has no storage of its own: it consists of codes, scales and a table."""
    pytest.importorskip("torchao")
    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = with_plain_rates(torchao_class(8))([weight], lr=1e-2)
    weight.grad = torch.randn(64, 64)
    optimizer.step()
    found = live_components(stand_in(nn.ParameterList([weight]), optimizer))
    blocks, table = 64 * 64 // 256, 256
    moment = 64 * 64 + 4 * blocks + 4 * table
    assert found["optimizer state"] - 2 * moment <= 4, "and the number of the step"
    assert (found["parameters"], found["gradients"]) == (4 * 64 * 64, 4 * 64 * 64)


def stand_in(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """What `live_components` reads of a trainer."""
    return SimpleNamespace(
        wrapped=wrapped, args=SimpleNamespace(device=torch.device("cpu")), live_optimizer=optimizer
    )


def components_around_a_forward(version: int) -> list[dict[str, int]]:
    """On a rank: the components before a step, and while a layer is gathered in its forward and backward."""
    from fsdp_tune.model.loading.assemble import wrap_whole
    from fsdp_tune.model.loading.construct import build_full
    from fsdp_tune.model.shard.process_groups import make_mesh
    from fsdp_tune.model.step import forward_backward

    recipe = recipe_of("llama", dist.get_world_size(), fsdp={"version": version})
    mesh = make_mesh(recipe, "cpu")
    wrapped: Any = wrap_whole(recipe, build_full(recipe), mesh, torch.device("cpu")).wrapped.train()
    trainer = stand_in(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.0))
    found = [live_components(trainer)]
    wrapped.model.layers[1].mlp.register_forward_hook(lambda *_: found.append(live_components(trainer)))
    ids = torch.randint(0, 60, (1, 12))
    forward_backward(recipe, wrapped, {"input_ids": ids, "labels": ids}, 1 / 11)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("version", [1, 2])
def test_gathered_parameters_are_not_counted_as_those_of_the_rank(version: int, on_ranks: Ranks) -> None:
    before, inside, *_ = on_ranks.run(2, components_around_a_forward, version)[0]
    assert before["parameters"] > 0
    assert inside == before
