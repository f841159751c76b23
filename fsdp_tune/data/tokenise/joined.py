"""Encode texts, and prompts with their completions, as token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_tune.data.format.formats import FormatSettings, Text
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import RowError
from fsdp_tune.data.tokenise.borders import TEXT_CHANGED, TOKENISED_APART, Encode, continuation
from fsdp_tune.data.tokenise.encoder import Encoder
from fsdp_tune.data.tokenise.special_tokens import AS_CONTROL, AS_TEXT, INSEPARABLE, SpecialTokens, notes_of


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
    spelled = [special.spelled_in([text.prompt, text.completion]) for text, _ in texts]
    as_text = [
        bool(found) and settings.encodes_special_tokens_as_text(text) for found, (text, settings) in zip(spelled, texts, strict=True)
    ]
    ordinary = _encoded([text for (text, _), other in zip(texts, as_text, strict=True) if not other], encoder.encode, encoder, counts)
    for (text, _), found, other in zip(texts, spelled, as_text, strict=True):
        if not other:
            encoded, kind = next(ordinary), AS_CONTROL
        else:
            try:
                encoded, kind = next(_encoded([text], special.encode_as_text, encoder, counts)), AS_TEXT
            except RowError:
                encoded, kind = next(_encoded([text], encoder.encode, encoder, counts)), INSEPARABLE
        yield EncodedText(encoded.ids, encoded.trained, (*encoded.notes, *notes_of(kind, found)))


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
