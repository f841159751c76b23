"""What `data/` needs of a tokenizer: a protocol, so that tests pass twenty lines and only the surface loads transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SpecialToken:
    text: str
    id: int
    is_unknown: bool = False
    """Stands for text that the vocabulary lacks, so ordinary text may become it."""
    strips_left: bool = False
    """Absorbs the white space before it."""
    strips_right: bool = False

    @property
    def pattern(self) -> str:
        """A regular expression for the text that becomes this token."""
        return (r"\s*" if self.strips_left else "") + re.escape(self.text) + (r"\s*" if self.strips_right else "")


class TextEncoder(Protocol):
    """Encodes text, and knows how a sequence ends."""

    @property
    def eos_id(self) -> int: ...
    @property
    def eos_token(self) -> str:
        """The end of sequence as text."""
        ...

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens that the text does not spell out."""
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
        """Tokens that steer the model, such as the end of a turn."""
        ...

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before every text by itself: (BOS,) or nothing."""
        ...

    @property
    def chat_template(self) -> str | None: ...
    @property
    def digest(self) -> str:
        """Names all that decides which ids a text gets, the chat template included."""
        ...

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, with special tokens that it spells out as ordinary text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included, nothing cleaned up."""
        ...

    def render(
        self, messages: list[dict[str, Any]], template: str, *, tools: list[Any] | None, generation_prompt: bool, **variables: Any
    ) -> str:
        """A conversation as text; raises what the template raises."""
        ...
