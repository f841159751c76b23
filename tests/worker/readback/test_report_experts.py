"""The read-back compares the experts that each rank holds with the part that it must hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fsdp_tune.recipe.fsdp_arguments import expected
from fsdp_tune.run.records import LiveState
from fsdp_tune.worker.readback.report import _expert_differences
from tests.model.recipes import recipe_of

NAME = "model.layers.0.mlp.experts.down_proj"


def found(*parts: list[int], size: int = 2) -> list[str]:
    recipe = recipe_of("mixtral", 4, fsdp={"ep_size": size})
    loaded: Any = SimpleNamespace(model=SimpleNamespace(named_parameters=lambda: [(NAME, torch.zeros(4, 2, 2))]))
    return _expert_differences(recipe, loaded, [LiveState(own_experts={NAME: part}) for part in parts])


def test_ranks_with_their_parts_pass() -> None:
    assert found([0, 2], [2, 4], [0, 2], [2, 4]) == []
    assert expected(recipe_of("mixtral", 4, fsdp={"ep_size": 2}))["expert_group"] == 2


def test_rank_with_the_part_of_another_is_named() -> None:
    assert found([0, 2], [0, 2], [0, 2], [2, 4]) == [f"experts of `{NAME}`: rank 1 holds [0, 2], and its part is [2, 4]"]


def test_run_that_divides_no_stack_is_reported() -> None:
    recipe = recipe_of("mixtral", 4, fsdp={"ep_size": 2})
    loaded: Any = SimpleNamespace(model=SimpleNamespace(named_parameters=list))
    assert _expert_differences(recipe, loaded, [LiveState()]) == ["experts: the recipe divides them, and the run has no divided stack"]
