"""Locate the trained answers of a conversation in its rendered text.

At inference the model receives the conversation so far, rendered with the generation prompt, and must
generate the text that follows in the rendering with its answer. So the conversation is rendered up to each
answer with the generation prompt, and up to the end of the answer; the first text must be a prefix of the
second. If the template has generation markers (`{% generation %}`), they must include the text that is
generated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fsdp_tune.core.library_errors import first_line
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.format.message_keys import Message
from fsdp_tune.data.format.tools import tool_calls
from fsdp_tune.data.read.row_files import RowError, parse_text
from fsdp_tune.data.tokenise.encoder_protocol import Encoder

FIRST_MARK, LAST_MARK, FIRST_NUMBER = 0xE000, 0xF8FF, 0xF0000
"""Private characters: no template treats them specially, and no normaliser changes them."""

GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Variables of templates that switch reasoning on and off. The generation prompt then supplies the beginning
of the answer, such as an empty reasoning block (Qwen3, GLM 4.5, DeepSeek V3.1)."""
CLOSED_BLOCKS = tuple(
    re.compile(rf"\s*{pair}\s*", re.DOTALL)
    for pair in (
        r"<([\w:]+)>.*</\1>",
        r"<\|(\w+)\|?>.*</?\|?/?\1\|>",
        r"\[(\w+)\].*\[/\1\]",
        r"<\|(?:START|begin_of)_(\w+)\|>.*<\|(?:END|end_of)_\1\|>",
        r"</[\w:]+>",
    )
)
"""Reasoning that a generation prompt begins and ends, or only ends (DeepSeek V3.1): the model generates the
answer itself after it."""
TAG = re.compile(r"\s*[<\[][^>\]]*[>\]]")
SURROGATE = re.compile(r"[\ud800-\udfff]")
SHOWN = 30
"""Number of characters of a rendered text to show in a message."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer in the rendered text of its conversation."""

    text: str
    begin: int
    """Where the generation prompt ends, in characters."""
    end: int
    """After the token that ends the turn."""
    index: int = 0
    """Index of its message."""


