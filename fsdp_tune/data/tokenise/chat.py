"""Encode conversations as token ids, with a mask of the assistant's answers.

A template may render earlier messages differently once more messages follow, for example without their reasoning. Each
answer whose context would differ from that at inference becomes an example of its own: the conversation up to it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import FrameType

from fsdp_tune.core.errors import usage_error
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.format.templates import bundled_text, fitting_templates
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import RowError
from fsdp_tune.data.tokenise.answers import Answer, Rendering
from fsdp_tune.data.tokenise.borders import TEXT_CHANGED, TOKENISED_APART, Continuation, continuation
from fsdp_tune.data.tokenise.encoder import Encoder, TextEncoder
from fsdp_tune.data.tokenise.unrendered import find_unrendered, is_field

TEMPLATE_SECONDS = 5.0
"""Limit of CPU time for all renderings of one row; a real conversation takes milliseconds."""

MOST_CHARACTERS = 1 << 25
"""Limit for all examples of one conversation, which repeat their context; bounds memory."""


class _TemplateTimeoutError(BaseException):
    """Not an Exception, so that no `except Exception` inside a template's code swallows it."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    ids: list[int]
    trained: list[bool]
    eos_appended: bool
    """Whether the end-of-sequence token was appended because the template does not write it after the last answer."""
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A training example of a conversation as text, with the positions of its answers."""

    whole: str
    answers: tuple[tuple[int, int], ...] | None
    """Begin and end of the trained answers, in characters; None = everything is trained."""
    ends_trained: bool
    """Whether an end-of-sequence token after the last message is trained."""
    is_complete: bool = True
    """Whether the end of sequence may follow. False where the template has ended a turn inside the conversation, for example a call."""

    @property
    def pieces(self) -> list[str]:
        """The complete text, and its parts between the borders of answers: the texts that `tokens` needs encoded."""
        ends = [border for answer in self.answers or () for border in answer]
        return [self.whole, *(self.whole[begin:end] for begin, end in zip([0, *ends], [*ends, len(self.whole)], strict=True))]

    def tokens(self, encoded: list[list[int]], encoder: TextEncoder, *, append_eos: bool) -> list[ChatTokens]:
        """Return ids and trained flags; `encoded` are the ids of `pieces`.

        Several, if a token spans the border of an answer: the ids of that answer's context then differ from those that the model
        receives before a later answer.
        """
        ids, *parts = encoded
        if self.answers is None:
            flagged = [_Flagged(self.whole, len(self.whole), ids, [True] * len(ids), self.ends_trained, self.is_complete)]
        elif list(chain.from_iterable(parts)) == ids:
            trained = [bool(number % 2) for number, part in enumerate(parts) for _ in part]
            flagged = [_Flagged(self.whole, self._end, ids, trained, self.ends_trained, self.is_complete)]
        else:
            flagged = self._as_received(ids, self.answers, encoder)
        return [sequence.ended(encoder, append_eos=append_eos and sequence.is_complete) for sequence in flagged]

    @property
    def _end(self) -> int:
        return self.answers[-1][1] if self.answers and self.ends_trained else len(self.whole)

    def _as_received(self, ids: list[int], answers: tuple[tuple[int, int], ...], encoder: TextEncoder) -> list[_Flagged]:
        """Encode each answer after the ids of its context alone; answers whose context begins another's share a sequence.

        Some tokenizers encode the beginning of a text differently (an added space), so contexts are encoded from the first character.
        """
        contexts = encoder.encode([self.whole[:begin] for begin, _ in answers])
        joined = encoder.encode([self.whole[:end] for _, end in answers])
        found: list[_Flagged] = []
        for (begin, end), context, both in reversed(list(zip(answers, contexts, joined, strict=True))):
            answer = continuation(context, both, self.whole[begin:end], encoder.encode, encoder.decode)
            sequence = next((sequence for sequence in found if sequence.ids[: len(answer.ids)] == answer.ids), None)
            if sequence is None:
                sequence = self._from(end, ids, answer, encoder, is_last=not found)
                found.append(sequence)
            sequence.trained[len(context) : len(answer.ids)] = [True] * (len(answer.ids) - len(context))
            sequence.is_apart |= answer.is_apart
            sequence.is_exact &= answer.is_exact
        if len(found) > 1:
            _limit_characters(len(found), sum(len(sequence.text) for sequence in found))
        return found[::-1]

    def _from(self, end: int, ids: list[int], answer: Continuation, encoder: TextEncoder, *, is_last: bool) -> _Flagged:
        """Return the sequence of an answer that ends at `end`: the complete text after it, or white space alone."""
        if is_last and ids[: len(answer.ids)] == answer.ids:
            return _Flagged(self.whole, self._end, ids, [False] * len(ids), self.ends_trained, self.is_complete)
        text = self.whole[: len(self.whole) - len(self.whole[end:].lstrip())]
        after = continuation(answer.ids, encoder.encode([text])[0], text[end:], encoder.encode, encoder.decode)
        is_complete = is_last and self.ends_trained and self.is_complete
        return _Flagged(text, end, after.ids, [False] * len(after.ids), ends_trained=True, is_complete=is_complete)


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


def _limit_characters(count: int, characters: int) -> None:
    """Raises: RowError if the examples of one conversation are too long together."""
    if characters > MOST_CHARACTERS:
        raise RowError(
            f"the conversation needs {count} examples, each with the context of its answer at inference, with {characters:,} characters "
            "(`loss_on: last_assistant` trains the last answer only)"
        )


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The examples of one conversation; several if the template changes earlier messages."""

    examples: tuple[RenderedText, ...]
    notes: tuple[Note, ...] = ()
    """Context that the template leaves out."""


