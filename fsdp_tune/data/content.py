"""A hash of what an example holds, equal for equal rows however a file or a recipe writes them."""

from __future__ import annotations

import hashlib
import json
from typing import Any, cast

from fsdp_tune.data.formats import Chat, Example, Ids, Text


def content_hash(example: Example) -> int:
    """Return 64 bits that depend on text, messages or ids alone: not on the order of keys, on what is trained, or on the tokenizer."""
    text = json.dumps(_content(example), sort_keys=True, default=repr)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _content(example: Example) -> list[Any]:
    match example:
        case Text():
            return ["text", example.prompt + example.completion]
        case Chat():
            return ["chat", _without_nulls(example.messages), _without_nulls(example.tools or [])]
        case Ids():
            return ["ids", list(example.input_ids)]


def _without_nulls(value: Any) -> Any:
    """Parquet and Arrow give every message every key, null where a JSON row leaves it out."""
    if isinstance(value, dict):
        mapping = cast(dict[Any, Any], value)
        return {str(key): _without_nulls(item) for key, item in mapping.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast(list[Any], value)]
    return value
