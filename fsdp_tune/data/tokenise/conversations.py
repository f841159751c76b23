"""Encode the examples of a conversation, with a mask of the assistant's answers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from fsdp_tune.data.format.row_notes import Note
from fsdp_tune.data.tokenise.chat import RenderedText, limit_characters
from fsdp_tune.data.tokenise.encoder_protocol import TextEncoder
from fsdp_tune.data.tokenise.encoding import TEXT_CHANGED, TOKENISED_APART, Continuation, continuation


@dataclass(frozen=True, slots=True)
class ChatTokens:
    ids: list[int]
    trained: list[bool]
    eos_appended: bool
    """Whether the end-of-sequence token was appended because the template does not write it after the last
    answer."""
    notes: tuple[Note, ...] = ()


def chat_tokens(
    text: RenderedText, encoded: list[list[int]], encoder: TextEncoder, *, append_eos: bool
) -> list[ChatTokens]:
    """Return ids and trained flags of a rendered text; `encoded` are the ids of its `pieces`.

    Several, if a token spans the border of an answer: the ids of that answer's context then differ from those
    that the model receives before a later answer.
    """
    ids, *parts = encoded
    if text.answers is None:
        flagged = [
            _Flagged(text.whole, len(text.whole), ids, [True] * len(ids), text.ends_trained, text.is_complete)
        ]
    elif list(chain.from_iterable(parts)) == ids:
        trained = [bool(number % 2) for number, part in enumerate(parts) for _ in part]
        flagged = [_Flagged(text.whole, text.end, ids, trained, text.ends_trained, text.is_complete)]
    else:
        flagged = _as_received(text, ids, text.answers, encoder)
    return [sequence.ended(encoder, append_eos=append_eos and sequence.is_complete) for sequence in flagged]


def _as_received(
    text: RenderedText, ids: list[int], answers: tuple[tuple[int, int], ...], encoder: TextEncoder
) -> list[_Flagged]:
    """Encode each answer after the ids of its context alone; answers whose context begins another's share a
    sequence.

    Some tokenizers encode the beginning of a text differently (an added space), so contexts are encoded from
    the first character.
    """
    contexts = encoder.encode([text.whole[:begin] for begin, _ in answers])
    joined = encoder.encode([text.whole[:end] for _, end in answers])
    found: list[_Flagged] = []
    for (begin, end), context, both in reversed(list(zip(answers, contexts, joined, strict=True))):
        answer = continuation(context, both, text.whole[begin:end], encoder.encode, encoder.decode)
        sequence = next(
            (sequence for sequence in found if sequence.ids[: len(answer.ids)] == answer.ids), None
        )
        if sequence is None:
            sequence = _sequence(text, end, ids, answer, encoder, is_last=not found)
            found.append(sequence)
        sequence.trained[len(context) : len(answer.ids)] = [True] * (len(answer.ids) - len(context))
        sequence.is_apart |= answer.is_apart
        sequence.is_exact &= answer.is_exact
    if len(found) > 1:
        limit_characters(len(found), sum(len(sequence.text) for sequence in found))
    return found[::-1]


def _sequence(
    text: RenderedText, end: int, ids: list[int], answer: Continuation, encoder: TextEncoder, *, is_last: bool
) -> _Flagged:
    """Return the sequence of an answer that ends at `end`: the complete text after it, or white space
    alone."""
    if is_last and ids[: len(answer.ids)] == answer.ids:
        return _Flagged(text.whole, text.end, ids, [False] * len(ids), text.ends_trained, text.is_complete)
    whole = text.whole[: len(text.whole) - len(text.whole[end:].lstrip())]
    after = continuation(answer.ids, encoder.encode([whole])[0], whole[end:], encoder.encode, encoder.decode)
    is_complete = is_last and text.ends_trained and text.is_complete
    return _Flagged(
        whole, end, after.ids, [False] * len(after.ids), ends_trained=True, is_complete=is_complete
    )


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
        notes = [Note(TOKENISED_APART, "answers of chats")] * self.is_apart + [
            Note(TEXT_CHANGED, "between context and answer")
        ] * (not self.is_exact)
        ids, trained = self.ids, self.trained
        if (
            not append_eos
            or encoder.eos_id in ids[-1:]
            or self.text[: self.end].rstrip().endswith(encoder.eos_token)
        ):
            return ChatTokens(ids, trained, eos_appended=False, notes=tuple(notes))
        # with white space that the template writes after the end of the turn
        if self.ends_trained and any(trained):
            after = len(trained) - trained[::-1].index(True)
            trained[after:] = [True] * (len(trained) - after)
        return ChatTokens(
            [*ids, encoder.eos_id], [*trained, self.ends_trained], eos_appended=True, notes=tuple(notes)
        )
