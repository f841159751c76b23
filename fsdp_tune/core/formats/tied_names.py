"""Names of output heads and input embeddings, and the field of config.json that ties them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# The left and right sides of `_tied_weights_keys` of transformers' causal language models; a test reads them from its source.
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection|lm_loss|proj_out|generator_lm_head|head|output|decoder|proj)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|w|tokens_embed|embed_in|embeddings|word_embeddings?|tok_embeddings)\.weight$")
KEY = "tie_word_embeddings"


def tie_setting(config: Mapping[str, Any]) -> bool | None:
    """Return the setting of a config.json; None if it is left to the model class."""
    nested: Any = config.get("text_config")
    places: list[Mapping[str, Any]] = [config, nested] if isinstance(nested, dict) else [config]
    for place in places:
        if isinstance(place.get(KEY), bool):
            return place[KEY]
    return None


def is_head(name: str) -> bool:
    return _HEAD.search(name) is not None and not is_embedding(name)


def is_embedding(name: str) -> bool:
    return _EMBEDDING.search(name) is not None


def tied_candidates(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """{head: embedding} by name and shape."""
    embeddings = [name for name, shape in shapes.items() if is_embedding(name) and len(shape) == 2]
    pairs: dict[str, str] = {}
    for head, shape in shapes.items():
        if is_head(head):
            for embedding in embeddings:
                if shapes[embedding] == shape:
                    pairs.setdefault(head, embedding)
    return pairs
