"""Parts of a model by the names of its tensors: embeddings, heads and their ties, and layers that predict
further tokens.

The names of embeddings and heads are the left and right sides of `_tied_weights_keys` of transformers'
causal language models; a test reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdp_tune.core.families import is_nested
from fsdp_tune.core.values import as_mapping

_HEAD = re.compile(
    r"(^|\.)(lm_head|embed_out|output_projection|lm_loss|proj_out|generator_lm_head|head|output|decoder|proj)\.weight$"
)
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|w|tokens_embed|embed_in|embeddings|word_embeddings?|tok_embeddings)\.weight$"
)
OLD_HEADS = {"lm_head.weight": "embed_out.weight"}
"""Head in the model → head in files of transformers 4 (GPT-NeoX)."""
TIE_KEY = "tie_word_embeddings"


def is_head(name: str) -> bool:
    return _HEAD.search(name) is not None and not is_embedding(name)


def is_embedding(name: str) -> bool:
    return _EMBEDDING.search(name) is not None


def tie_setting(config: Mapping[str, object]) -> bool | None:
    """Return whether a `config.json` ties head and embedding; None if it is left to the model class."""
    settings = (config.get(TIE_KEY), as_mapping(config.get("text_config")).get(TIE_KEY))
    return next((each for each in settings if isinstance(each, bool)), None)


NEXT_TOKEN_LAYERS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)
"""Fields of a configuration with the number of layers that predict further tokens, which no class of
transformers trains."""
_NEXT_TOKEN = re.compile(r"(^|\.)(mtp|nextn)[^.]*\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_WRAPPERS = ("model", "language_model", "transformer")


def part_of(name: str, layers: int) -> str:
    """Return the part of a model that a tensor of its files is in, as a user names it: `mtp`, `visual`,
    `vision_tower`.

    `layers`: those of the language model; one beyond them predicts further tokens (DeepSeek V3, GLM), and is
    part of `mtp`.
    """
    layer = _LAYER.search(name)
    if _NEXT_TOKEN.search(name) or (layer is not None and layers and int(layer[2]) >= layers):
        return "mtp"
    parts = name.split(".")
    while len(parts) > 2 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return parts[0]


def without_next_token_layers(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json without the layers of `NEXT_TOKEN_LAYERS`, nested configurations included."""
    return {
        name: without_next_token_layers(as_mapping(value))
        if is_nested(name, value)
        else 0
        if name in NEXT_TOKEN_LAYERS and isinstance(value, int)
        else value
        for name, value in config.items()
    }


def tied_candidates(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return {head: embedding} by name and shape."""
    embeddings = [name for name, shape in shapes.items() if is_embedding(name) and len(shape) == 2]
    pairs: dict[str, str] = {}
    for head, shape in shapes.items():
        if is_head(head):
            for embedding in embeddings:
                if shapes[embedding] == shape:
                    pairs.setdefault(head, embedding)
    return pairs
