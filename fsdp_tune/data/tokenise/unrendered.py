"""Find parts of a conversation that a chat template omits, by searching the rendered text for each value of the row.

Templates format values in different ways (trimmed, as JSON, one word per line), so each string and number of a message is
searched for separately, in the forms that templates write. A trained answer that lacks its text, its reasoning or its tool
call is an error, since the model would learn to answer without it. Context that is missing (tools, a system prompt, fields
such as `name`) is noted and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fsdp_tune.data.format.conversations import Message, tool_calls, tool_names
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import RowError, parse_text
from fsdp_tune.data.tokenise.answers import Answer, common_length
from fsdp_tune.data.tokenise.leaves import leaves

NOT_RENDERED = "not-rendered"
READ_FIELDS = ("role", "content", "tool_calls")
"""Fields of a message that are checked by name; the meaning of any other field depends on the template."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
MOST_SHOWN = 40
"""Number of characters of a missing value to show in a message."""


def find_unrendered(chat: Chat, template: str, text: str, answers: Mapping[int, Answer], render: Callable[[int], str]) -> tuple[Note, ...]:
    """Return notes about context that is not in `text`, the rendered conversation.

    `answers` are the trained answers by the index of their message; if it is empty, every answer is trained. `render` returns
    the text of the first messages.

    Raises: RowError if a trained answer is not rendered completely.
    """
    notes: dict[Note, None] = {}
    contexts = list(dict.fromkeys([text, *(answer.text for answer in answers.values())]))
    begin = 0
    for index, message in enumerate(chat.messages):
        role, own, checked = message["role"], text, READ_FIELDS
        if role == "assistant" and (chat.trained is None or chat.trained[index]):
            answer = answers.get(index, Answer(text, begin, len(text)))
            own, checked = answer.text, (*READ_FIELDS, *REASONING_FIELDS)
            _refuse_incomplete(index, message, answer, render)
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
    names = [name or json.dumps(tool, default=str) for name, tool in zip(tool_names(tools), tools, strict=True)]
    if not any(all(_is_rendered(context, name, 0, len(context)) for name in names) for context in contexts):
        notes[Note(NOT_RENDERED, "tools")] = None
    return tuple(notes)


def is_field(note: Note) -> bool:
    """Return whether a note is about a field of messages, such as `name`, rather than content, calls or tools."""
    return note.detail.startswith("`")


def _refuse_incomplete(index: int, message: Message, answer: Answer, render: Callable[[int], str]) -> None:
    """Raise a RowError if the template leaves out a part of a trained answer."""
    text = answer.text
    missing = _missing_of_answer(text, message, answer.begin, answer.end)
    if missing is not None:  # parts of an answer may be in the generation prompt
        missing = _missing_of_answer(text, message, common_length(render(index), text) if index else 0, len(text))
    if missing is not None:
        raise RowError(f"message {index + 1}: the chat template omits {_shown(missing)}")


def _missing_of_answer(text: str, message: Message, begin: int, end: int) -> str | None:
    """Return the first part of an answer's content or tool calls that is missing in `text[begin:end]`; None if all are there."""
    content = message["content"].strip()
    if text.find(content, begin, end) < 0 and not _is_rendered(text, content, begin, end):
        return _first_missing(text, content, begin, end)
    for name in REASONING_FIELDS:
        reasoning: object = message.get(name)
        if isinstance(reasoning, str) and not _is_rendered(text, reasoning, begin, end):
            return reasoning.strip()
    return _missing_of_calls(text, message, begin, end)


def _is_rendered(text: str, value: str, begin: int, end: int) -> bool:
    """Return whether `text[begin:end]` contains `value` unchanged, escaped, or word by word with other white space."""
    return any(text.find(form, begin, end) >= 0 for form in _forms(value)) or _first_missing(text, value, begin, end) is None


def _forms(value: str) -> Iterator[str]:
    value = value.strip()
    yield value
    for ascii_only in (False, True):
        once = json.dumps(value, ensure_ascii=ascii_only)
        yield once[1:-1]
        yield json.dumps(once, ensure_ascii=ascii_only)[3:-3]  # JSON text that is quoted once more
    yield repr(value)[1:-1]  # of arguments that are printed as a Python dict


def _first_missing(text: str, value: str, begin: int, end: int) -> str | None:
    """Return the rest of `value` from its first word that is missing in `text[begin:end]`; None if all words follow in order."""
    words = value.split()
    for number, word in enumerate(words):
        at = text.find(word, begin, end)
        if at < 0:
            return " ".join(words[number:])
        begin = at + len(word)
    return None


def _missing_of_calls(text: str, message: Message, begin: int, end: int) -> str | None:
    """Return the first function name, argument or value that is not rendered. Call ids are not checked: few templates write them."""
    for function in tool_calls(message):
        for leaf in (str(function.get("name", "")), *_leaves(_parsed(function.get("arguments")))):
            if not _is_rendered(text, leaf, begin, end):
                return leaf
    return None


def _parsed(value: Any) -> Any:
    """Return the value of JSON text, or `value` itself if it is not JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_text(value)
    except ValueError:
        return value


def _leaves(value: Any) -> Iterator[str]:
    """Yield every key and value below `value` as text, except null, true and false, which templates write differently or not at all."""
    for leaf in leaves(value):
        if isinstance(leaf, str):
            yield leaf
        elif leaf is not None and not isinstance(leaf, bool):
            yield json.dumps(leaf, default=str)


def _is_field_rendered(text: str, template: str, name: str, value: Any) -> bool:
    """Return whether template or text names the field, and the text contains its values, except numbers, which may occur by chance."""
    is_named = name in template or f'"{name}"' in text or f"'{name}'" in text
    return is_named and all(_is_rendered(text, leaf, 0, len(text)) for leaf in _leaves(value) if not leaf.isdigit())


def _shown(missing: str) -> str:
    return repr(missing if len(missing) <= MOST_SHOWN else missing[:MOST_SHOWN] + "…")
