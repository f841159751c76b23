"""Special tokens that a row's content spells, such as `<|im_end|>` inside a message: encoded as ordinary text.

In a chat the template writes special tokens too, and the tokenizer cannot distinguish them from those in the content.
So each one in the content is replaced by a placeholder before the chat is rendered. The rendered text is then divided at
the special tokens that remain, and the segments between them are encoded with their placeholders replaced by the
original text. Each segment is first encoded with its placeholders: this must give the ids that it has inside the
conversation, which proves that encoding it separately changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import RowError
from fsdp_tune.data.tokenise.encoder import Encoder
from fsdp_tune.data.tokenise.leaves import leaves

AS_TEXT, AS_CONTROL, INSEPARABLE = "special-tokens-as-text", "special-tokens-as-control", "special-tokens-inseparable"
"""What became of special tokens in content; codes of notices."""
GUARDS = ("", "\n", ":", "a")
"""Texts before a segment. Some tokenizers write a space before every text; behind other text there is none."""
FIRST_MARK, LAST_MARK, FIRST_NUMBER = 0xE000, 0xF8FF, 0xF0000
"""Private characters: no template treats them specially, and no normaliser changes them."""


BRANCH_LENGTH = 4
"""Characters of special tokens by which they share a branch of a pattern."""
NOTHING = r"(?!)"
"""A pattern that matches nowhere."""


class InseparableError(RowError):
    """Special tokens in the content of a row cannot be encoded as text."""

    def __init__(self) -> None:
        super().__init__("special tokens in its content cannot be encoded as text (`data.special_tokens_in_content: control` keeps them)")


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Stand for special tokens in the content of one chat."""

    mark: str
    """A character that the chat does not contain."""
    tokens: tuple[str, ...]

    def insert(self, pattern: re.Pattern[str], value: Any) -> Any:
        """`value` with placeholders in all of its texts."""
        return _with_texts(value, lambda text: pattern.sub(lambda match: self.mark + chr(FIRST_NUMBER + self.tokens.index(match[0])), text))

    def restore(self, text: str) -> str:
        return re.sub(f"{self.mark}(.)", lambda match: self.tokens[ord(match[1]) - FIRST_NUMBER], text)


class SpecialTokens:
    """The special tokens of a tokenizer, searched for in content."""

    def __init__(self, encoder: Encoder) -> None:
        tokens = sorted(encoder.special_tokens, key=lambda token: -len(token.text))  # the longest match wins, as in the tokenizer
        self._encoder = encoder
        self._control_ids = frozenset(token.id for token in tokens if not token.is_unknown)
        self._spelled = re.compile(_any_of([token.text for token in tokens]))
        self._controls = re.compile("|".join(token.pattern for token in tokens) or NOTHING)

    def spelled_in(self, value: Any) -> tuple[str, ...]:
        """The special tokens that occur in the texts of `value`, each once."""
        return tuple(dict.fromkeys(token for text in _texts(value) if self._spelled.search(text) for token in self._spelled.findall(text)))

    def with_placeholders(self, chat: Chat, spelled: tuple[str, ...], rendered: str) -> tuple[Chat, Placeholders]:
        """The chat with a placeholder for each special token that it spells; `rendered` is its text without them."""
        present = set(rendered).union(*_texts([chat.messages, chat.tools]))
        mark = next(chr(code) for code in range(FIRST_MARK, LAST_MARK) if chr(code) not in present)
        placeholders = Placeholders(mark, spelled)
        messages, tools = (placeholders.insert(self._spelled, part) for part in (chat.messages, chat.tools))
        return replace(chat, messages=messages, tools=tools), placeholders

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Ids without a control token. Raises: InseparableError if the tokenizer has no others for a text."""
        encoded = self._encoder.encode_as_text(texts)
        if not all(self._control_ids.isdisjoint(ids) for ids in encoded):
            raise InseparableError
        return encoded

    def encode_restored(self, text: str, placeholders: Placeholders) -> list[int]:
        """The ids of a rendered text in which placeholders stand for text that is no control token."""
        ids: list[int] = []
        expected = self._encoder.encode([text])[0]
        at = 0
        for segment, is_control in self._segments(text):
            if is_control:
                given = expected[at : at + 1]
                if not given or given[0] not in self._control_ids:
                    raise InseparableError
                ids += given
            else:
                guard, given = self._as_in_context(segment, expected[at:])
                restored = encode_after(guard, placeholders.restore(segment), self.encode_as_text)
                if restored is None:
                    raise InseparableError
                ids += restored
            at += len(given)
        if at != len(expected):
            raise InseparableError
        return ids

    def _segments(self, text: str) -> Iterator[tuple[str, bool]]:
        """Text between special tokens, and special tokens with the white space that they absorb."""
        at = 0
        for match in self._controls.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], False
            yield match[0], True
            at = match.end()
        if at < len(text):
            yield text[at:], False

    def _as_in_context(self, segment: str, expected: list[int]) -> tuple[str, list[int]]:
        for guard in GUARDS:
            ids = encode_after(guard, segment, self.encode_as_text)
            if ids is not None and expected[: len(ids)] == ids:
                return guard, ids
        raise InseparableError


@dataclass(frozen=True, slots=True)
class RestoringEncoder:
    """Encodes the rendered text of one chat with placeholders."""

    encoder: Encoder
    special: SpecialTokens
    placeholders: Placeholders

    @property
    def eos_id(self) -> int:
        return self.encoder.eos_id

    @property
    def eos_token(self) -> str:
        return self.encoder.eos_token

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [self.special.encode_restored(text, self.placeholders) for text in texts]


def encode_after(guard: str, text: str, encode: Callable[[list[str]], list[list[int]]]) -> list[int] | None:
    """The ids of `text` behind `guard`; None if a token spans both."""
    if not guard:
        return encode([text])[0]
    before, both = encode([guard, guard + text])
    return both[len(before) :] if both[: len(before)] == before else None


def _any_of(texts: list[str]) -> str:
    """A pattern for any of the texts, the first that matches. Those that begin alike share a branch: tokenizers have a thousand of them."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:BRANCH_LENGTH], []).append(re.escape(text[BRANCH_LENGTH:]))
    ordered = sorted(branches.items(), key=lambda branch: -len(branch[0]))  # a short text may begin a longer one
    return "|".join(f"{re.escape(begin)}(?:{'|'.join(ends)})" for begin, ends in ordered) or NOTHING


def notes_of(kind: str, spelled: tuple[str, ...]) -> tuple[Note, ...]:
    return tuple(Note(kind, f"`{token}`") for token in spelled)


def _texts(value: Any) -> Iterator[str]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, str))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _with_texts(part, change) for key, part in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_with_texts(part, change) for part in cast(list[Any], value)]
    return value
