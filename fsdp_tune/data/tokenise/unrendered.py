"""Find parts of a conversation that a chat template omits, by searching the rendered text for each value of
the row.

Templates format values in different ways (trimmed, as JSON, one word per line), so each string and number
of a message is searched for separately, in the forms that templates write. A short value may occur
elsewhere by chance: calls and reasoning of trained answers are therefore also rendered with a mark at the
end of each text, and the marks are searched for.

A trained answer that lacks its text, its reasoning or its tool call is an error, since the model would
learn to answer without it. Context that is missing (tools, a system prompt, fields such as `name`) is noted
and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import cast

from fsdp_tune.core.values import leaves
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.format.message_keys import REASONING_NAMES, Message
from fsdp_tune.data.format.row_notes import Note
from fsdp_tune.data.format.tools import tool_calls, tool_names
from fsdp_tune.data.read.row_files import RowError, parse_text
from fsdp_tune.data.tokenise.answer_spans import FIRST_NUMBER, Answer, Rendering, common_length

NOT_RENDERED = "not-rendered"


READ_FIELDS = ("role", "content", "tool_calls")
"""Fields of a message that are checked by name; the meaning of any other field depends on the template."""


MOST_SHOWN = 40
"""Number of characters of a missing value to show in a message."""


def find_unrendered(
    chat: Chat, template: str, rendering: Rendering, answers: Mapping[int, Answer]
) -> tuple[Note, ...]:
    """Return notes about context that is not in the rendered conversation.

    `answers` are the trained answers by the index of their message; if it is empty, every answer is trained.

    Raises: RowError if a trained answer is not rendered completely.
    """
    text = rendering.whole
    notes: dict[Note, None] = {}
    contexts = list(dict.fromkeys([text, *(answer.text for answer in answers.values())]))
    begin = 0
    for index, message in enumerate(chat.messages):
        role, own, checked = message["role"], text, READ_FIELDS
        if role == "assistant" and (chat.trained is None or chat.trained[index]):
            answer = answers.get(index, Answer(text, begin, len(text)))
            own, checked = answer.text, (*READ_FIELDS, *REASONING_NAMES)
            _refuse_incomplete(index, message, answer, rendering)
        else:
            if not any(_is_rendered(context, message["content"], 0, len(context)) for context in contexts):
                notes[Note(NOT_RENDERED, f"content of `{role}` messages")] = None
            if _missing_of_calls(text, message, begin, len(text)) is not None:
                notes[Note(NOT_RENDERED, f"tool calls of `{role}` messages")] = None
        for name, value in message.items():
            if name not in checked and not _is_field_rendered(own, template, name, value):
                notes[Note(NOT_RENDERED, f"`{name}` of `{role}` messages")] = None
        begin = max(begin, text.find(message["content"].strip(), begin))
    tools = chat.tools or []
    names = [
        name or json.dumps(tool, default=str) for name, tool in zip(tool_names(tools), tools, strict=True)
    ]
    if not any(all(_is_rendered(context, name, 0, len(context)) for name in names) for context in contexts):
        notes[Note(NOT_RENDERED, "tools")] = None
    return tuple(notes)


def is_field(note: Note) -> bool:
    """Return whether a note is about a field of messages, such as `name`, rather than content, calls or
    tools."""
    return note.detail.startswith("`")


def _refuse_incomplete(index: int, message: Message, answer: Answer, rendering: Rendering) -> None:
    """Raise a RowError if the template leaves out a part of a trained answer."""
    text = answer.text
    missing = _missing_of_answer(text, message, answer.begin, answer.end)
    if missing is not None:  # parts of an answer may be in the generation prompt
        missing = _missing_of_answer(
            text, message, common_length(rendering.render(index), text) if index else 0, len(text)
        )
    if missing is not None:
        raise RowError(f"message {index + 1}: the chat template omits {_shown(missing)}")
    if (
        any(message.get(name) for name in ("tool_calls", *REASONING_NAMES))
        and (missing := _missing_mark(index, rendering)) is not None
    ):
        raise RowError(f"message {index + 1}: the chat template omits {_shown(missing)}")


def _missing_mark(index: int, rendering: Rendering) -> str | None:
    """Return the first text of an answer, its calls or its reasoning whose mark is not rendered; None if all
    are, or none can be."""
    marks = _Marks(rendering.unused_character())
    message = marks.in_message(rendering.messages[index])
    try:
        text = rendering.render_messages([*rendering.messages[:index], message])
    except RowError:  # the template checks what it renders
        return None
    missing = {
        mark: value for mark, value in marks.values.items() if not any(form in text for form in _forms(mark))
    }
    # rows may have it under two names
    reasoning = {marks.values[mark] for mark in marks.of_reasoning if mark not in missing}
    return next(
        (value for mark, value in missing.items() if not (mark in marks.of_reasoning and value in reasoning)),
        None,
    )


class _Marks:
    """Appends a different mark to each text of a message."""

    def __init__(self, character: str) -> None:
        self.values: dict[str, str] = {}
        """The text by its mark."""
        self.of_reasoning: set[str] = set()
        self._character = character

    def in_message(self, message: Message) -> Message:
        marked = {
            name: self.in_value(message[name])
            for name in REASONING_NAMES
            if isinstance(message.get(name), str)
        }
        self.of_reasoning = set(self.values)
        marked["content"] = self.in_value(message["content"])
        calls = [self._in_call(call) for call in message.get("tool_calls") or []]
        return message | marked | ({"tool_calls": calls} if calls else {})

    def _in_call(self, call: Message) -> Message:
        if isinstance(call.get("function"), dict):
            return call | {"function": self._in_call(call["function"])}
        name, given = self.in_value(call.get("name")), call.get("arguments")
        parsed = _parsed(given)
        arguments = self.in_value(parsed) if isinstance(parsed, dict) else given
        if isinstance(given, str) and isinstance(parsed, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {key: value for key, value in (("name", name), ("arguments", arguments)) if key in call}

    def in_value(self, value: object) -> object:
        """Return `value` with a mark at the end of each text in it that is not empty; keys have none."""
        if isinstance(value, str) and value.strip():
            mark = self._character + chr(FIRST_NUMBER + len(self.values))
            self.values[mark] = value
            return value + mark
        if isinstance(value, Mapping):
            return {key: self.in_value(part) for key, part in cast("Mapping[str, object]", value).items()}
        if isinstance(value, list):
            return [self.in_value(part) for part in cast("list[object]", value)]
        return value


def _missing_of_answer(text: str, message: Message, begin: int, end: int) -> str | None:
    """Return the first part of an answer's content or tool calls that is missing in `text[begin:end]`; None
    if all are there."""
    content = message["content"].strip()
    if text.find(content, begin, end) < 0 and not _is_rendered(text, content, begin, end):
        return _first_missing(text, content, begin, end)
    for name in REASONING_NAMES:
        reasoning: object = message.get(name)
        if isinstance(reasoning, str) and not _is_rendered(text, reasoning, begin, end):
            return reasoning.strip()
    return _missing_of_calls(text, message, begin, end)


def _is_rendered(text: str, value: str, begin: int, end: int) -> bool:
    """Return whether `text[begin:end]` contains `value` unchanged, escaped, or word by word with other white
    space."""
    return (
        any(text.find(form, begin, end) >= 0 for form in _forms(value))
        or _first_missing(text, value, begin, end) is None
    )


def _forms(value: str) -> Iterator[str]:
    value = value.strip()
    yield value
    for ascii_only in (False, True):
        once = json.dumps(value, ensure_ascii=ascii_only)
        yield once[1:-1]
        yield json.dumps(once, ensure_ascii=ascii_only)[3:-3]  # JSON text that is quoted once more
    yield repr(value)[1:-1]  # of arguments that are printed as a Python dict


def _first_missing(text: str, value: str, begin: int, end: int) -> str | None:
    """Return the rest of `value` from its first word that is missing in `text[begin:end]`; None if all words
    follow in order."""
    words = value.split()
    for number, word in enumerate(words):
        at = text.find(word, begin, end)
        if at < 0:
            return " ".join(words[number:])
        begin = at + len(word)
    return None


def _missing_of_calls(text: str, message: Message, begin: int, end: int) -> str | None:
    """Return the first function name, argument or value that is not rendered. Call ids are not checked: few
    templates write them."""
    for function in tool_calls(message):
        for leaf in (str(function.get("name", "")), *_leaves(_parsed(function.get("arguments")))):
            if not _is_rendered(text, leaf, begin, end):
                return leaf
    return None


def _parsed(value: object) -> object:
    """Return the value of JSON text, or `value` itself if it is not JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_text(value)
    except ValueError:
        return value


def _leaves(value: object) -> Iterator[str]:
    """Yield every key and value below `value` as text, except null, true and false, which templates write
    differently or not at all."""
    for leaf in leaves(value):
        if isinstance(leaf, str):
            yield leaf
        elif leaf is not None and not isinstance(leaf, bool):
            yield json.dumps(leaf, default=str)


def _is_field_rendered(text: str, template: str, name: str, value: object) -> bool:
    """Return whether template or text names the field, and the text contains its values, except numbers,
    which may occur by chance."""
    is_named = name in template or f'"{name}"' in text or f"'{name}'" in text
    return is_named and all(
        _is_rendered(text, leaf, 0, len(text)) for leaf in _leaves(value) if not leaf.isdigit()
    )


def _shown(missing: str) -> str:
    return repr(missing if len(missing) <= MOST_SHOWN else missing[:MOST_SHOWN] + "…")
