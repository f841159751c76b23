"""Encode a conversation as token ids, with a mask of the assistant's answers.

At inference the model receives the conversation so far, rendered with the generation prompt, and must generate the text that
follows in the rendering with its answer. So the conversation is rendered up to each answer with the generation prompt, and up
to the end of the answer. Both must be prefixes of the complete rendering, as text and token by token. If they are not (a
template may drop earlier reasoning), training on earlier answers would not match inference, and the row is refused.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import RowError
from fsdp_tune.data.tokenise.encoder import Encoder, TextEncoder
from fsdp_tune.data.tokenise.unrendered import find_unrendered

TEMPLATE_SECONDS = 5.0
"""Limit of CPU time for all renderings of one row; a real conversation takes milliseconds."""


class _TemplateTimeoutError(BaseException):
    """Not an Exception, so that no `except Exception` inside a template's code swallows it."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    ids: list[int]
    trained: list[bool]
    eos_appended: bool
    """Whether the end-of-sequence token was appended because the template does not write it after the last answer."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as text, with the positions of its answers."""

    whole: str
    answers: tuple[tuple[int, int], ...] | None
    """Begin and end of the trained answers, in characters; None = everything is trained."""
    ends_trained: bool
    """Whether an end-of-sequence token after the last message is trained."""
    notes: tuple[Note, ...] = ()
    """Context that the template leaves out."""

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
        if not append_eos or encoder.eos_id in ids[-1:] or self.whole.rstrip().endswith(encoder.eos_token):
            return ChatTokens(ids, trained, eos_appended=False)
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


def render_chat(chat: Chat, template: str, encoder: Encoder, *, check_repeat: bool) -> RenderedChat:
    """Render a conversation as text, with the borders of its trained answers.

    Raises: RowError if the template raises, runs too long, differs from call to call (`check_repeat`), is not
    prefix-stable, or leaves out a part of a trained answer.
    """
    with _time_limit():
        rendering = _Rendering(chat, template, encoder)
        if check_repeat and rendering.whole != rendering.render(len(chat.messages), generation_prompt=False):
            raise RowError("the chat template renders the same conversation differently each time")
        answers = {index: rendering.answer(index) for index, trained in enumerate(chat.trained or ()) if trained}
        notes = find_unrendered(chat, template, rendering.whole, answers, lambda count: rendering.render(count, generation_prompt=False))
        if chat.trained is None:
            return RenderedChat(rendering.whole, None, ends_trained=True, notes=notes)
        return RenderedChat(rendering.whole, tuple(answers.values()), ends_trained=chat.trained[-1], notes=notes)


class _Rendering:
    def __init__(self, chat: Chat, template: str, encoder: Encoder) -> None:
        self._chat, self._template, self._encoder = chat, template, encoder
        self.whole = self.render(len(chat.messages), generation_prompt=False)

    def render(self, count: int, *, generation_prompt: bool, **variables: Any) -> str:
        """Render the first `count` messages as text."""
        messages = self._chat.messages[:count]
        try:
            return self._encoder.render(messages, self._template, tools=self._chat.tools, generation_prompt=generation_prompt, **variables)
        except FsdpTuneError:  # a signal that ends the command may arrive here
            raise
        except Exception as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RowError(f"the chat template rejects the conversation: {first_line}") from error

    def answer(self, index: int) -> tuple[int, int]:
        """Return begin and end of message `index` in `whole`, without the text that the generation prompt provides before it."""
        if index == 0:
            raise RowError("the conversation begins with the assistant: there is no message to answer")
        last = index == len(self._chat.messages) - 1
        until = self.whole if last else self.render(index + 1, generation_prompt=False)
        given = self.render(index, generation_prompt=True)
        if not until.startswith(given) or not self.whole.startswith(until):
            raise RowError(_unstable(index, self.whole, given if not until.startswith(given) else until))
        # A template with switchable reasoning supplies the empty reasoning block itself when reasoning is off (Qwen3).
        if "enable_thinking" in self._template:
            without = self.render(index, generation_prompt=True, enable_thinking=False)
            given = without if until.startswith(without) and len(without) > len(given) else given
        return len(given), _end_of_answer(until, len(given), self._encoder.eos_token)


def _end_of_answer(text: str, begin: int, eos_token: str) -> int:
    """Return the end of an answer, without white space that the template adds after the end-of-sequence token."""
    found = text.find(eos_token, begin)
    after = text.rfind(eos_token) + len(eos_token)
    return after if found >= 0 and not text[after:].strip() else len(text)


def _unstable(index: int, whole: str, prefix: str) -> str:
    at = next((at for at, (left, right) in enumerate(zip(whole, prefix, strict=False)) if left != right), min(len(whole), len(prefix)))
    return (
        f"the chat template is not prefix-stable: up to message {index + 1} it renders {prefix[at : at + 30]!r} "
        f"where the full conversation has {whole[at : at + 30]!r} (`loss_on: last_assistant` trains only the last answer)"
    )


@contextmanager
def _time_limit() -> Iterator[None]:
    """Interrupt Python code (which a template becomes) after TEMPLATE_SECONDS of CPU time; needs the main thread of its process.

    CPU time is measured, so that the load of the machine does not change which rows are bad.
    """
    assert threading.current_thread() is threading.main_thread(), "signals reach the main thread alone"

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
