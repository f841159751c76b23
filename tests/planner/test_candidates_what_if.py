from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.planner.search.scaling import forced_changes, machines_for
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import WORLD_RULES, World


@pytest.mark.parametrize(
    ("training", "fsdp", "ranks", "forced"),
    [
        ({"global_batch_size": 64}, {}, 8, {}),
        (
            {"global_batch_size": 4, "per_device_train_batch_size": 2},
            {},
            4,
            {"training.per_device_train_batch_size": 1},
        ),
        ({"global_batch_size": 4}, {}, 8, {"training.global_batch_size": 8}),
        (
            {"global_batch_size": 64, "gradient_accumulation_steps": 8},
            {},
            16,
            {"training.gradient_accumulation_steps": 4},
        ),
        ({}, {"reshard_after_forward": 4}, 2, {"fsdp.reshard_after_forward": None}),
        ({}, {"sharding_strategy": "HYBRID_SHARD"}, 3, {"fsdp.sharding_strategy": "FULL_SHARD"}),
        ({}, {"sharding_strategy": "HYBRID_SHARD_ZERO2"}, 1, {"fsdp.sharding_strategy": "SHARD_GRAD_OP"}),
        ({}, {"ep_size": 8}, 16, {}),
        ({}, {"ep_size": 8}, 12, {"fsdp.ep_size": 4}),
        ({}, {"ep_size": 8}, 1, {"fsdp.ep_size": 1}),
        ({}, {"ep_size": 4, "sharding_strategy": "HYBRID_SHARD"}, 4, {"fsdp.ep_size": 2}),
        (
            {},
            {"ep_size": 2, "sharding_strategy": "HYBRID_SHARD"},
            3,
            {"fsdp.ep_size": 1, "fsdp.sharding_strategy": "FULL_SHARD"},
        ),
    ],
)
def test_only_dependent_keys_change(
    training: dict[str, Any], fsdp: dict[str, Any], ranks: int, forced: dict[str, Any]
) -> None:
    document: dict[str, Any] = {"training": training, "fsdp": fsdp}
    world = World(ranks, 1)
    found = forced_changes(Recipe.model_validate(document), world)
    assert found == forced
    for key, value in found.items():
        section, name = key.split(".")
        document[section] = document[section] | {name: value}
    changed = Recipe.model_validate(document)
    assert [finding for rule in WORLD_RULES for finding in rule(changed, world)] == []


def test_machines_hold_the_same_number_of_devices() -> None:
    assert [machines_for(ranks, 8) for ranks in (1, 8, 9, 12, 16, 11)] == [1, 1, 3, 2, 2, 11]
