"""Convert conversations in rows, as OpenAI's messages or ShareGPT's turns, to messages for chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from fsdp_tune.data.read.json_rows import ColumnError, RowError, kind_of, parse_text

Message = dict[str, Any]

FUNCTION_CALL = "function_call"
"""LLaMA-Factory's role for a function call as JSON text; converted to an assistant's message with `tool_calls`."""
VARIABLES = "chat_template_kwargs"
RESERVED_VARIABLES = (
    "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict",
    "return_assistant_tokens_mask",
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that the package sets."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a part of `content`; the last two are those of OpenAI's Responses."""
ROLE_OF_MESSAGE = {role: role for role in ("system", "developer", "user", "assistant", "tool", FUNCTION_CALL)}
ROLE_OF_SHAREGPT = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    FUNCTION_CALL: FUNCTION_CALL,
}


def read_messages(row: dict[str, Any], column: str, roles: Mapping[str, str]) -> list[Message]:
    """Return messages with `role` and `content`, after that of a column `system`. `roles` extends the known roles."""
    known = {**ROLE_OF_MESSAGE, **roles}
    return _after_system([_message(_object(turn, index), index, known) for index, turn in enumerate(_turns(row, column), 1)], row)


def read_sharegpt(row: dict[str, Any], roles: Mapping[str, str]) -> list[Message]:
    """Return the messages of the column `conversations` (turns with `from` and `value`, or messages), after that of a column `system`."""
    turns = [_object(turn, index) for index, turn in enumerate(_turns(row, "conversations"), 1)]
    if "role" in turns[0]:
        return read_messages(row, "conversations", roles)
    known = {**ROLE_OF_SHAREGPT, **roles}
    return _after_system([_message(_renamed_turn(turn), index, known) for index, turn in enumerate(turns, 1)], row)


def _after_system(messages: list[Message], row: dict[str, Any]) -> list[Message]:
    system: object = row.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        raise ColumnError("system", f"holds {kind_of(system)} instead of text")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise ColumnError("system", "differs from the first message of the conversation, which is from `system`")
    return messages


def read_tools(row: dict[str, Any]) -> list[Any] | None:
    """Return the list in the column `tools`, which may be JSON text; None if it is empty."""
    tools = _parsed_column(row, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ColumnError("tools", f"holds {kind_of(tools)} instead of a list")
    return without_nulls(cast(list[Any], tools))


def read_template_variables(row: dict[str, Any]) -> dict[str, Any]:
    """Return the object in the column `chat_template_kwargs` (as in TRL), which may be JSON text; {} if it is empty."""
    variables = _parsed_column(row, VARIABLES)
    if not variables:
        return {}
    if not isinstance(variables, dict):
        raise ColumnError(VARIABLES, f"holds {kind_of(variables)} instead of an object")
    reserved = next((name for name in RESERVED_VARIABLES if name in variables), None)
    if reserved is not None:
        raise ColumnError(VARIABLES, f"sets `{reserved}`, which is not a variable of chat templates")
    return without_nulls(cast(dict[str, Any], variables))


def _parsed_column(row: dict[str, Any], column: str) -> object:
    """Return the value of a column, parsed if it is JSON text; None for blank text."""
    value: object = row.get(column)
    if not isinstance(value, str):
        return value
    try:
        return parse_text(value) if value.strip() else None
    except ValueError as error:
        raise ColumnError(column, f"holds text that is not JSON: {error}") from error


def tool_names(tools: list[Any]) -> Iterator[str | None]:
    """Yield the name of each tool's function; None if it has none."""
    for tool in tools:
        described = cast(dict[str, Any], tool) if isinstance(tool, dict) else {}
        function: Any = described.get("function", described)
        name: Any = cast(dict[str, Any], function).get("name") if isinstance(function, dict) else None
        yield name if isinstance(name, str) else None


def check_tool_messages(messages: list[Message], tools: list[Any] | None) -> bool:
    """Check that results follow calls, and that `tools` defines every function that is called, if the row has tools.

    Return whether the row has calls and no tools. Raises: RowError.
    """
    defined = None if tools is None else set(tool_names(tools))
    has_calls = False
    for index, message in enumerate(messages, 1):
        before = messages[index - 2]["role"] if index > 1 else None
        if message["role"] == "tool" and before not in ("assistant", "tool"):
            where = f"follows a message from `{before}`" if before else "is the first message"
            raise RowError(f"message {index}: the result of a tool {where}; it must follow the assistant's call")
        for call in tool_calls(message):
            has_calls = True
            name: object = call.get("name")
            if name is not None and not isinstance(name, str):
                raise RowError(f"message {index}: the name of a called function holds {kind_of(name)} instead of text")
            if defined is not None and None not in defined and name not in defined:
                raise RowError(f"message {index} calls `{name}`, which `tools` does not define; add its schema to the row's `tools`")
    return has_calls and tools is None


def tool_calls(message: Message) -> Iterator[Message]:
    """Yield the calls of a message, each with `name` and `arguments`."""
    for call in cast(list[Message], message.get("tool_calls") or []):
        yield call["function"] if isinstance(call.get("function"), dict) else call


def take_training_mark(message: Message, index: int) -> bool | None:
    """Remove `train` and `weight` from a message and return what they mark: trained, not trained, or None without a mark."""
    marks = [_mark(name, message.pop(name), index) for name in ("train", "weight") if name in message]
    if len(set(marks)) > 1:
        raise RowError(f"message {index}: `train` and `weight` contradict each other")
    return marks[0] if marks else None


def without_nulls(value: Any) -> Any:
    """Return `value` without keys whose value is null: Arrow gives each struct of a column the keys of all structs."""
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in cast(dict[str, Any], value).items() if part is not None}
    if isinstance(value, list):
        return [without_nulls(part) for part in cast(list[Any], value)]
    return value


