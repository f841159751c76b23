"""Encode rendered chats, texts, and prompts with their completions as token ids, with a flag for each trained token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, cast

from fsdp_tune.data.format.formats import Chat, FormatSettings, LabelledText, Text
from fsdp_tune.data.format.row_account import Note
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise.answers import FIRST_MARK, FIRST_NUMBER, LAST_MARK
from fsdp_tune.data.tokenise.chat import RenderedText, leaves, limit_characters
from fsdp_tune.data.tokenise.encoder import Encoder, TextEncoder

# ---- Encode special tokens in the content of a row, such as `<|im_end|>` inside a message, as ordinary text.
#
# In a chat the template writes special tokens too, and the tokenizer cannot distinguish them from those in the content.
# So each one in the content is replaced by a placeholder before the chat is rendered. The rendered text is then divided at
# the special tokens that remain, and the segments between them are encoded with their placeholders replaced by the
# original text. Each segment is first encoded with its placeholders: this must give the ids that it has inside the
# conversation, which proves that encoding it separately changes nothing.

AS_TEXT, AS_CONTROL, INSEPARABLE = "special-tokens-as-text", "special-tokens-as-control", "special-tokens-inseparable"
"""How special tokens in the content were encoded; codes of notices."""
GUARDS = ("", "\n", ":", "a")
"""Texts to encode before a segment. Some tokenizers add a space before every text, but not after other text."""
BRANCH_LENGTH = 4
"""Number of leading characters by which special tokens share a branch of a pattern."""
NOTHING = r"(?!)"
"""A pattern that matches nowhere."""


class InseparableError(RowError):
    """Special tokens in the content of a row cannot be encoded as text."""

    def __init__(self) -> None:
        super().__init__("special tokens in its content cannot be encoded as text (`data.special_tokens_in_content: control` keeps them)")


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Placeholders for special tokens in the content of one chat."""

    mark: str
    """A character that the chat does not contain."""
    tokens: tuple[str, ...]
    replaced: tuple[str, ...]
    """Those of `tokens` that `insert` replaces."""

    def insert(self, pattern: re.Pattern[str], value: Any) -> Any:
        """Return `value` with placeholders in all of its texts; `pattern` finds special tokens, those without a placeholder stay."""

        def placeholder(match: re.Match[str]) -> str:
            return self.mark + chr(FIRST_NUMBER + self.tokens.index(match[0])) if match[0] in self.replaced else match[0]

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

    def spelled_in(self, value: Any) -> tuple[str, ...]:
        """Return the special tokens that occur in the texts of `value`, each once."""
        return tuple(dict.fromkeys(token for text in _texts(value) if self._spelled.search(text) for token in self._spelled.findall(text)))

    def is_for_rows(self, token: str) -> bool:
        """Return whether the recipe added a token (`model.tokens.add`)."""
        return token in self._added

    def in_chat(self, chat: Chat, template: str, rendered: list[str], *, keeps_added: bool) -> InChat:
        """Decide about the special tokens in a chat; `rendered` are the texts of its examples.

        With `keeps_added`, tokens that the recipe added for the rows stay tokens, but not those of the template, so that no content forges
        a turn. In answers, which are what the model learns to write, these are the tokens that the template writes there itself
        (the end of a turn); elsewhere also those that its text contains (`<tool_response>`).
        """
        count = max(rendered, key=len).count  # the examples repeat their context, so that all together would count it twice
        content = [chat.messages, chat.tools]

        def is_kept(token: str, *, is_answer: bool) -> bool:
            if not keeps_added or token not in self._added:
                return False
            is_written = count(token) > sum(text.count(token) for text in _texts(content))
            return not is_written and (is_answer or token not in template)

        answers = self.spelled_in([message for message in chat.messages if message["role"] == "assistant"])
        others = self.spelled_in([[message for message in chat.messages if message["role"] != "assistant"], chat.tools])
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
        """Return the chat with a placeholder for each special token that is text; `rendered` is its text without placeholders."""
        placeholders = _placeholders([chat.messages, chat.tools], inside.as_text, rendered)
        of_answers, of_others = replace(placeholders, replaced=inside.answers), replace(placeholders, replaced=inside.others)
        messages = [
            (of_answers if message["role"] == "assistant" else of_others).insert(self._spelled, message) for message in chat.messages
        ]
        return replace(chat, messages=messages, tools=of_others.insert(self._spelled, chat.tools)), placeholders

    def with_placeholders_in_text(self, text: Text, spelled: tuple[str, ...]) -> tuple[Text, Placeholders]:
        placeholders = _placeholders([text.prompt, text.completion], spelled, "")
        prompt, completion = (placeholders.insert(self._spelled, part) for part in (text.prompt, text.completion))
        return replace(text, prompt=prompt, completion=completion), placeholders

    def encode_as_text(self, texts: list[str]) -> list[list[int]]:
        """Return ids without control tokens. Raises: InseparableError if the tokenizer cannot encode a text otherwise."""
        encoded = self._encoder.encode_as_text(texts)
        if not all(self._control_ids.isdisjoint(ids) for ids in encoded):
            raise InseparableError
        return encoded

    def encode_restored(self, text: str, placeholders: Placeholders) -> list[int]:
        """Return the ids of a rendered text whose placeholders represent text that must not become a control token."""
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
        """Yield text between special tokens, and special tokens with the white space that they include; the flag is True for the latter."""
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
    """Return a pattern for any of the texts. Texts with equal beginnings share a branch, since a tokenizer may have a thousand of them."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:BRANCH_LENGTH], []).append(re.escape(text[BRANCH_LENGTH:]))
    ordered = sorted(branches.items(), key=lambda branch: -len(branch[0]))  # a short text may begin a longer one
    return "|".join(f"{re.escape(begin)}(?:{'|'.join(ends)})" for begin, ends in ordered) or NOTHING


def _placeholders(values: list[Any], spelled: tuple[str, ...], rendered: str) -> Placeholders:
    present = set(rendered).union(*_texts(values))
    return Placeholders(next(chr(code) for code in range(FIRST_MARK, LAST_MARK) if chr(code) not in present), spelled, spelled)


def notes_of(kind: str, spelled: tuple[str, ...]) -> tuple[Note, ...]:
    return tuple(Note(kind, f"`{token}`") for token in spelled)


def _texts(value: Any) -> Iterator[str]:
    return (leaf for leaf in leaves(value) if isinstance(leaf, str))


def _with_changed_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _with_changed_texts(part, change) for key, part in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list):
        return [_with_changed_texts(part, change) for part in cast(list[Any], value)]
    return value


# ---- The border between the text that a model receives and the text that it must generate.
#
# One rule for prompts with completions and for the answers of chats: the tokens before the border are those of the received text
# alone, because the model receives these at inference. If the tokenizer would join characters of both into one token, the text after
# the border is encoded separately.

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


# ---- Encode texts, and prompts with their completions, as token ids.


@dataclass(frozen=True, slots=True)
class EncodedText:
    ids: list[int]
    trained: list[bool]
    notes: tuple[Note, ...]


def encode_texts(
    texts: list[tuple[Text, FormatSettings]], encoder: Encoder, special: SpecialTokens, counts: Counter[str]
) -> Iterator[EncodedText]:
    """Yield ids and trained flags of each text, with the tokenizer's own prefix (BOS) once at its beginning.

    A prompt always has the ids that it has alone, because the model receives these at inference.
    """
    spelled = [_special_tokens_of(text, settings, special) for text, settings in texts]
    ordinary = _encoded(
        [text for (text, _), (_, as_text) in zip(texts, spelled, strict=True) if not as_text], encoder.encode, encoder, counts
    )
    for (text, _), (meant, as_text) in zip(texts, spelled, strict=True):
        kind = AS_TEXT
        if not as_text:
            encoded = next(ordinary)
        else:
            try:
                encoded = _with_text(text, as_text, encoder, special, counts, keeps_others=bool(meant))
            except RowError:
                encoded, kind = next(_encoded([text], encoder.encode, encoder, counts)), INSEPARABLE
        yield EncodedText(encoded.ids, encoded.trained, (*encoded.notes, *notes_of(AS_CONTROL, meant), *notes_of(kind, as_text)))


def encode_segments(example: LabelledText, settings: FormatSettings, encoder: Encoder, special: SpecialTokens) -> EncodedText:
    """Return ids and trained flags of segments, without a prefix. Each has the ids that follow those of the text before it."""
    spelled = special.spelled_in([text for text, _ in example.texts])
    if not settings.encodes_special_tokens_as_text(example):
        return _encoded_segments(example, encoder.encode, encoder, notes_of(AS_CONTROL, spelled))
    try:
        return _encoded_segments(example, special.encode_as_text, encoder, notes_of(AS_TEXT, spelled))
    except RowError:
        return _encoded_segments(example, encoder.encode, encoder, notes_of(INSEPARABLE, spelled))


def _encoded_segments(example: LabelledText, encode: Encode, encoder: Encoder, notes: tuple[Note, ...]) -> EncodedText:
    text, ids, trained, found_notes = "", list[int](), list[bool](), list[Note]()
    for segment, is_trained in example.texts:
        text += segment
        found = continuation(ids, encode([text])[0], segment, encode, encoder.decode)
        trained += [is_trained] * (len(found.ids) - len(ids))
        ids = found.ids
        found_notes += [Note(TOKENISED_APART, "segments")] * found.is_apart + [Note(TEXT_CHANGED, "between segments")] * (
            not found.is_exact
        )
    return EncodedText(ids, trained, (*dict.fromkeys(found_notes), *notes))


def _special_tokens_of(text: Text, settings: FormatSettings, special: SpecialTokens) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the special tokens in a row that are encoded as such, and those that are encoded as ordinary text."""
    content = [text.prompt, text.completion]
    spelled = special.spelled_in(content)
    if not settings.encodes_special_tokens_as_text(text):
        return spelled, ()
    meant = tuple(token for token in spelled if special.is_for_rows(token)) if settings.special_tokens == "auto" else ()
    return meant, tuple(token for token in spelled if token not in meant)


