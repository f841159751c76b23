"""The recipe of the small model that stands for a recipe's in a comparison."""

from __future__ import annotations

from typing import Any

from fsdp_tune.comparison.small_model import map_patterns


def test_entries_that_an_earlier_one_hides_in_the_small_model_are_left_out() -> None:
    """Both would be `model.layers.0.*`, which is an error in a recipe."""
    groups = [{"match": [f"model.layers.{layer}.*"], "learning_rate": 1e-4} for layer in (0, 1, 31)]
    raw: dict[str, Any] = {
        "model": {"freeze": []},
        "training": {"parameter_groups": groups},
        "lora": None,
    }
    map_patterns(raw, {"num_hidden_layers": 32}, {"num_hidden_layers": 2})
    assert [group["match"] for group in raw["training"]["parameter_groups"]] == [
        ["model.layers.0.*"],
        ["model.layers.1.*"],
    ]
