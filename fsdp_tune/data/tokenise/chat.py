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
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import RowError
from fsdp_tune.data.tokenise.answers import Answer, Rendering
from fsdp_tune.data.tokenise.encoder import Encoder, TextEncoder
from fsdp_tune.data.tokenise.unrendered import find_unrendered

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


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A training example of a conversation as text, with the positions of its answers."""

    whole: str
    answers: tuple[tuple[int, int], ...] | None
    """Begin and end of the trained answers, in characters; None = everything is trained."""
    ends_trained: bool
    """Whether an end-of-sequence token after the last message is trained."""

    @property
    def pieces(self) -> list[str]:
        """The complete text, and its parts between the borders of answers: the texts that `tokens` needs encoded."""
        ends = [border for answer in self.answers or () for border in answer]
        return [self.whole, *(self.whole[begin:end] for begin, end in zip([0, *ends], [*ends, len(self.whole)], strict=True))]

    def tokens(self, encoded: list[list[int]], encoder: TextEncoder, *, append_eos: bool) -> ChatTokens:
        """Return ids and trained flags. `encoded` are the ids of `pieces`. Raises: RowError if a token spans the border of an answer."""
        ids, *parts = encoded
        if self.answers is None:
            trained = [True] * len(ids)
        else:
            lengths = (
                [len(part) for part in parts] if list(chain.from_iterable(parts)) == ids else self._lengths_by_beginnings(ids, encoder)
            )
            trained = [bool(number % 2) for number, length in enumerate(lengths) for _ in range(length)]
        end = self.answers[-1][1] if self.answers and self.ends_trained else len(self.whole)
        if not append_eos or encoder.eos_id in ids[-1:] or self.whole[:end].rstrip().endswith(encoder.eos_token):
            return ChatTokens(ids, trained, eos_appended=False)
        if self.ends_trained and any(trained):  # with white space that the template writes after the end of the turn
            after = len(trained) - trained[::-1].index(True)
            trained[after:] = [True] * (len(trained) - after)
        return ChatTokens([*ids, encoder.eos_id], [*trained, self.ends_trained], eos_appended=True)

    def _lengths_by_beginnings(self, ids: list[int], encoder: TextEncoder) -> list[int]:
        """Return the number of tokens between borders, for tokenizers that encode the beginning of a text differently (an added space)."""
        borders = [border for answer in self.answers or () for border in answer]
        ends: list[int] = []
        for border, beginning in zip(borders, encoder.encode([self.whole[:border] for border in borders]), strict=True):
            if ids[: len(beginning)] != beginning:
                raise RowError(
                    "the chat template is not prefix-stable: a token spans the border between context and answer, at "
                    f"{self.whole[max(0, border - 15) : border]!r} {self.whole[border : border + 15]!r}"
                )
            ends.append(len(beginning))
        return [end - begin for begin, end in zip([0, *ends], [*ends, len(ids)], strict=True)]


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
        notes = find_unrendered(chat, template, rendering.whole, answers, rendering.render)
        if chat.trained is None:
            return RenderedChat((RenderedText(rendering.whole, None, ends_trained=True),), notes)
        return RenderedChat(_examples(rendering, list(answers.values()), ends_trained=chat.trained[-1]), notes)


def _examples(rendering: Rendering, answers: list[Answer], *, ends_trained: bool) -> tuple[RenderedText, ...]:
    """Distribute the answers over as few texts as have the context that each answer has at inference."""
    found: dict[str, list[Answer]] = {rendering.whole: []}
    for answer in reversed(answers):
        inside = next((inside for text in found if (inside := rendering.within(answer, text)) is not None), answer)
        found.setdefault(inside.text, []).insert(0, inside)
    characters = sum(map(len, found))
    if len(found) > 1 and characters > MOST_CHARACTERS:
        raise RowError(
            f"the chat template needs {len(found)} examples for the conversation, with {characters:,} characters "
            "(`loss_on: last_assistant` trains the last answer only)"
        )
    return tuple(
        RenderedText(text, tuple((answer.begin, answer.end) for answer in inside), ends_trained or text != rendering.whole)
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
