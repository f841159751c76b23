"""Rows of six formats to one of three forms: joined text, a chat, or token ids, each part trained or not."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fsdp_tune.data.json_rows import kind_of
from fsdp_tune.data.store import IGNORE_INDEX

COLUMNS = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "tokenized": ("input_ids",),
}
"""The columns that a format needs, and by which it is found."""
LOSS_ON = {
    "text": ("all",),
    "prompt_completion": ("completion", "all"),
    "alpaca": ("completion", "all"),
    "messages": ("assistant", "last_assistant", "all"),
    "sharegpt": ("assistant", "last_assistant", "all"),
    "tokenized": ("labels",),
}
"""What can be trained in each format; the first is what `auto` means."""

ROLES = ("system", "developer", "user", "assistant", "tool")
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
}

# Stanford Alpaca's two prompts, letter by letter: github.com/tatsu-lab/stanford_alpaca, train.py, PROMPT_DICT.
STANFORD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
STANFORD_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


class RowError(ValueError):
    """One row that cannot be used; its text is the reason. The caller knows file and line."""


class _ColumnError(Exception):
    """What is wrong with a column, until its name in the file is known."""

    def __init__(self, column: str, what: str) -> None:
        super().__init__(column, what)
        self.column, self.what = column, what


@dataclass(frozen=True, slots=True)
class Text:
    """`prompt` + `completion`, joined as they are; the completion is trained, the prompt where `train_prompt`."""

    prompt: str
    completion: str
    train_prompt: bool
    fixed_prompt: bool = False
    """Ours, so that nobody has to ask whether white space is missing at its end."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[dict[str, Any]]
    trained: tuple[bool, ...] | None
    """Per message; None = every token of the conversation."""
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Ids:
    input_ids: list[int]
    trained: list[bool]


Example = Text | Chat | Ids


