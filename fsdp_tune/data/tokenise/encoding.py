"""Encode rendered chats, texts, and prompts with their completions as token ids, with a flag for each trained
token.

The border between the text that a model receives and the text that it must generate has one rule, for prompts
with completions and for the answers of chats: the tokens before the border are those of the received text
alone, because the model receives these at inference. If the tokenizer would join characters of both into one
token, the text after the border is encoded separately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_tune.data.format.formats import FormatSettings, LabelledText, Text
from fsdp_tune.data.format.row_notes import Note
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.data.tokenise.special_tokens import (
    AS_CONTROL,
    AS_TEXT,
    GUARDS,
    INSEPARABLE,
    RestoringEncoder,
    SpecialTokens,
    encode_after,
    notes_of,
)

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


def continuation(
    received: list[int], joined: list[int], generated: str, encode: Encode, decode: Decode
) -> Continuation:
    """Return the ids of a received text, followed by those of `generated`. `joined` are the ids of both as
    one text.

    Some tokenizers add a space before every text. The generated text is then encoded after another text (a
    guard), so that the ids decode to the text of the row.
    """
    if joined[: len(received)] == received:
        return Continuation(joined, is_apart=False)
    wanted = decode(joined)
    for guard in GUARDS:
        ids = encode_after(guard, generated, encode)
        if ids is not None and decode([*received, *ids]) == wanted:
            return Continuation([*received, *ids], is_apart=True)
    return Continuation([*received, *encode([generated])[0]], is_apart=True, is_exact=False)


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
        [text for (text, _), (_, as_text) in zip(texts, spelled, strict=True) if not as_text],
        encoder.encode,
        encoder,
        counts,
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
        yield EncodedText(
            encoded.ids,
            encoded.trained,
            (*encoded.notes, *notes_of(AS_CONTROL, meant), *notes_of(kind, as_text)),
        )


def encode_segments(
    example: LabelledText, settings: FormatSettings, encoder: Encoder, special: SpecialTokens
) -> EncodedText:
    """Return ids and trained flags of segments, without a prefix. Each has the ids that follow those of the
    text before it."""
    spelled = special.spelled_in([text for text, _ in example.texts])
    if not settings.encodes_special_tokens_as_text(example):
        return _encoded_segments(example, encoder.encode, encoder, notes_of(AS_CONTROL, spelled))
    try:
        return _encoded_segments(example, special.encode_as_text, encoder, notes_of(AS_TEXT, spelled))
    except RowError:
        return _encoded_segments(example, encoder.encode, encoder, notes_of(INSEPARABLE, spelled))


def _encoded_segments(
    example: LabelledText, encode: Encode, encoder: Encoder, notes: tuple[Note, ...]
) -> EncodedText:
    text, ids, trained, found_notes = "", list[int](), list[bool](), list[Note]()
    for segment, is_trained in example.texts:
        text += segment
        found = continuation(ids, encode([text])[0], segment, encode, encoder.decode)
        trained += [is_trained] * (len(found.ids) - len(ids))
        ids = found.ids
        found_notes += [Note(TOKENISED_APART, "segments")] * found.is_apart + [
            Note(TEXT_CHANGED, "between segments")
        ] * (not found.is_exact)
    return EncodedText(ids, trained, (*dict.fromkeys(found_notes), *notes))


def _special_tokens_of(
    text: Text, settings: FormatSettings, special: SpecialTokens
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the special tokens in a row that are encoded as such, and those that are encoded as ordinary
    text."""
    content = [text.prompt, text.completion]
    spelled = special.spelled_in(content)
    if not settings.encodes_special_tokens_as_text(text):
        return spelled, ()
    meant = (
        tuple(token for token in spelled if special.is_for_rows(token))
        if settings.special_tokens == "auto"
        else ()
    )
    return meant, tuple(token for token in spelled if token not in meant)


def _with_text(
    text: Text,
    as_text: tuple[str, ...],
    encoder: Encoder,
    special: SpecialTokens,
    counts: Counter[str],
    *,
    keeps_others: bool,
) -> EncodedText:
    """Encode the special tokens `as_text` as ordinary text. Raises: RowError if the tokenizer cannot."""
    if not keeps_others:
        return next(_encoded([text], special.encode_as_text, encoder, counts))
    marked, placeholders = special.with_placeholders_in_text(text, as_text)
    return next(_encoded([marked], RestoringEncoder(encoder, special, placeholders).encode, encoder, counts))


def _encoded(
    texts: list[Text], encode: Encode, encoder: Encoder, counts: Counter[str]
) -> Iterator[EncodedText]:
    alone = iter(encode([text.prompt for text in texts if text.prompt]))
    joined = encode([text.prompt + text.completion for text in texts])
    for text, ids in zip(texts, joined, strict=True):
        prompt_ids = next(alone) if text.prompt else []
        found = continuation(prompt_ids, ids, text.completion, encode, encoder.decode)
        notes = [Note(TOKENISED_APART, "prompts and completions")] * found.is_apart
        notes += [Note(TEXT_CHANGED, "between prompt and completion")] * (not found.is_exact)
        if text.prompt:
            counts["no_space"] += not (
                text.fixed_prompt or text.prompt[-1:].isspace() or text.completion[:1].isspace()
            )
        trained = [text.train_prompt] * len(prompt_ids) + [True] * (len(found.ids) - len(prompt_ids))
        yield EncodedText(*_with_prefix(found.ids, trained, encoder.prefix_ids), tuple(notes))


def _with_prefix(
    ids: list[int], trained: list[bool], prefix: tuple[int, ...]
) -> tuple[list[int], list[bool]]:
    if not prefix or tuple(ids[: len(prefix)]) == prefix or not ids:
        return ids, trained
    return [*prefix, *ids], [False] * len(prefix) + trained
