"""Columns of a chat next to its messages: the system message, functions and variables of the template."""

from __future__ import annotations

from typing import Any, cast

from fsdp_tune.data.format.message_keys import Message
from fsdp_tune.data.read.row_files import ColumnError, kind_of, parse_text

FUNCTIONS = "functions"
"""OpenAI's older column for `tools`."""
VARIABLES, THINKING = "chat_template_kwargs", "enable_thinking"
RESERVED_VARIABLES = (
    "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict",  # noqa: E501
    "return_assistant_tokens_mask",
)  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that the package sets."""
CHAT_KEYS = {
    "system": "the system message",
    "tools": "functions",
    FUNCTIONS: "functions",
    VARIABLES: "variables of the chat template",
    THINKING: "a variable of the chat template",
}
"""Columns of a chat next to its messages."""


def after_system(messages: list[Message], row: dict[str, object]) -> list[Message]:
    """Return the messages after that of the column `system`, if the row has one."""
    system: object = row.get("system")
    if not system:
        return messages
    if not isinstance(system, str):
        raise ColumnError("system", f"holds {kind_of(system)} instead of text")
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise ColumnError(
            "system", "differs from the first message of the conversation, which is from `system`"
        )
    return messages


def read_template_variables(row: dict[str, object]) -> dict[str, object]:
    """Return the object in the column `chat_template_kwargs` (as in TRL), which may be JSON text; {} if it is
    empty."""
    variables = parsed_column(row, VARIABLES)
    thinking: object = row.get(THINKING)
    if thinking is not None and not isinstance(thinking, bool):
        raise ColumnError(THINKING, f"holds {kind_of(thinking)} instead of true or false")
    switched: dict[str, object] = {} if thinking is None else {THINKING: thinking}
    if not variables:
        return switched
    if not isinstance(variables, dict):
        raise ColumnError(VARIABLES, f"holds {kind_of(variables)} instead of an object")
    reserved = next((name for name in RESERVED_VARIABLES if name in variables), None)
    if reserved is not None:
        raise ColumnError(VARIABLES, f"sets `{reserved}`, which is not a variable of chat templates")
    if switched and cast(dict[str, object], variables).get(THINKING) not in (None, thinking):
        raise ColumnError(THINKING, f"and `{VARIABLES}` set it differently")
    return switched | without_nulls(cast(dict[str, object], variables))


def parsed_column(row: dict[str, object], column: str) -> object:
    """Return the value of a column, parsed if it is JSON text; None for blank text."""
    value: object = row.get(column)
    if not isinstance(value, str):
        return value
    try:
        return parse_text(value) if value.strip() else None
    except ValueError as error:
        raise ColumnError(column, f"holds text that is not JSON: {error}") from error


def without_nulls(value: object) -> Any:
    """Return `value` without keys whose value is null: Arrow gives each struct of a column the keys of all
    structs."""
    if isinstance(value, dict):
        return {
            key: without_nulls(part)
            for key, part in cast(dict[str, object], value).items()
            if part is not None
        }
    if isinstance(value, list):
        return [without_nulls(part) for part in cast(list[object], value)]
    return value
