"""What the read-back compares of emulated quantisation: each difference from the recipe is one sentence."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fsdp_tune.model.kernels.fake_quantised import prepare_quantised
from fsdp_tune.model.loading.construct import build_empty
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.readback.quantised import quantised_differences, read_quantised
from tests.model.recipes import recipe_of
from tests.model.test_fake_quantised import quantised

pytest.importorskip("torchao")


def loaded(recipe: Recipe, change: Callable[[Any], None] = lambda _: None) -> Any:
    """Return a bare model of the recipe, changed after it was prepared."""
    model = build_empty(recipe)
    prepare_quantised(recipe, model)
    change(model)
    return SimpleNamespace(model=model, layers=tuple(decoder_layers(model, recipe.layer_classes)))


def found(
    recipe: Recipe, change: Callable[[Any], None] = lambda _: None, of: Recipe | None = None
) -> list[str]:
    """Return what `recipe` differs in from a model that was prepared by it, or by the recipe `of`."""
    made = loaded(of or recipe, change)
    return quantised_differences(recipe, made, read_quantised(made))


def disable(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight_fake_quantizer.enabled = False


def replace_layer(model: Any) -> None:
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 48, bias=False, device="meta")


def share_weight(model: Any) -> None:
    """Other code of a model may read a weight that two layers have, as it is."""
    first, second = model.model.layers
    for layer in (first, second):
        layer.mlp.up_proj = nn.Linear(32, 48, bias=False, device="meta")
    second.mlp.up_proj.weight = first.mlp.up_proj.weight


@pytest.mark.parametrize("train", ["int4", "int8-int4"])
def test_prepared_model_is_as_the_recipe_says(train: str) -> None:
    recipe = quantised(train=train)
    state = read_quantised(loaded(recipe))
    assert state.weights == {"int4 by 16": 14}
    assert state.inputs == ({"int8 by token": 14} if train == "int8-int4" else {})
    assert found(recipe) == []


def test_layers_that_the_recipe_leaves_out_are_no_difference() -> None:
    """By their last name or by a module around them, and those whose weight two layers share."""
    left = ["down_proj", "model.layers.0.self_attn"]
    assert found(quantised(left=left)) == []
    assert found(quantised(), share_weight) == []


@pytest.mark.parametrize(
    ("recipe", "of", "change", "sentences"),
    [
        (
            recipe_of("llama"),
            quantised(left=["self_attn", "gate_proj", "up_proj"]),
            lambda _: None,
            [
                f"model.layers.{layer}.mlp.down_proj computes with emulated quantisation, which the recipe "
                "does not mean"
                for layer in (0, 1)
            ],
        ),
        (
            quantised(left=["model.layers.1"]),
            quantised(left=["model.layers.1.self_attn", "gate_proj", "up_proj"]),
            lambda _: None,
            [
                "model.layers.0.mlp.gate_proj computes with its own weights",
                "model.layers.0.mlp.up_proj computes with its own weights",
                "model.layers.1.mlp.down_proj computes with emulated quantisation, which the recipe does not "
                "mean",
            ],
        ),
        (
            quantised(),
            None,
            replace_layer,
            ["model.layers.1.mlp.up_proj computes with its own weights"],
        ),
        (
            quantised(),
            None,
            disable,
            [
                "the recipe means ({'int4 by 16': 14}, {}), the run has ({'int4 by 16': 13, 'int4 by 16, "
                "disabled': 1}, {})"
            ],
        ),
        (
            quantised(train="int8-int4", group_size=16),
            quantised(train="int4", group_size=8),
            lambda _: None,
            [
                "the recipe means ({'int4 by 16': 14}, {'int8 by token': 14}), the run has "
                "({'int4 by 8': 14}, {})"
            ],
        ),
        (
            quantised(left=["*"]),
            recipe_of("llama"),
            lambda _: None,
            ["the recipe means it, and no linear layer computes with it"],
        ),
    ],
    ids=["not meant", "other layers", "a layer of its own", "switched off", "other values", "none"],
)
def test_difference_is_a_sentence(
    recipe: Recipe, of: Recipe | None, change: Callable[[Any], None], sentences: list[str]
) -> None:
    different = found(recipe, change, of)
    assert sorted(different) == sorted(f"quantization.train: {sentence}" for sentence in sentences)