def _with_text(
    text: Text, as_text: tuple[str, ...], encoder: Encoder, special: SpecialTokens, counts: Counter[str], *, keeps_others: bool
) -> EncodedText:
    """Encode the special tokens `as_text` as ordinary text. Raises: RowError if the tokenizer cannot."""
    if not keeps_others:
        return next(_encoded([text], special.encode_as_text, encoder, counts))
    marked, placeholders = special.with_placeholders_in_text(text, as_text)
    return next(_encoded([marked], RestoringEncoder(encoder, special, placeholders).encode, encoder, counts))


def _encoded(texts: list[Text], encode: Encode, encoder: Encoder, counts: Counter[str]) -> Iterator[EncodedText]:
    alone = iter(encode([text.prompt for text in texts if text.prompt]))
    joined = encode([text.prompt + text.completion for text in texts])
    for text, ids in zip(texts, joined, strict=True):
        prompt_ids = next(alone) if text.prompt else []
        found = continuation(prompt_ids, ids, text.completion, encode, encoder.decode)
        notes = [Note(TOKENISED_APART, "prompts and completions")] * found.is_apart
        notes += [Note(TEXT_CHANGED, "between prompt and completion")] * (not found.is_exact)
        if text.prompt:
            counts["no_space"] += not (text.fixed_prompt or text.prompt[-1:].isspace() or text.completion[:1].isspace())
        trained = [text.train_prompt] * len(prompt_ids) + [True] * (len(found.ids) - len(prompt_ids))
        yield EncodedText(*_with_prefix(found.ids, trained, encoder.prefix_ids), tuple(notes))


