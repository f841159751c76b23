"""Names in messages as the rows of several tools have them: of keys, roles, parts and calls."""

from __future__ import annotations

from typing import Any

from fsdp_tune.data.format.row_marks import MARKS, MEANING

Message = dict[str, Any]
FUNCTION_CALL = "function_call"
"""LLaMA-Factory's role for a function call as JSON text; converted to an assistant's message with
`tool_calls`. Also OpenAI's key of a message for one call."""
TOOL_CALL = "tool_call"
"""The same in ms-swift, where calls that are made together are messages in a row."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a part of `content`; the last two are those of OpenAI's Responses."""
USE_PART, RESULT_PART = "tool_use", "tool_result"
"""Anthropic's types of parts: a call in an answer, and its result in a message of the user."""
REASONING_PARTS, CALL_PARTS = ("reasoning", "thinking"), (TOOL_CALL, "tool_calls", USE_PART)
"""LLaMA-Factory's types of parts of an answer, next to text, and Anthropic's for a call."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message for its reasoning: text, or a list of parts as in axolotl."""
ROLES = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model", "bot"), "assistant"),
    **dict.fromkeys(
        ("tool", "function", "observation", "observations", "tool_response", "function_response", "ipython"),
        "tool",
    ),
    **dict.fromkeys((FUNCTION_CALL, TOOL_CALL), FUNCTION_CALL),
}
"""Roles in the rows of several tools, under `role` and under `from`, and what they are for chat templates."""
MESSAGE_KEYS = {
    "role": "",
    "from": "",
    "content": "",
    "value": "",
    "tool_calls": "calls of functions",
    FUNCTION_CALL: "a call of a function",
    "tool_call_id": "the id of a call",
    "name": "the name of the speaker or function",
    **dict.fromkeys(REASONING_NAMES, "reasoning"),
    **dict.fromkeys(MARKS, MEANING),
}
"""Keys of a message, and what they are read as where that is not their name."""
PAIRS = (("human", "assistant"), ("input", "output"))
"""Keys of a question and its answer in one object: of ms-swift, and of Capybara."""
PART_KEYS = {"type": "", "text": "", "value": "", "content": "", **dict.fromkeys(MARKS, MEANING)}
USE_KEYS = {"type": "", "id": "the id of a call", "name": "", "input": "the arguments of a call"}
RESULT_KEYS = {
    "type": "",
    "tool_use_id": "the id of a call",
    "content": "the result of a call",
    **dict.fromkeys(MARKS, MEANING),
}
REASONING_KEYS = PART_KEYS | dict.fromkeys(REASONING_PARTS, "reasoning")
FUNCTION_KEYS = {"name": "", "arguments": ""}
CALL_KEYS = {"id": "", "type": "", "function": "", **FUNCTION_KEYS}
