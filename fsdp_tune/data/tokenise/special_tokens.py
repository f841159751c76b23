"""Encode special tokens in the content of a row, such as `<|im_end|>` inside a message, as ordinary text.

In a chat the template writes special tokens too, and the tokenizer cannot distinguish them from those in
the content. So each one in the content is replaced by a placeholder before the chat is rendered. The
rendered text is then divided at the special tokens that remain, and the segments between them are encoded
with their placeholders replaced by the original text. Each segment is first encoded with its placeholders:
this must give the ids that it has inside the conversation, which proves that encoding it separately changes
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from fsdp_tune.core.values import leaves
from fsdp_tune.data.format.formats import Chat, Text
from fsdp_tune.data.format.row_notes import Note
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise.answer_spans import FIRST_MARK, FIRST_NUMBER, LAST_MARK
from fsdp_tune.data.tokenise.encoder_protocol import Encoder

AS_TEXT, AS_CONTROL, INSEPARABLE = (
    "special-tokens-as-text",
    "special-tokens-as-control",
    "special-tokens-inseparable",
)
"""How special tokens in the content were encoded; codes of notices."""


GUARDS = ("", "\n", ":", "a")
"""Texts to encode before a segment. Some tokenizers add a space before every text, but not after other
text."""


BRANCH_LENGTH = 4
"""Number of leading characters by which special tokens share a branch of a pattern."""


NOTHING = r"(?!)"
"""A pattern that matches nowhere."""


class InseparableError(RowError):
    """Special tokens in the content of a row cannot be encoded as text."""

    def __init__(self) -> None:
        super().__init__(
            "special tokens in its content cannot be encoded as text (`data.special_tokens_in_content: "
            "control` keeps them)"
        )


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Placeholders for special tokens in the content of one chat."""

    mark: str
    """A character that the chat does not contain."""
    tokens: tuple[str, ...]
    replaced: tuple[str, ...]
    """Those of `tokens` that `insert` replaces."""

    def insert(self, pattern: re.Pattern[str], value: object) -> object:
        """Return `value` with placeholders in all of its texts; `pattern` finds special tokens, those without
        a placeholder stay."""

        def placeholder(match: re.Match[str]) -> str:
            return (
                self.mark + chr(FIRST_NUMBER + self.tokens.index(match[0]))
                if match[0] in self.replaced
                else match[0]
            )

        return _with_changed_texts(value, lambda text: pattern.sub(placeholder, text))

    def restore(self, text: str) -> str:
        return re.sub(f"{self.mark}(.)", lambda match: self.tokens[ord(match[1]) - FIRST_NUMBER], text)


@dataclass(frozen=True, slots=True)
class InChat:
    """The special tokens in the content of one chat."""

    answers: tuple[str, ...]
    """Those in messages of the assistant that are encoded as ordinary text."""
    others: tuple[str, ...]
    """The same for other messages and tools."""
    kept: tuple[str, ...]
    """Those that are encoded as tokens."""

    @property
    def as_text(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self.others, *self.answers]))