class Rendering:
    """The renderings of one conversation and of its beginnings."""

    def __init__(self, chat: Chat, template: str, encoder: Encoder) -> None:
        self._chat, self._template, self._encoder = chat, template, encoder
        self._special = re.compile("|".join(token.pattern for token in encoder.special_tokens) or r"(?!)")
        self._switches = [
            name
            for name in REASONING_SWITCHES
            if re.search(rf"\b{name}\b", template) and name not in chat.variables
        ]
        self._turn_ends: tuple[str, ...] | None = None
        self.whole = self._render_whole()
        if (half := SURROGATE.search(self.whole)) is not None:  # JSON text inside a row may contain one
            raise RowError(
                f"the rendered conversation contains `{ascii(half[0])[1:-1]}`, half of a surrogate "
                "pair and not a character"
            )

    def render(self, count: int, *, generation_prompt: bool = False, **variables: object) -> str:
        """Render the first `count` messages as text. Raises: RowError if the template raises."""
        return self.render_messages(
            self._chat.messages[:count], generation_prompt=generation_prompt, **variables
        )

    @property
    def messages(self) -> list[Message]:
        """The messages, with arguments of calls as the template expects them."""
        return self._chat.messages

    def unused_character(self) -> str:
        """Return a private character that the rendered conversation does not contain."""
        return next(chr(code) for code in range(FIRST_MARK, LAST_MARK) if chr(code) not in self.whole)

    def render_messages(
        self, messages: list[Message], *, generation_prompt: bool = False, **variables: object
    ) -> str:
        tools, variables = self._chat.tools, self._chat.variables | variables
        with self._template_errors(len(messages)):
            return self._encoder.render(
                messages, self._template, tools=tools, generation_prompt=generation_prompt, **variables
            )

    def _render_whole(self) -> str:
        """Render the conversation, with arguments of tool calls as objects or as JSON text, whichever the
        template expects."""
        given, count = self._chat, len(self._chat.messages)
        try:
            text = self.render(count)
        except RowError:
            for change in (_parsed_object, _json_text):
                self._chat = _with_arguments(given, change)
                if self._chat != given:
                    return self.render(count)
            raise
        if any(
            json.dumps(value, ensure_ascii=ascii_only) in text
            for value in _json_texts(given)
            for ascii_only in (False, True)
        ):
            self._chat = _with_arguments(given, _parsed_object)
            return self.render(count)
        return text

    def answer(self, index: int) -> Answer:
        """Return message `index` as an answer, in the conversation up to it. Raises: RowError if the template
        is not prefix-stable."""
        last = index == len(self._chat.messages) - 1
        text = self.whole if last else self.render(index + 1)
        begin = self._end_of_prompt(index, text) if index else self._end_of_first_prompt(text)
        if begin is None:
            return self._after_closed_block(index, text) or self._moved_context(index, text)
        answer = self._answer(index, text, begin)
        if GENERATION_MARKER.search(self._template):
            self._check_markers(index, answer)
        return answer

    def within(self, answer: Answer, text: str) -> Answer | None:
        """Return the answer in another text of the conversation; None if its context or its end differ
        there."""
        if text.startswith(answer.text[: answer.end]):
            return replace(
                answer,
                text=text,
                end=answer.end if self.is_ended(answer) else self._next_role(answer.begin, answer.end, text),
            )
        # Phi 3 ends a conversation, but not each turn, with the end of sequence. Inside a conversation the
        # turn ends before it.
        shorter = answer.text.rstrip().removesuffix(self._encoder.eos_token)
        last = self._last_special(shorter, answer.begin)
        content = self._chat.messages[answer.index]["content"].strip()
        if (
            last is None
            or content not in shorter[answer.begin : last.start()]
            or not text.startswith(shorter)
        ):
            return None
        end = (
            last.end()
            if self._is_ended(answer.index, last, inside=True)
            else self._next_role(answer.begin, last.end(), text)
        )
        return replace(answer, text=text, end=end)

    def is_ended(self, answer: Answer) -> bool:
        """Return whether the template ends the turn of an answer itself, rather than by the token of the next
        role."""
        if answer.text[: answer.end].endswith(self._encoder.eos_token):
            return True
        return self._is_ended(answer.index, self._last_special(answer.text, answer.begin))

    def _next_role(self, begin: int, end: int, text: str) -> int:
        """Return the end of an answer whose turn the token of the next role ends, as in GLM 4."""
        follows = self._special.match(text, end)
        if follows is None:
            return end
        is_generation_prompt = follows[0] in self._special.findall(text[:begin])[-1:]
        return end if is_generation_prompt else follows.end()

    def _is_ended(self, index: int, last: re.Match[str] | None, *, inside: bool = False) -> bool:
        """Return `is_ended` of message `index`; `last` is the last special token of the turn.

        `last` may belong to the message instead, such as `</tool_call>` where a tokenizer marks it as
        special. Then the text after an answer without calls decides; with `inside`, without the end of
        sequence, which ends the conversation.
        """
        if last is not None and not self._may_belong(index, last):
            return True
        end = self._turn_end
        if end is None:
            return last is not None
        return bool((end.removesuffix(self._encoder.eos_token) if inside else end).strip())

    def _may_belong(self, index: int, last: re.Match[str]) -> bool:
        message = self._chat.messages[index]
        return bool(message.get("tool_calls")) or message["content"].rstrip().endswith(last[0].strip())

    @property
    def _turn_end(self) -> str | None:
        """What the template writes after the content of an answer that is the last message, without white
        space at its end.

        None if it rejects or changes an answer without calls.
        """
        if self._turn_ends is None:
            index = next(
                index for index, message in enumerate(self._chat.messages) if message["role"] == "assistant"
            )
            plain = self._around_plain(index)
            self._turn_ends = () if plain is None else (plain[1].rstrip(),)
        return next(iter(self._turn_ends), None)

    def _around_plain(self, index: int) -> tuple[str, str] | None:
        """Return the text before and after the content of an answer without calls at `index`; None if the
        template allows none."""
        mark = self.unused_character()
        try:
            text = self.render_messages(
                [*self._chat.messages[:index], {"role": "assistant", "content": mark}]
            )
        except RowError:
            return None
        before, _, after = text.partition(mark)
        return (before, after) if text.count(mark) == 1 else None

    def _end_of_prompt(self, index: int, text: str) -> int | None:
        """Return the length of the longest generation prompt that begins `text`, with reasoning as by
        default, or switched off or on."""

        def fitting(modes: list[dict[str, bool]]) -> list[int]:
            prompts = (self.render(index, generation_prompt=True, **mode) for mode in modes)
            return [len(prompt) for prompt in prompts if text.startswith(prompt)]

        lengths = fitting([{}, *({name: False} for name in self._switches)]) or fitting(
            [{name: True} for name in self._switches]
        )
        return max(lengths, default=None)

    def _end_of_first_prompt(self, text: str) -> int:
        """Return where the answer begins in a conversation that the assistant begins.

        No question precedes it, so templates may render nothing or fail when asked for a generation prompt.
        The one that follows a question must be in the text before the answer, after what the template itself
        writes there (such as a default system prompt).
        Raises: RowError if it is not.
        """
        header, _ = self._around_plain(0) or ("", "")
        question = [{"role": "user", "content": self.unused_character()}]
        asked = self.render_messages(question)
        ends: list[int] = []
        for mode in ({}, *({name: value} for name in self._switches for value in (False, True))):
            given = self.render_messages(question, generation_prompt=True, **mode)
            prompt = given.removeprefix(asked)
            at = header.rfind(prompt) + len(prompt)
            if (
                given.startswith(asked)
                and prompt.strip()
                and prompt in header
                and text.startswith(header[:at])
            ):
                ends.append(at)
        if not ends:
            others = (
                "`--set data.loss_on=last_assistant` trains the last answer alone; `train: false` in the "
                "message keeps it as context; or "
            )
            has_others = sum(message["role"] == "assistant" for message in self._chat.messages) > 1
            raise RowError(
                "message 1: the conversation begins with the assistant, and the chat template writes "
                "no generation prompt before it",
                hint=f"{others if has_others else ''}begin the conversation with a message from `system` "
                "or `user`",
            )
        return max(ends)

    def _after_closed_block(self, index: int, text: str) -> Answer | None:
        """Return an answer after a prompt that supplies a closed block of reasoning, which `text` omits; None
        if it is another case.

        The template writes no such block before answers that have been given. The model nevertheless receives
        it and must generate the answer after it (Gemma 4). Raises: RowError if the answer has reasoning of
        its own.
        """
        header, _ = self._around_plain(index) or ("", "")
        if not header or not text.startswith(header):
            return None
        for mode in ({}, *({name: False} for name in self._switches)):
            given = self.render(index, generation_prompt=True, **mode)
            block = given.removeprefix(header)
            if block == given or not any(pattern.fullmatch(block) for pattern in CLOSED_BLOCKS):
                continue
            answer = text[len(header) :]
            opening = TAG.match(block)
            if opening is not None and answer.lstrip().startswith(opening[0].strip()):
                raise RowError(_reasoning_twice(index, self._switches))
            return self._answer(index, given + answer, len(given))
        return None

    def _moved_context(self, index: int, text: str) -> Answer:
        """Return an answer whose context the template changes once the answer follows, after the context that
        the model receives.

        Mistral's templates write the system prompt into the last user message while no answer follows, and
        GPT-OSS keeps the reasoning of tool calls until the final answer. The answer must be the text that the
        template writes after the last question alone, and the message before it must be the same in both
        contexts. Raises: RowError if it is not.
        """
        given = self.render(index, generation_prompt=True)
        before, last = self._chat.messages[index - 1 : index + 1]
        question = next(
            (message for message in reversed(self._chat.messages[:index]) if message["role"] == "user"),
            before,
        )
        try:
            alone = Rendering(replace(self._chat, messages=[question, last]), self._template, self._encoder)
            prompt = alone.render(1, generation_prompt=True)
        except RowError:
            raise RowError(_unstable(index, text, given)) from None
        answer = alone.whole[len(prompt) :]
        same = common_length(given[::-1], text.removesuffix(answer)[::-1])
        is_answer = alone.whole.startswith(prompt) and answer and text.endswith(answer)
        content = before["content"].strip()
        is_same = content and any(
            form in given[len(given) - same :] for form in (content, json.dumps(content, ensure_ascii=False))
        )
        if not is_answer or not is_same:
            raise RowError(_unstable(index, text, given))
        return self._answer(index, given + answer, self._end_of_prompt(index, given + answer) or len(given))

    def _answer(self, index: int, text: str, begin: int) -> Answer:
        return Answer(text, begin, self._end_of_turn(index, text, begin), index)

    def _end_of_turn(self, index: int, text: str, begin: int) -> int:
        """Return the end of an answer, without what the template writes after the token that ends the turn.

        This may be white space, the generation prompt (Command A) or the end of sequence once more (Phi 3).
        """
        content = self._chat.messages[index]["content"].strip()
        eos = self._encoder.eos_token
        *_, context = text[:begin].rpartition(eos)
        answer, found, after = text[begin:].rpartition(eos)
        if found and context.startswith(after):
            earlier = answer.rstrip().removesuffix(eos)
            is_twice = earlier != answer.rstrip() and content in earlier
            return begin + len(earlier if is_twice else answer) + len(eos)
        last = self._last_special(text, begin)
        if last is not None and (not self._may_belong(index, last) or self._turn_end != ""):
            return last.end()
        is_written = self._turn_end and text.rstrip().endswith(self._turn_end)  # tokens that are not special
        return len(text.rstrip()) if is_written else len(text)

    def _last_special(self, text: str, begin: int) -> re.Match[str] | None:
        """Return the last special token after `begin`; None if there is none or if other text than white
        space follows."""
        last = max(self._special.finditer(text, begin), key=lambda match: match.end(), default=None)
        return None if last is None or text[last.end() :].strip() else last

    def _check_markers(self, index: int, answer: Answer) -> None:
        """Compare an answer with the text inside the template's generation markers.

        Markers may include what the generation prompt supplies, and exclude the token that ends the turn: the
        first is never trained, the second always. Raises: RowError if they exclude another part of the
        answer.
        """
        with self._template_errors(index + 1):
            text, marked = self._encoder.render_marked(
                self._chat.messages[: index + 1],
                self._template,
                tools=self._chat.tools,
                **self._chat.variables,
            )
        if text != answer.text:
            raise RowError("the chat template renders the same conversation differently each time")
        rest = _unmarked(marked, answer.begin, text[: answer.end])
        header, _ = (self._around_plain(index) if rest else None) or ("", "")
        # Gemma 4 supplies no header after the result of a tool
        if len(header) > answer.begin and text.startswith(header):
            rest = _unmarked(marked, len(header), text[: answer.end])
        if rest and not self._special.fullmatch(rest.strip()):
            raise RowError(
                f"message {index + 1}: the generation markers of the chat template exclude {rest[:SHOWN]!r}, "
                "which the model must generate after the generation prompt"
            )

    @contextmanager
    def _template_errors(self, count: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            where = "" if count == len(self._chat.messages) else f", at message {count}"
            raise RowError(
                f"the chat template rejects the conversation{where}: {first_line(error)}"
            ) from error


def _unmarked(marked: list[tuple[int, int]], done: int, text: str) -> str:
    """Return the text from `done` on that markers do not include, up to the end."""
    for begin, end in sorted(marked):
        if begin > done:
            break
        done = max(done, end)
    return text[done:]


def _with_arguments(chat: Chat, change: Callable[[object], object]) -> Chat:
    def changed(message: Message) -> Message:
        calls = message.get("tool_calls")
        return (
            message | {"tool_calls": [_with_argument(call, change) for call in calls]} if calls else message
        )

    return replace(chat, messages=[changed(message) for message in chat.messages])


def _with_argument(call: Message, change: Callable[[object], object]) -> Message:
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_argument(call["function"], change)}
    return call | {"arguments": change(call["arguments"])} if "arguments" in call else call


