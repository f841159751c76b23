"""Token ids of a conversation, and which of them the assistant wrote.

What the model is given at inference is the conversation so far, rendered with the generation prompt; what it then has
to write is what follows in the conversation with its answer. So the conversation is rendered up to each answer, with the
generation prompt, and up to its end, and both must be beginnings of the whole, as text and token by token. A template
for which they are not (one that drops earlier reasoning, say) cannot train earlier answers as they will be asked for.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from fsdp_tune.data.encoder import Encoder
from fsdp_tune.data.formats import Chat, RowError
from fsdp_tune.errors import FsdpTuneError

TEMPLATE_SECONDS = 5.0
"""For all renderings of one row; a real conversation takes milliseconds."""


class _TemplateTimeoutError(BaseException):
    """Not an Exception, so that no `except Exception` inside a template's code swallows it."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    ids: list[int]
    trained: list[bool]
    eos_appended: bool
    """The template does not end the last answer with the tokenizer's end of sequence, so it was added."""


def tokenise_chat(chat: Chat, template: str, encoder: Encoder, *, append_eos: bool, check_repeat: bool) -> ChatTokens:
    """RowError when the template raises, runs too long, differs from call to call (`check_repeat`), or is not prefix-stable."""
    with _time_limit():
        rendering = _Rendering(chat, template, encoder)
        if check_repeat and rendering.whole != rendering.render(len(chat.messages), generation_prompt=False):
            raise RowError("the chat template renders the same conversation differently each time")
        spans = [rendering.answer(index) for index, trained in enumerate(chat.trained or ()) if trained]
    ids, trained = _mask(rendering.whole, spans, encoder) if chat.trained is not None else _all(rendering.whole, encoder)
    ends_well = encoder.eos_id in ids[-1:] or rendering.whole.rstrip().endswith(encoder.eos_token)
    if not append_eos or ends_well:
        return ChatTokens(ids, trained, eos_appended=False)
    return ChatTokens([*ids, encoder.eos_id], [*trained, chat.trained is None or chat.trained[-1]], eos_appended=True)


class _Rendering:
    def __init__(self, chat: Chat, template: str, encoder: Encoder) -> None:
        self._chat, self._template, self._encoder = chat, template, encoder
        self.whole = self.render(len(chat.messages), generation_prompt=False)

    def render(self, count: int, *, generation_prompt: bool, **variables: Any) -> str:
        """The first `count` messages as text."""
        messages = self._chat.messages[:count]
        try:
            return self._encoder.render(messages, self._template, tools=self._chat.tools, generation_prompt=generation_prompt, **variables)
        except FsdpTuneError:  # a signal that ends the command may arrive here
            raise
        except Exception as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RowError(f"the chat template refuses the conversation: {first_line}") from error

    def answer(self, index: int) -> tuple[int, int]:
        """Where message `index` begins and ends in `whole`, without what a generation prompt supplies before it."""
        if index == 0:
            raise RowError("the conversation begins with the assistant: there is nothing to answer")
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
    """Blank text behind the end of sequence is the template's; the model stops before it."""
    found = text.find(eos_token, begin)
    after = text.rfind(eos_token) + len(eos_token)
    return after if found >= 0 and not text[after:].strip() else len(text)


def _unstable(index: int, whole: str, prefix: str) -> str:
    at = next((at for at, (left, right) in enumerate(zip(whole, prefix, strict=False)) if left != right), min(len(whole), len(prefix)))
    return (
        f"the chat template is not prefix-stable: up to message {index + 1} it renders {prefix[at : at + 30]!r} "
        f"where the whole conversation has {whole[at : at + 30]!r} (`loss_on: last_assistant` trains the last answer alone)"
    )


def _mask(whole: str, spans: list[tuple[int, int]], encoder: Encoder) -> tuple[list[int], list[bool]]:
    """Ids of `whole`, trained inside the spans (characters); each border of a span must be a border between tokens."""
    borders = sorted({border for span in spans for border in span})
    ids, *beginnings = encoder.encode([whole, *(whole[:border] for border in borders)])
    for border, beginning in zip(borders, beginnings, strict=True):
        if ids[: len(beginning)] != beginning:
            raise RowError(
                f"the chat template is not prefix-stable: a token spans what is given and what is answered, at "
                f"{whole[max(0, border - 15) : border]!r} {whole[border : border + 15]!r}"
            )
    token_of = {border: len(beginning) for border, beginning in zip(borders, beginnings, strict=True)}
    trained = [False] * len(ids)
    for begin, end in spans:
        first, last = token_of[begin], token_of[end]
        trained[first:last] = [True] * (last - first)
    return ids, trained


def _all(whole: str, encoder: Encoder) -> tuple[list[int], list[bool]]:
    ids = encoder.encode([whole])[0]
    return ids, [True] * len(ids)


@contextmanager
def _time_limit() -> Iterator[None]:
    """Interrupts Python code (which a template becomes) after TEMPLATE_SECONDS; needs the main thread of its process."""
    assert threading.current_thread() is threading.main_thread(), "signals reach the main thread alone"

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TemplateTimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, TEMPLATE_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _TemplateTimeoutError:
        raise RowError(f"the chat template runs for more than {TEMPLATE_SECONDS:.0f} seconds") from None
    finally:
        signal.signal(signal.SIGALRM, before)
