"""Functions of a row (its column `tools`), and what its messages say of them: calls and results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from fsdp_tune.data.format.chat_columns import FUNCTIONS, parsed_column, without_nulls
from fsdp_tune.data.format.message_keys import Message
from fsdp_tune.data.read.row_files import ColumnError, RowError, kind_of, parse_text


def read_tools(row: dict[str, object]) -> list[object] | None:
    """Return the list in the column `tools`, which may be JSON text, or the functions of OpenAI's older
    format; None if it is empty."""
    tools, functions = parsed_column(row, "tools"), parsed_column(row, FUNCTIONS)
    if tools and functions:
        raise ColumnError(FUNCTIONS, "means the same as the column `tools`; remove one of them")
    if isinstance(functions, list):
        tools = [{"type": "function", "function": function} for function in cast(list[object], functions)]
    elif functions:
        raise ColumnError(FUNCTIONS, f"holds {kind_of(functions)} instead of a list")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ColumnError("tools", f"holds {kind_of(tools)} instead of a list")
    column = FUNCTIONS if functions else "tools"
    return without_nulls(
        [_read_tool(tool, column, number) for number, tool in enumerate(cast(list[object], tools), 1)]
    )


def _read_tool(value: object, column: str, number: int) -> Message:
    """Return tool `number` of a column as an object. It, its function and its parameters may be JSON text, as
    Arrow's columns require."""
    tool = _parsed_object(value)
    function = (
        tool if tool is None or "function" not in tool else _parsed_object(cast(object, tool["function"]))
    )
    parameters: object = None if function is None else function.get("parameters")
    is_text = isinstance(parameters, str) and bool(parameters.strip())
    schema = _parsed_object(parameters) if is_text else None
    if tool is None or function is None or (is_text and schema is None):
        raise ColumnError(
            column,
            f"holds at position {number} something other than a function, as an object or its JSON text",
        )
    function = function | {"parameters": schema} if is_text else function
    if "input_schema" in function and "parameters" not in function:  # Anthropic's
        renamed = {"parameters" if key == "input_schema" else key: part for key, part in function.items()}
        return {"type": "function", "function": renamed}
    return tool | {"function": function} if "function" in tool else function


def _parsed_object(value: object) -> Message | None:
    """Return an object, or the object whose JSON text `value` is; None if it is something else."""
    if isinstance(value, str):
        try:
            value = cast(object, parse_text(value))
        except ValueError:
            return None
    return cast(Message, value) if isinstance(value, dict) else None


def tool_names(tools: list[object]) -> Iterator[str | None]:
    """Yield the name of each tool's function; None if it has none."""
    for tool in tools:
        described = cast(dict[str, object], tool) if isinstance(tool, dict) else {}
        function: object = described.get("function", described)
        name: object = cast(dict[str, object], function).get("name") if isinstance(function, dict) else None
        yield name if isinstance(name, str) else None


def check_tool_messages(messages: list[Message], tools: list[object] | None) -> bool:
    """Check that results follow calls, and that `tools` defines every function that is called, if the row has
    tools.

    Return whether the row has calls and no tools. Raises: RowError.
    """
    defined = None if tools is None else set(tool_names(tools))
    has_calls = False
    for index, message in enumerate(messages, 1):
        before = messages[index - 2]["role"] if index > 1 else None
        if message["role"] == "tool" and before not in ("assistant", "tool"):
            where = f"follows a message from `{before}`" if before else "is the first message"
            raise RowError(
                f"message {index}: the result of a tool {where}; it must follow the assistant's call"
            )
        for call in tool_calls(message):
            has_calls = True
            name: object = call.get("name")
            if name is not None and not isinstance(name, str):
                raise RowError(
                    f"message {index}: the name of a called function holds {kind_of(name)} instead of text"
                )
            if defined is not None and None not in defined and name not in defined:
                raise RowError(
                    f"message {index} calls `{name}`, which `tools` does not define; add its schema "
                    "to the row's `tools`"
                )
    return has_calls and tools is None


def odd_arguments(messages: list[Message]) -> Iterator[str]:
    """Yield what the arguments of each call are that are neither an object nor its JSON text: a template
    writes them as they are."""
    for message in messages:
        for call in tool_calls(message):
            given: object = call.get("arguments")
            if isinstance(given, str):
                try:
                    parsed: object = parse_text(given)
                except ValueError:
                    yield "text that is not JSON"
                    continue
                if not isinstance(parsed, dict):
                    yield f"JSON text of {kind_of(parsed)}"
            elif given is not None and not isinstance(given, dict):
                yield kind_of(given)


def tool_calls(message: Message) -> Iterator[Message]:
    """Yield the calls of a message, each with `name` and `arguments`."""
    for call in cast(list[Message], message.get("tool_calls") or []):
        yield call["function"] if isinstance(call.get("function"), dict) else call
