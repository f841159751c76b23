"""Sides of comparisons that are computed in the process of the test, and a model and rows for them."""

from __future__ import annotations

from typing import Any

from fsdp_tune.comparison.observe import Side
from fsdp_tune.comparison.stages import Observation
from fsdp_tune.recipe.schema.recipe import Recipe

LLAMA = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
}
LLAMA |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}


def in_process(child: Any, recipe: Recipe, until: str) -> Observation:
    """Compute a side in place of the child process, whose start takes seconds."""
    return Side(
        {"recipe": recipe.model_dump(mode="json", by_alias=True), "until": until, **child.settings}
    ).observe()
