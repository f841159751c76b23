"""A hash of the content of an example, equal for equal rows regardless of how a file or a recipe writes
them."""

from __future__ import annotations

import json

from fsdp_tune.data.format.formats import Chat, Example, Ids, LabelledText, Text
from fsdp_tune.run.manifest import digest_number


def content_hash(example: Example) -> int:
    """Return a 64-bit hash of text, messages or ids alone: not of the order of keys, the trained parts or the
    tokenizer."""
    text = json.dumps(_content(example), sort_keys=True, default=repr)
    return digest_number(text)


def _content(example: Example) -> list[object]:
    match example:
        case Text():
            return ["text", example.prompt + example.completion]
        case LabelledText():
            return ["text", "".join(text for text, _ in example.texts)]
        case Chat():
            return [
                "chat",
                example.messages,
                example.tools or [],
                *([example.variables] if example.variables else []),
            ]
        case Ids():
            return ["ids", list(example.input_ids)]
