"""The table of strategies: complete, numbered as in torch, and independent of what the read-back expects."""

from __future__ import annotations

import ast
import inspect
from typing import get_args

import pytest

from fsdp_tune.recipe import fsdp_arguments as fsdp
from fsdp_tune.recipe.conversions import STRATEGIES_ELSEWHERE
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.strategies import STRATEGIES, ShardingStrategy


def test_each_name_that_a_recipe_takes_has_its_row() -> None:
    assert sorted(STRATEGIES) == sorted(get_args(ShardingStrategy)) == sorted(STRATEGIES_ELSEWHERE)


def test_strategy_numbers_equal_torch() -> None:
    from torch.distributed.fsdp import ShardingStrategy as Torch

    assert {name: row.number for name, row in STRATEGIES.items()} == {
        member.name.lstrip("_"): member.value for member in Torch
    }


@pytest.mark.parametrize("name", STRATEGIES)
def test_expected_live_state_matches_the_hand_written_strategy(name: ShardingStrategy) -> None:
    row, meaning = STRATEGIES[name], fsdp._MEANING[name]
    assert row.is_sharded == ("Shard(dim=0)" in meaning["placements"])
    assert row.is_hybrid == ("Replicate()" in meaning["placements"]) == (len(meaning["mesh"]) == 2)
    assert row.reshards == bool(meaning["reshard_after_forward"])
    recipe = Recipe.model_validate(
        {
            "model": {"name_or_path": "m"},
            "data": {"train": [{"path": "d"}]},
            "fsdp": {"sharding_strategy": name},
        }
    )
    assert (recipe.is_sharded, recipe.is_hybrid, recipe.reshards_after_forward) == (
        row.is_sharded,
        row.is_hybrid,
        row.reshards,
    )


def test_readback_does_not_import_the_strategy_table() -> None:
    """Made from it, the expectation would follow a wrong row, and the run with it."""
    tree = ast.parse(inspect.getsource(fsdp))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "fsdp_tune.recipe.schema.strategies" not in imported
    expected = next(
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "expected"
    )
    settings = {"is_sharded", "is_hybrid", "reshards_after_forward"}  # what `plugin_kwargs` is made from
    assert settings.isdisjoint(node.attr for node in ast.walk(expected) if isinstance(node, ast.Attribute))