class SpecialTokens:
    """The special tokens of a tokenizer, searched for in content."""

    def __init__(self, encoder: Encoder) -> None:
        # Longest first: the longest match is used, as in the tokenizer.
        tokens = sorted(encoder.special_tokens, key=lambda token: -len(token.text))
        self._encoder = encoder
        self._added = frozenset(token.text for token in tokens if token.is_added)
        self._control_ids = frozenset(token.id for token in tokens if not token.is_unknown)
        self._spelled = re.compile(_any_of([token.text for token in tokens]))
        self._controls = re.compile("|".join(token.pattern for token in tokens) or NOTHING)

    def spelled_in(self, value: object) -> tuple[str, ...]:
        """Return the special tokens that occur in the texts of `value`, each once."""
        return tuple(
            dict.fromkeys(
                token
                for text in _texts(value)
                if self._spelled.search(text)
                for token in self._spelled.findall(text)
            )
        )

    def is_for_rows(self, token: str) -> bool:
        """Return whether the recipe added a token (`model.tokens.add`)."""
        return token in self._added

    def in_chat(self, chat: Chat, template: str, rendered: list[str], *, keeps_added: bool) -> InChat:
        """Decide about the special tokens in a chat; `rendered` are the texts of its examples.

        With `keeps_added`, tokens that the recipe added for the rows stay tokens, but not those of the
        template, so that no content forges a turn. In answers, which are what the model learns to write,
        these are the tokens that the template writes there itself (the end of a turn); elsewhere also those
        that its text contains (`<tool_response>`).
        """
        # the examples repeat their context, so that all together would count it twice
        count = max(rendered, key=len).count
        content = [chat.messages, chat.tools]

        def is_kept(token: str, *, is_answer: bool) -> bool:
            if not keeps_added or token not in self._added:
                return False
            is_written = count(token) > sum(text.count(token) for text in _texts(content))
            return not is_written and (is_answer or token not in template)

        answers = self.spelled_in([message for message in chat.messages if message["role"] == "assistant"])
        others = self.spelled_in(
            [[message for message in chat.messages if message["role"] != "assistant"], chat.tools]
        )
        return InChat(
            answers=tuple(token for token in answers if not is_kept(token, is_answer=True)),
            others=tuple(token for token in others if not is_kept(token, is_answer=False)),
            kept=tuple(
                dict.fromkeys(
                    [
                        *(token for token in answers if is_kept(token, is_answer=True)),
                        *(token for token in others if is_kept(token, is_answer=False)),
                    ]
                )
            ),
        )

    def with_placeholders(self, chat: Chat, inside: InChat, rendered: str) -> tuple[Chat, Placeholders]:
        """Return the chat with a placeholder for each special token that is text; `rendered` is its text
        without placeholders."""
        placeholders = _placeholders([chat.messages, chat.tools], inside.as_text, rendered)
        of_answers, of_others = (
            replace(placeholders, replaced=inside.answers),
            replace(placeholders, replaced=inside.others),
        )
        messages = [
            (of_answers if message["role"] == "assistant" else of_others).insert(self._spelled, message)
            for message in chat.messages
        ]
        return replace(
            chat, messages=messages, tools=of_others.insert(self._spelled, chat.tools)
        ), placeholders

    def with_placeholders_in_text(self, text: Text, spelled: tuple[str, ...]) -> tuple[Text, Placeholders]:
        placeholders = _placeholders([text.prompt, text.completion], spelled, "")
        prompt, completion = (
            placeholders.insert(self._spelled, part) for part in (text.prompt, text.completion)
        )
        return replace(text, prompt=prompt, completion=completion), placeholders

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Return ids without control tokens. Raises: InseparableError if the tokenizer cannot encode a text
        otherwise."""
        encoded = self._encoder.encode_as_text(texts)
        if not all(self._control_ids.isdisjoint(ids) for ids in encoded):
            raise InseparableError
        return encoded

    def encode_restored(self, text: str, placeholders: Placeholders) -> list[int]:
        """Return the ids of a rendered text whose placeholders represent text that must not become a control
        token."""
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
        """Yield text between special tokens, and special tokens with the white space that they include; the
        flag is True for the latter."""
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

    def decode(self, ids: Sequence[int]) -> str:
        return self.encoder.decode(ids)


def encode_after(guard: str, text: str, encode: Callable[[list[str]], list[list[int]]]) -> list[int] | None:
    """Return the ids of `text` after `guard`; None if a token spans both."""
    if not guard:
        return encode([text])[0]
    before, both = encode([guard, guard + text])
    return both[len(before) :] if both[: len(before)] == before else None


def _any_of(texts: list[str]) -> str:
    """Return a pattern for any of the texts. Texts with equal beginnings share a branch, since a tokenizer
    may have a thousand of them."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:BRANCH_LENGTH], []).append(re.escape(text[BRANCH_LENGTH:]))
    # a short text may begin a longer one
    ordered = sorted(branches.items(), key=lambda branch: -len(branch[0]))
    return "|".join(f"{re.escape(begin)}(?:{'|'.join(ends)})" for begin, ends in ordered) or NOTHING


def _placeholders(values: list[object], spelled: tuple[str, ...], rendered: str) -> Placeholders:
    present = set(rendered).union(*_texts(values))
    return Placeholders(
        next(chr(code) for code in range(FIRST_MARK, LAST_MARK) if chr(code) not in present), spelled, spelled
    )


def notes_of(kind: str, spelled: tuple[str, ...]) -> tuple[Note, ...]:
    return tuple(Note(kind, f"`{token}`") for token in spelled)


def _texts(value: object) -> Iterator[str]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, str))


def _with_changed_texts(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key): _with_changed_texts(part, change)
            for key, part in cast(Mapping[str, object], value).items()
        }
    if isinstance(value, list):
        return [_with_changed_texts(part, change) for part in cast(list[object], value)]
    return value