def _with_prefix(ids: list[int], trained: list[bool], prefix: tuple[int, ...]) -> tuple[list[int], list[bool]]:
    if not prefix or tuple(ids[: len(prefix)]) == prefix or not ids:
        return ids, trained
    return [*prefix, *ids], [False] * len(prefix) + trained


# ---- Encode the examples of a conversation, with a mask of the assistant's answers.


@dataclass(frozen=True, slots=True)
class ChatTokens:
    ids: list[int]
    trained: list[bool]
    eos_appended: bool
    """Whether the end-of-sequence token was appended because the template does not write it after the last answer."""
    notes: tuple[Note, ...] = ()


def chat_tokens(text: RenderedText, encoded: list[list[int]], encoder: TextEncoder, *, append_eos: bool) -> list[ChatTokens]:
    """Return ids and trained flags of a rendered text; `encoded` are the ids of its `pieces`.

    Several, if a token spans the border of an answer: the ids of that answer's context then differ from those that the model
    receives before a later answer.
    """
    ids, *parts = encoded
    if text.answers is None:
        flagged = [_Flagged(text.whole, len(text.whole), ids, [True] * len(ids), text.ends_trained, text.is_complete)]
    elif list(chain.from_iterable(parts)) == ids:
        trained = [bool(number % 2) for number, part in enumerate(parts) for _ in part]
        flagged = [_Flagged(text.whole, text.end, ids, trained, text.ends_trained, text.is_complete)]
    else:
        flagged = _as_received(text, ids, text.answers, encoder)
    return [sequence.ended(encoder, append_eos=append_eos and sequence.is_complete) for sequence in flagged]


