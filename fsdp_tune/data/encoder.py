"""What `data/` needs of a tokenizer: a protocol, so that tests pass twenty lines and only the surface loads transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Encoder(Protocol):
    """Picklable: rows are encoded in several processes."""

    @property
    def vocabulary_size(self) -> int: ...
    @property
    def eos_id(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_token(self) -> str:
        """The end of sequence as text."""
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

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens that the text does not spell out."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included, nothing cleaned up."""
        ...

    def render(
        self, messages: list[dict[str, Any]], template: str, *, tools: list[Any] | None, generation_prompt: bool, **variables: Any
    ) -> str:
        """A conversation as text; raises what the template raises."""
        ...
