"""Rotary frequencies follow `data.max_length`, for any rows of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fsdp_tune.model.loading.construct import build_full, build_with_buffers
from fsdp_tune.model.loading.model_config import model_config
from fsdp_tune.model.loading.rotary import fix_rotary_frequencies
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.model.families import FAMILIES
from tests.model.recipes import recipe_of

ORIGINAL = 16
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
_PHI3 = FAMILIES["llama"] | {
    "model_type": "phi3",
    "pad_token_id": 0,
    "original_max_position_embeddings": ORIGINAL,
}
MODELS: dict[str, dict[str, Any]] = {
    "dynamic": FAMILIES["llama"] | {"max_position_embeddings": ORIGINAL, "rope_parameters": _DYNAMIC},
    "dynamic for one type of layers": FAMILIES["gemma3_text"]
    | {
        "max_position_embeddings": ORIGINAL,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": _DYNAMIC,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "longrope": _PHI3 | {"rope_parameters": _LONG},
    "longrope with scales": FAMILIES["mixtral"]
    | {"model_type": "phimoe", "rope_parameters": _LONG | {"short_mscale": 1.0, "long_mscale": 1.5}},
}


def recipe(name: str, max_length: int) -> Recipe:
    return recipe_of({"from_config": MODELS[name]}, data={"train": [{"path": "x"}], "max_length": max_length})


def logits_of_short_row(model: PreTrainedModel, *, next_to: int) -> torch.Tensor:
    """Logits of the same eight tokens, in a batch whose other row has `next_to` tokens."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 257, (2, 64), generator=draw)[:, :next_to]
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, :8]


@pytest.mark.parametrize("name", MODELS)
def test_rotary_result_does_not_depend_on_other_rows(name: str) -> None:
    model = build_full(recipe(name, 64))
    alone, batched, alone_again = (logits_of_short_row(model, next_to=length) for length in (8, 64, 8))
    assert torch.allclose(alone, batched, atol=1e-5)
    assert torch.equal(alone, alone_again)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_max_length_are_computed_as_by_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed = {
        length: logits_of_short_row(build_full(recipe(name, length)), next_to=length)
        for length in (ORIGINAL, 64)
    }
    monkeypatch.setattr("fsdp_tune.model.loading.construct.fix_rotary_frequencies", lambda *_: None)
    plain = {
        length: logits_of_short_row(build_full(recipe(name, length)), next_to=length)
        for length in (ORIGINAL, 64)
    }
    assert not torch.allclose(plain[ORIGINAL], plain[64], atol=1e-4)
    assert all(torch.allclose(fixed[length], plain[length], atol=1e-6) for length in fixed)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_read_their_slices_get_the_same_frequencies(name: str) -> None:
    made = recipe(name, 64)
    whole, empty = build_full(made), build_with_buffers(made, model_config(made))
    buffers = dict(empty.named_buffers())
    assert buffers
    assert all(torch.equal(buffer, buffers[key]) for key, buffer in whole.named_buffers())


def test_static_rotary_frequencies_are_unchanged() -> None:
    model = build_full(recipe_of("llama"))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fix_rotary_frequencies(model, 1 << 20)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
