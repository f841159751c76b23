"""Find parts of a conversation that a chat template omits, by searching the rendered text for each value of the row.

Templates format values in different ways (trimmed, as JSON, one word per line), so each string and number of a message is
searched for separately, in the forms that templates write. A trained answer that lacks its text or its tool call is an
error, since the model would learn to answer without it. Context that is missing (tools, a system prompt, fields such as
`name`) is noted and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, cast

from fsdp_tune.data.format.conversations import Message
from fsdp_tune.data.format.formats import Chat
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import RowError
from fsdp_tune.data.tokenise.leaves import leaves

NOT_RENDERED = "not-rendered"
READ_FIELDS = ("role", "content", "tool_calls")
"""Fields of a message that are checked by name; the meaning of any other field depends on the template."""
MOST_SHOWN = 40
"""Number of characters of a missing value to show in a message."""


def find_unrendered(
    chat: Chat, template: str, text: str, answers: dict[int, tuple[int, int]], render: Callable[[int], str]
) -> tuple[Note, ...]:
    """Return notes about context that is not in `text`, the rendered conversation.

    `answers` has the borders of the trained answers in `text`, by the index of their message; if it is empty, every answer is
    trained. `render` returns the text of the first messages.

    Raises: RowError if a trained answer is not rendered completely.
    """
    notes: dict[Note, None] = {}
    begin = 0
    for index, message in enumerate(chat.messages):
        role = message["role"]
        if role == "assistant" and (chat.trained is None or chat.trained[index]):
            borders = answers.get(index, (begin, len(text)))
            if _missing_of_answer(text, message, *borders) is not None:  # parts of an answer may be in the generation prompt
                missing = _missing_of_answer(text, message, *_borders(text, index, len(chat.messages), render))
                if missing is not None:
                    raise RowError(f"message {index + 1}: the chat template omits {_shown(missing)}")
        else:
            if not _is_rendered(text, message["content"], 0, len(text)):
                notes[Note(NOT_RENDERED, f"content of `{role}` messages")] = None
            if _missing_of_calls(text, message, begin, len(text)) is not None:
                notes[Note(NOT_RENDERED, f"tool calls of `{role}` messages")] = None
        for name, value in message.items():
            if name not in READ_FIELDS and not _is_field_rendered(text, template, name, value):
                notes[Note(NOT_RENDERED, f"`{name}` of `{role}` messages")] = None
        begin = max(begin, text.find(message["content"].strip(), begin))
    if not all(_is_rendered(text, name, 0, len(text)) for name in _tool_names(chat.tools or [])):
        notes[Note(NOT_RENDERED, "tools")] = None
    return tuple(notes)


def _borders(text: str, index: int, count: int, render: Callable[[int], str]) -> tuple[int, int]:
    """Return the range of message `index` in `text`, by rendering the messages before it; all of `text` if that fails."""
    before = render(index) if index else ""
    until = render(index + 1) if index + 1 < count else text
    return len(before) if text.startswith(before) else 0, len(until) if text.startswith(until) else len(text)


def _missing_of_answer(text: str, message: Message, begin: int, end: int) -> str | None:
    """Return the first part of an answer's content or tool calls that is missing in `text[begin:end]`; None if all are there."""
    content = message["content"].strip()
    if text.find(content, begin, end) < 0 and not _is_rendered(text, content, begin, end):
        return _first_missing(text, content, begin, end)
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
    for call in cast(list[Message], message.get("tool_calls") or []):
        function: Message = call["function"] if isinstance(call.get("function"), dict) else call
        for leaf in (str(function.get("name", "")), *_leaves(_parsed(function.get("arguments")))):
            if not _is_rendered(text, leaf, begin, end):
                return leaf
    return None


def _parsed(value: Any) -> Any:
    """Return the value of JSON text, or `value` itself if it is not JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
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


def _tool_names(tools: list[Any]) -> Iterator[str]:
    for tool in tools:
        described = cast(dict[str, Any], tool) if isinstance(tool, dict) else {}
        function: Any = described.get("function", described)
        name: Any = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
        yield name if isinstance(name, str) else json.dumps(tool, default=str)


def _shown(missing: str) -> str:
    return repr(missing if len(missing) <= MOST_SHOWN else missing[:MOST_SHOWN] + "…")