def render_chat(chat: Chat, template: str, encoder: Encoder, *, check_repeat: bool) -> RenderedChat:
    """Render a conversation as text, with the borders of its trained answers.

    Raises: RowError if the template raises, runs too long, differs from call to call (`check_repeat`), is not
    prefix-stable at a trained answer, or leaves out a part of one.
    """
    with template_time_limit():
        rendering = Rendering(chat, template, encoder)
        if check_repeat and rendering.whole != rendering.render(len(chat.messages)):
            raise RowError("the chat template renders the same conversation differently each time")
        answers = {index: rendering.answer(index) for index, trained in enumerate(chat.trained or ()) if trained}
        notes = find_unrendered(chat, template, rendering, answers)
        if chat.trained is None:
            return RenderedChat((RenderedText(rendering.whole, None, ends_trained=True),), notes)
        return RenderedChat(_examples(rendering, list(answers.values()), ends_trained=chat.trained[-1]), notes)


def template_for(chat: Chat, encoder: Encoder, rejected: str) -> str | None:
    """Return the name of a bundled template that renders a chat, with tokens that the vocabulary has; None if there is none.

    It renders every content, function and call; fields such as the id of a call may be left out.
    """
    for name in fitting_templates(encoder.encode):
        template = bundled_text(name)
        if template == rejected:
            continue
        try:
            rendered = render_chat(chat, template, encoder, check_repeat=False)
        except RowError:
            continue
        if all(is_field(note) for note in rendered.notes):
            return name
    return None


def _examples(rendering: Rendering, answers: list[Answer], *, ends_trained: bool) -> tuple[RenderedText, ...]:
    """Distribute the answers over as few texts as have the context that each answer has at inference."""
    found: dict[str, list[Answer]] = {rendering.whole: []}
    for answer in reversed(answers):
        inside = next((inside for text in found if (inside := rendering.within(answer, text)) is not None), answer)
        found.setdefault(inside.text, []).insert(0, inside)
    if len(found) > 1:
        _limit_characters(len(found), sum(map(len, found)))
    return tuple(
        RenderedText(
            text,
            tuple((answer.begin, answer.end) for answer in inside),
            ends_trained or text != rendering.whole,
            is_complete=text == rendering.whole or not rendering.is_ended(inside[-1]),
        )
        for text, inside in reversed(found.items())
        if inside or len(found) == 1
    )


@contextmanager
def template_time_limit() -> Iterator[None]:
    """Interrupt Python code (which a template becomes) after TEMPLATE_SECONDS of CPU time.

    CPU time is measured, so that the load of the machine does not change which rows are bad. Raises: RowError at the limit; usage error
    outside the main thread, which alone receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        message = "chat templates are rendered under a time limit, which needs the main thread of a process"
        raise usage_error("not-main-thread", message, hint="call it from there")

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TemplateTimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, TEMPLATE_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except _TemplateTimeoutError:
        raise RowError(f"the chat template runs for more than {TEMPLATE_SECONDS:.0f} seconds of CPU time") from None
    finally:
        signal.signal(signal.SIGVTALRM, before)