def _json_texts(chat: Chat) -> Iterator[str]:
    """Yield the arguments that are the JSON text of an object."""
    for message in chat.messages:
        for call in tool_calls(message):
            value = call.get("arguments")
            if isinstance(value, str) and _parsed_object(value) != value:
                yield value


def _json_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed_object(value: object) -> object:
    """Return the object of JSON text, or `value` itself if it is not the JSON text of an object."""
    try:
        parsed = parse_text(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return parsed if isinstance(parsed, dict) else value


def _unstable(index: int, text: str, prompt: str) -> str:
    at = common_length(text, prompt)
    return (
        f"the chat template is not prefix-stable: before message {index + 1} the model receives "
        f"{prompt[at : at + SHOWN]!r} where the conversation with that message has {text[at : at + SHOWN]!r}"
    )


def _reasoning_twice(index: int, switches: list[str]) -> str:
    switched_on = (
        f": switch it on for the row by `chat_template_kwargs: {{{switches[0]}: true}}`" if switches else ""
    )
    return (
        f"message {index + 1} has reasoning, and the generation prompt of the chat template supplies an "
        f"empty one before it{switched_on}"
    )


def common_length(left: str, right: str) -> int:
    """Return the length of the common beginning of two texts."""
    shorter = min(len(left), len(right))
    return next((at for at in range(shorter) if left[at] != right[at]), shorter)
