"""A recipe with contradictions is checked further without them."""

from __future__ import annotations

import pytest

from fsdp_tune.recipe.read.loader import WrongRecipeError
from tests.recipe.loading import load


def test_contradictory_key_without_a_default_is_taken_out_with_its_section_and_the_others_too() -> None:
    text = """
model: {name_or_path: gpt2, rope_scaling: {rope_type: linear, factor: 2, beta_fast: 32}}
data: {train: [{path: some/set}]}
fsdp: {offload_params: true, sharding_strategy: NO_SHARD}
"""
    with pytest.raises(WrongRecipeError) as caught:
        load(text)
    recipe = caught.value.recipe
    assert recipe is not None
    assert (recipe.model.name_or_path, recipe.model.rope_scaling) == ("gpt2", None)
    assert not recipe.fsdp.offload_params
