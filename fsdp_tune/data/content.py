"""A hash of what an example holds, equal for equal rows however a file or a recipe writes them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

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
            return ["chat", example.messages, example.tools or []]
        case Ids():
            return ["ids", list(example.input_ids)]