@dataclass(frozen=True, slots=True)
class Settings:
    """How the rows of one source become examples; decided once, with nothing left `auto`."""

    format: str
    loss_on: str
    """all | completion | assistant | last_assistant"""
    template: str | None
    separator: str
    append_eos: bool
    vocabulary_size: int
    names_in_file: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of columns that the recipe renames: people look for the old name in their file."""

    def example(self, row: dict[str, Any]) -> Example:
        """RowError when the row does not hold what the format needs."""
        try:
            return self._example(row)
        except _ColumnError as error:
            raise RowError(f"column `{self.names_in_file.get(error.column, error.column)}` {error.what}") from error

    def _example(self, row: dict[str, Any]) -> Example:
        match self.format:
            case "text":
                return Text("", _text(row, "text"), train_prompt=False)
            case "prompt_completion":
                return self._prompt_completion(row)
            case "alpaca":
                return self._alpaca(row)
            case "messages":
                return self._chat(_messages(row, "messages"), row)
            case "sharegpt":
                return self._chat(_sharegpt(row), row)
            case _:
                return self._ids(row)

    def _prompt_completion(self, row: dict[str, Any]) -> Text | Chat:
        if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):  # both are chats, as in TRL
            asked, answered = _messages(row, "prompt"), _messages(row, "completion")
            trained = tuple(message["role"] == "assistant" for message in answered)
            return self._checked_chat([*asked, *answered], (*(False for _ in asked), *trained), row)
        completion = _text(row, "completion")
        if not completion.strip():
            raise RowError("the completion is empty")
        return Text(_text(row, "prompt") + self.separator, completion, train_prompt=self.loss_on == "all")

    def _alpaca(self, row: dict[str, Any]) -> Text | Chat:
        instruction, output = _text(row, "instruction"), _text(row, "output")
        more = _text(row, "input") if row.get("input") is not None else ""
        if not output.strip():
            raise RowError("the output is empty")
        if self.template is not None:
            question = f"{instruction}\n\n{more}" if more else instruction
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
            return Chat(messages, None if self.loss_on == "all" else (False, True))
        prompt = STANFORD_WITH_INPUT if more else STANFORD_WITHOUT_INPUT
        filled = prompt.format_map({"instruction": instruction, "input": more})
        return Text(filled, output, train_prompt=self.loss_on == "all", fixed_prompt=True)

    def _chat(self, messages: list[dict[str, Any]], row: dict[str, Any]) -> Chat:
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        wanted = answers[-1:] if self.loss_on == "last_assistant" else answers
        trained = tuple(index in wanted and messages[index].get("weight", 1) != 0 for index in range(len(messages)))
        return self._checked_chat(messages, trained, row)

    def _checked_chat(self, messages: list[dict[str, Any]], trained: tuple[bool, ...], row: dict[str, Any]) -> Chat:
        if messages[-1]["role"] != "assistant":
            raise RowError(f"the last message is from `{messages[-1]['role']}`: there is no answer to learn")
        tools = row.get("tools")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise _ColumnError("tools", f"holds text that is no JSON: {error}") from error
        return Chat(messages, None if self.loss_on == "all" else trained, tools or None)

    def _ids(self, row: dict[str, Any]) -> Ids:
        ids = _numbers(row, "input_ids")
        outside = next((number for number in ids if not 0 <= number < self.vocabulary_size), None)
        if outside is not None:
            raise _ColumnError("input_ids", f"holds {outside}, and the tokenizer has {self.vocabulary_size} tokens")
        if not all(_numbers(row, "attention_mask", len(ids)) if row.get("attention_mask") is not None else ()):
            raise _ColumnError("attention_mask", "holds zeros: leave the padding out of `input_ids`")
        for column in ("completion_mask", "assistant_masks"):
            if row.get(column) is not None:
                return Ids(ids, [mask != 0 for mask in _numbers(row, column, len(ids))])
        if row.get("labels") is None:
            return Ids(ids, [True] * len(ids))
        labels = _numbers(row, "labels", len(ids))
        wrong = next((at for at, label in enumerate(labels) if label not in (IGNORE_INDEX, ids[at])), None)
        if wrong is not None:
            raise _ColumnError(
                "labels",
                f"holds {labels[wrong]} at position {wrong} where `input_ids` holds {ids[wrong]}: "
                "labels are the same ids, or -100 where not trained, and not shifted",
            )
        return Ids(ids, [label != IGNORE_INDEX for label in labels])


def matching_formats(columns: Collection[str]) -> list[str]:
    return [name for name, needed in COLUMNS.items() if all(column in columns for column in needed)]


def _text(row: dict[str, Any], column: str) -> str:
    if column not in row:
        raise RowError(f"it has no column `{column}`")
    value = row[column]
    if not isinstance(value, str):
        raise _ColumnError(column, f"holds {kind_of(value)} and not text")
    return value


def _numbers(row: dict[str, Any], column: str, length: int | None = None) -> list[int]:
    value: object = row.get(column)
    if not isinstance(value, list):
        raise _ColumnError(column, f"holds {kind_of(value)} and not a list of whole numbers")
    numbers = cast(list[Any], value)
    wrong = next((at for at, number in enumerate(numbers) if type(number) is not int), None)
    if wrong is not None:
        raise _ColumnError(column, f"holds {kind_of(numbers[wrong])} at position {wrong}: it takes whole numbers alone")
    if length is not None and len(numbers) != length:
        raise _ColumnError(column, f"holds {len(numbers)} numbers, and `input_ids` {length}")
    return numbers


def _turns(row: dict[str, Any], column: str) -> list[Any]:
    value: object = row.get(column)
    if not isinstance(value, list) or not value:
        raise _ColumnError(column, f"holds {'an empty list' if value == [] else kind_of(cast(object, value))} and not a list of messages")
    return cast(list[Any], value)


def _messages(row: dict[str, Any], column: str) -> list[dict[str, Any]]:
    return [_message(message, index) for index, message in enumerate(_turns(row, column), 1)]


def _message(value: object, index: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"message {index} is {kind_of(value)} and not an object")
    message = {key: part for key, part in cast(dict[str, Any], value).items() if part is not None}  # Arrow fills gaps with null
    role = message.get("role")
    if role not in ROLES:
        raise RowError(f"message {index} has the unknown role `{role}`; known: {', '.join(ROLES)}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return message | {"content": ""}
    if isinstance(content, list):
        content = _joined_parts(cast(list[Any], content), index)
    if not isinstance(content, str):
        raise RowError(f"message {index}: `content` holds {kind_of(content)} and not text")
    if role == "assistant" and not content.strip() and not message.get("tool_calls"):
        raise RowError(f"message {index}: the answer is empty")
    return message | {"content": content}


def _joined_parts(parts: list[Any], index: int) -> str:
    texts: list[str] = []
    for part in parts:
        text = cast(dict[str, Any], part).get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RowError(f"message {index}: a part of its content is not text (images and sound are not trained here)")
        texts.append(text)
    return "".join(texts)


def _sharegpt(row: dict[str, Any]) -> list[dict[str, Any]]:
    turns = _turns(row, "conversations")
    if isinstance(turns[0], dict) and "role" in turns[0]:
        return _messages(row, "conversations")
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise RowError(f"message {index} is {kind_of(turn)} and not an object")
        speaker, text = cast(dict[str, Any], turn).get("from"), cast(dict[str, Any], turn).get("value")
        if speaker not in ROLE_OF_SHAREGPT:
            raise RowError(f"message {index} is from the unknown speaker `{speaker}`; known: {', '.join(ROLE_OF_SHAREGPT)}")
        messages.append(_message({"role": ROLE_OF_SHAREGPT[speaker], "content": text}, index))
    system = row.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages
