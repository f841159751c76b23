"""The interface of tokenizers in `data/`: a protocol, so that tests can use a small substitute and do not
load transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SpecialToken:
    text: str
    id: int
    is_unknown: bool = False
    """Whether it is the unknown token, to which ordinary text may be encoded."""
    strips_left: bool = False
    """Whether it includes the white space before it."""
    strips_right: bool = False
    is_added: bool = False
    """Whether the recipe added it by `model.tokens.add`, and not as the end of sequence or the padding."""

    @property
    def pattern(self) -> str:
        """A regular expression for the text that is encoded as this token."""
        return (
            (r"\s*" if self.strips_left else "")
            + re.escape(self.text)
            + (r"\s*" if self.strips_right else "")
        )


class TextEncoder(Protocol):
    """Encodes text; has the end-of-sequence token."""

    @property
    def eos_id(self) -> int: ...
    @property
    def eos_token(self) -> str:
        """The end-of-sequence token as text."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens that the text does not contain."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, with special tokens and without clean-up of spaces."""
        ...


class Encoder(TextEncoder, Protocol):
    """Picklable: rows are encoded in several processes."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def special_tokens(self) -> Sequence[SpecialToken]:
        """Control tokens, such as the end of a turn."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer adds before every text: (BOS,) or ()."""
        ...

    @property
    def chat_template(self) -> str | None: ...
    @property
    def digest(self) -> str:
        """Digest of all that determines the ids of a text, including the chat template."""
        ...

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, with special tokens in it encoded as ordinary text."""
        ...

    def render(
        self,
        messages: list[dict[str, object]],
        template: str,
        *,
        tools: list[object] | None,
        generation_prompt: bool,
        **variables: object,
    ) -> str:
        """Render a conversation as text. Exceptions of the template are not caught."""
        ...

    def render_marked(
        self,
        messages: list[dict[str, object]],
        template: str,
        *,
        tools: list[object] | None,
        **variables: object,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation as text, with begin and end of each text inside generation markers."""
        ...


def end_of_text(ids: Sequence[int], encoder: Encoder) -> int:
    """Return where the special tokens at the end begin, with white space between them left out."""
    special = {token.id for token in encoder.special_tokens}
    end = len(ids)
    for at in range(len(ids) - 1, -1, -1):
        if ids[at] in special:
            end = at
        elif encoder.decode([ids[at]]).strip():
            break
    return end


def closing_tokens(ids: Sequence[int], encoder: Encoder) -> set[int]:
    """Return the token that ends an answer, if it is a special token or the end of sequence; else nothing."""
    first = set(ids[end_of_text(ids, encoder) :][:1])
    return first & {encoder.eos_id, *(token.id for token in encoder.special_tokens)}
