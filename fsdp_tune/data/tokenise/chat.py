"""Render conversations as text, with the borders of their trained answers.

A template may render earlier messages differently once more messages follow, for example without their
reasoning. Each answer whose context would differ from that at inference becomes an example of its own: the
conversation up to it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from fsdp_tune.core.errors import usage_error
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.format.row_notes import Note
from fsdp_tune.data.format.templates import bundled_text, fitting_templates
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.data.tokenise.answer_spans import Answer, Rendering
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.data.tokenise.unrendered import find_unrendered, is_field

TEMPLATE_SECONDS = 5.0
"""Limit of CPU time for all renderings of one row; a real conversation takes milliseconds."""


MOST_CHARACTERS = 1 << 25
"""Limit for all examples of one conversation, which repeat their context; bounds memory."""


class _TemplateTimeoutError(BaseException):
    """Not an Exception, so that no `except Exception` inside a template's code swallows it."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A training example of a conversation as text, with the positions of its answers."""

    whole: str
    answers: tuple[tuple[int, int], ...] | None
    """Begin and end of the trained answers, in characters; None = everything is trained."""
    ends_trained: bool
    """Whether an end-of-sequence token after the last message is trained."""
    is_complete: bool = True
    """Whether the end of sequence may follow. False where the template has ended a turn inside the
    conversation, for example a call."""

    @property
    def pieces(self) -> list[str]:
        """The complete text, and its parts between the borders of answers: the texts that `chat_tokens` needs
        encoded."""
        ends = [border for answer in self.answers or () for border in answer]
        return [
            self.whole,
            *(self.whole[begin:end] for begin, end in zip([0, *ends], [*ends, len(self.whole)], strict=True)),
        ]

    @property
    def end(self) -> int:
        """Where the trained part of the text ends."""
        return self.answers[-1][1] if self.answers and self.ends_trained else len(self.whole)


def limit_characters(count: int, characters: int) -> None:
    """Raises: RowError if the examples of one conversation are too long together."""
    if characters > MOST_CHARACTERS:
        raise RowError(
            f"the conversation needs {count} examples, each with the context of its answer at inference, "
            f"with {characters:,} characters (`loss_on: last_assistant` trains the last answer only)"
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
    prefix-stable at a trained answer, or leaves out a part of one; usage error outside the main thread, as
    `template_time_limit`.
    """
    with template_time_limit():
        rendering = Rendering(chat, template, encoder)
        if check_repeat and rendering.whole != rendering.render(len(chat.messages)):
            raise RowError("the chat template renders the same conversation differently each time")
        answers = {
            index: rendering.answer(index) for index, trained in enumerate(chat.trained or ()) if trained
        }
        notes = find_unrendered(chat, template, rendering, answers)
        if chat.trained is None:
            return RenderedChat((RenderedText(rendering.whole, None, ends_trained=True),), notes)
        return RenderedChat(
            _examples(rendering, list(answers.values()), ends_trained=chat.trained[-1]), notes
        )


def template_for(chat: Chat, encoder: Encoder, rejected: str) -> str | None:
    """Return the name of a bundled template that renders a chat, with tokens that the vocabulary has; None if
    there is none.

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
        inside = next(
            (inside for text in found if (inside := rendering.within(answer, text)) is not None), answer
        )
        found.setdefault(inside.text, []).insert(0, inside)
    if len(found) > 1:
        limit_characters(len(found), sum(map(len, found)))
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

    CPU time is measured, so that the load of the machine does not change which rows are bad. Raises: RowError
    at the limit; usage error outside the main thread, which alone receives signals.
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
        raise RowError(
            f"the chat template runs for more than {TEMPLATE_SECONDS:.0f} seconds of CPU time"
        ) from None
    finally:
        signal.signal(signal.SIGVTALRM, before)
