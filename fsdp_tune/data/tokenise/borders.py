"""The border between the text that a model receives and the text that it must generate.

One rule for prompts with completions and for the answers of chats: the tokens before the border are those of the received text
alone, because the model receives these at inference. If the tokenizer would join characters of both into one token, the text after
the border is encoded separately.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fsdp_tune.data.tokenise.special_tokens import GUARDS, encode_after

TOKENISED_APART, TEXT_CHANGED = "tokenised-apart", "text-changed"
"""Codes of notices: what was encoded separately, and what could not be without a change of the text."""
Encode = Callable[[list[str]], list[list[int]]]
Decode = Callable[[list[int]], str]


class Continuation(NamedTuple):
    """The ids of a received text and of the text generated after it."""

    ids: list[int]
    """Begin with the ids of the received text alone."""
    is_apart: bool
    """Whether the two were encoded separately, because a token would span both."""
    is_exact: bool = True
    """Whether the ids decode to the text of the row."""


def continuation(received: list[int], joined: list[int], generated: str, encode: Encode, decode: Decode) -> Continuation:
    """Return the ids of a received text, followed by those of `generated`. `joined` are the ids of both as one text.

    Some tokenizers add a space before every text. The generated text is then encoded after another text (a guard), so that the ids
    decode to the text of the row.
    """
    if joined[: len(received)] == received:
        return Continuation(joined, is_apart=False)
    wanted = decode(joined)
    for guard in GUARDS:
        ids = encode_after(guard, generated, encode)
        if ids is not None and decode([*received, *ids]) == wanted:
            return Continuation([*received, *ids], is_apart=True)
    return Continuation([*received, *encode([generated])[0]], is_apart=True, is_exact=False)
