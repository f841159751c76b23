"""One prompt with what model and server make of it, and where two of its texts or lists of tokens part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_tune.answer.model_requests import ReferenceAnswer, ScoredTokens
from fsdp_tune.comparison.openai_server import ServedAnswer, ServedPrompt

Decode = Callable[[Sequence[int]], str]
REPLACEMENT = "\ufffd"
_SHOWN = 60


@dataclass(slots=True)
class Exchange:
    """One prompt, and what model and server make of it."""

    name: str
    shown: str
    row: str | None
    reference: ReferenceAnswer
    prompt: ServedPrompt
    answer: ServedAnswer
    same: ServedAnswer | None = None
    """The answer to A's tokens; None if the server takes none."""
    refused: str = ""
    """What the server says instead."""
    score: ScoredTokens | None = None
    """The model's log-probabilities of `answer`, after A's tokens."""
    same_score: ScoredTokens | None = None
    half_score: ScoredTokens | None = None
    """As `score` and `same_score`, by the model in the server's dtype; None if that was not computed."""
    half_same_score: ScoredTokens | None = None
    begun_score: ScoredTokens | None = None
    """As `score`, after A's tokens with or without the beginning of text, where the server returns how many
    tokens it reads alone."""

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.reference.ids)


Found = tuple[str, str, str]
"""Where in a place two sides differ, and both sides."""


def text_difference(a: str, b: str) -> Found | None:
    if a == b:
        return None
    at = shared_length(a, b)
    return f", character {at}", quoted(a[max(at - 10, 0) :]), quoted(b[max(at - 10, 0) :])


def token_difference(a: Sequence[int], b: Sequence[int], decode: Decode) -> Found | None:
    if tuple(a) == tuple(b):
        return None
    at = shared_length(a, b)
    x, y = (
        f"has ended after {at} tokens" if at >= len(each) else f"{decode([each[at]])!r} (id {each[at]})"
        for each in (a, b)
    )
    return f", token {at}", x, y


def shared_length(a: Sequence[object], b: Sequence[object]) -> int:
    """Return the length of the part that both begin with."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def quoted(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")