def _as_received(text: RenderedText, ids: list[int], answers: tuple[tuple[int, int], ...], encoder: TextEncoder) -> list[_Flagged]:
    """Encode each answer after the ids of its context alone; answers whose context begins another's share a sequence.

    Some tokenizers encode the beginning of a text differently (an added space), so contexts are encoded from the first character.
    """
    contexts = encoder.encode([text.whole[:begin] for begin, _ in answers])
    joined = encoder.encode([text.whole[:end] for _, end in answers])
    found: list[_Flagged] = []
    for (begin, end), context, both in reversed(list(zip(answers, contexts, joined, strict=True))):
        answer = continuation(context, both, text.whole[begin:end], encoder.encode, encoder.decode)
        sequence = next((sequence for sequence in found if sequence.ids[: len(answer.ids)] == answer.ids), None)
        if sequence is None:
            sequence = _sequence(text, end, ids, answer, encoder, is_last=not found)
            found.append(sequence)
        sequence.trained[len(context) : len(answer.ids)] = [True] * (len(answer.ids) - len(context))
        sequence.is_apart |= answer.is_apart
        sequence.is_exact &= answer.is_exact
    if len(found) > 1:
        limit_characters(len(found), sum(len(sequence.text) for sequence in found))
    return found[::-1]


def _sequence(text: RenderedText, end: int, ids: list[int], answer: Continuation, encoder: TextEncoder, *, is_last: bool) -> _Flagged:
    """Return the sequence of an answer that ends at `end`: the complete text after it, or white space alone."""
    if is_last and ids[: len(answer.ids)] == answer.ids:
        return _Flagged(text.whole, text.end, ids, [False] * len(ids), text.ends_trained, text.is_complete)
    whole = text.whole[: len(text.whole) - len(text.whole[end:].lstrip())]
    after = continuation(answer.ids, encoder.encode([whole])[0], whole[end:], encoder.encode, encoder.decode)
    is_complete = is_last and text.ends_trained and text.is_complete
    return _Flagged(whole, end, after.ids, [False] * len(after.ids), ends_trained=True, is_complete=is_complete)


@dataclass(slots=True)
class _Flagged:
    """The ids of a text, before the end of sequence is added."""

    text: str
    end: int
    """Where the last answer ends, in characters."""
    ids: list[int]
    trained: list[bool]
    ends_trained: bool
    is_complete: bool
    is_apart: bool = False
    is_exact: bool = True

    def ended(self, encoder: TextEncoder, *, append_eos: bool) -> ChatTokens:
        notes = [Note(TOKENISED_APART, "answers of chats")] * self.is_apart + [Note(TEXT_CHANGED, "between context and answer")] * (
            not self.is_exact
        )
        ids, trained = self.ids, self.trained
        if not append_eos or encoder.eos_id in ids[-1:] or self.text[: self.end].rstrip().endswith(encoder.eos_token):
            return ChatTokens(ids, trained, eos_appended=False, notes=tuple(notes))
        if self.ends_trained and any(trained):  # with white space that the template writes after the end of the turn
            after = len(trained) - trained[::-1].index(True)
            trained[after:] = [True] * (len(trained) - after)
        return ChatTokens([*ids, encoder.eos_id], [*trained, self.ends_trained], eos_appended=True, notes=tuple(notes))