def _mark(name: str, value: object, index: int) -> bool:
    if value not in (0, 1) or (name == "train" and isinstance(value, float)):
        raise RowError(f"message {index}: `{name}` is {value!r}; it is {'true or false' if name == 'train' else '0 or 1'}")
    return bool(value)


def _turns(row: dict[str, Any], column: str) -> list[Any]:
    value: object = row.get(column)
    if not isinstance(value, list) or not value:
        raise ColumnError(column, f"holds {'an empty list' if value == [] else kind_of(cast(object, value))} instead of a list of messages")
    return cast(list[Any], value)


def _object(turn: object, index: int) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"message {index} is {kind_of(turn)} instead of an object")
    return without_nulls(cast(Message, turn))


def _renamed_turn(turn: Message) -> Message:
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return others | {"role": turn.get("from"), "content": turn.get("value")}


def _message(message: Message, index: int, roles: Mapping[str, str]) -> Message:
    spoken: object = message.get("role")
    role = roles.get(spoken) if isinstance(spoken, str) else None
    if role is None:
        raise RowError(f"message {index} has the unknown role `{spoken}`; known: {', '.join(roles)} (`data.roles` maps others)")
    content = message.get("content")
    if isinstance(content, list):
        content = _joined_parts(cast(list[Any], content), index)
    if role == FUNCTION_CALL:
        return message | {"role": "assistant", "content": "", "tool_calls": _function_calls(content, index)}
    calls = _tool_calls(message.pop("tool_calls", None), index)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise RowError(f"message {index}: `content` holds {kind_of(content)} instead of text")
    if role == "assistant" and not content.strip() and not calls:
        raise RowError(f"message {index}: the answer is empty; remove the message, or give it `content` or `tool_calls`")
    return message | {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})


def _joined_parts(parts: list[Any], index: int) -> str:
    texts: list[str] = []
    for number, part in enumerate(parts, 1):
        fields = cast(dict[str, Any], part) if isinstance(part, dict) else {}
        text: object = part if isinstance(part, str) else fields.get("text")
        kind = fields.get("type", "text")
        if not isinstance(text, str) or kind not in TEXT_PARTS:  # Arrow may give a part of another type an empty `text`
            what = f"of type `{kind}`" if isinstance(kind, str) and kind not in TEXT_PARTS else "not text"
            raise RowError(f"message {index}: part {number} of `content` is {what}; only text is supported, so leave such rows out")
        texts.append(text)
    return "".join(texts)


def _tool_calls(value: object, index: int) -> list[Any]:
    """Return the list of tool calls, which some data sets store as JSON text; [] for null or blank text."""
    if isinstance(value, str):
        value = None if not value.strip() else _json(value, f"message {index}: `tool_calls` holds text that is not JSON")
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in cast(list[Any], value)):
        raise RowError(f"message {index}: `tool_calls` holds {kind_of(cast(object, value))} instead of a list of objects")
    return without_nulls(cast(list[Any], value))


def _function_calls(content: object, index: int) -> list[Message]:
    """Return the calls of LLaMA-Factory's `function_call`, stored as the JSON of one object or of a list."""
    why = f"message {index}: a function call is JSON with `name` and `arguments`"
    value = _json(content, why) if isinstance(content, str) else content
    calls = cast(list[Any], value) if isinstance(value, list) else [value]
    if not calls or not all(_is_call(call) for call in calls):
        raise RowError(why)
    return [{"type": "function", "function": without_nulls(call)} for call in calls]


def _is_call(value: Any) -> bool:
    call = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    return isinstance(call.get("name"), str) and "arguments" in call


def _json(text: str, why: str) -> Any:
    try:
        return parse_text(text)
    except ValueError as error:
        raise RowError(f"{why}: {error}") from error
