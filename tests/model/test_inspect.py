"""What is said of a model before a rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.model.inspect import facts
from tests.model.recipes import recipe_of

OPT = {
    "model_type": "opt",
    "vocab_size": 256,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}


def codes(model: str | dict[str, Any], max_length: int) -> tuple[list[str], list[str]]:
    section = {"from_config": model} if isinstance(model, dict) else model
    document = facts(recipe_of(section, data={"train": [{"path": "x"}], "max_length": max_length}))
    return [each["code"] for each in document["problems"]], [each["code"] for each in document["notices"]]


@pytest.mark.parametrize("model", ["gpt2", OPT], ids=["gpt2", "opt"])
def test_a_row_beyond_the_table_of_positions_is_refused(model: str | dict[str, Any]) -> None:
    assert codes(model, 128) == ([], [])
    assert codes(model, 129) == (["max-length-beyond-positions"], [])


def test_a_row_beyond_the_positions_that_were_trained_is_told() -> None:
    assert codes(LLAMA, 128) == ([], [])
    assert codes(LLAMA, 129) == ([], ["positions-never-trained"])
