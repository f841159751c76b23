"""Convert rows of six formats to one of three forms, joined text, a chat or token ids, with a trained flag for each part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fsdp_tune.data.format.conversations import (
    Message,
    check_tool_messages,
    read_messages,
    read_sharegpt,
    read_template_variables,
    read_tools,
    take_training_mark,
)
from fsdp_tune.data.notes import Note
from fsdp_tune.data.read.json_rows import ColumnError, RowError, kind_of
from fsdp_tune.data.store import IGNORE_INDEX

COLUMNS = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "tokenized": ("input_ids",),
}
"""The columns that each format needs; `format: auto` detects a format by them."""
LOSS_ON = {
    "text": ("all",),
    "prompt_completion": ("completion", "all"),
    "alpaca": ("completion", "all"),
    "messages": ("assistant", "last_assistant", "all"),
    "sharegpt": ("assistant", "last_assistant", "all"),
    "tokenized": ("labels",),
}
"""The possible values of `loss_on` for each format; `auto` selects the first."""

# Stanford Alpaca's two prompts, verbatim: github.com/tatsu-lab/stanford_alpaca, train.py, PROMPT_DICT.
STANFORD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
STANFORD_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


@dataclass(frozen=True, slots=True)
class Text:
    """`prompt` and `completion`, to be concatenated unchanged; the completion is trained, the prompt only with `train_prompt`."""

    prompt: str
    completion: str
    train_prompt: bool
    fixed_prompt: bool = False
    """The prompt is one of the package's own, so missing white space at its end is not reported."""


@dataclass(frozen=True, slots=True)
class Chat:
    messages: list[Message]
    trained: tuple[bool, ...] | None
    """One flag per message; None = every token of the conversation is trained."""
    tools: list[Any] | None = None
    variables: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values for variables of the chat template, such as `enable_thinking`."""
    notes: tuple[Note, ...] = field(default=(), repr=False, compare=False)
    """Parts of the row that were dropped or had no effect. Excluded from `repr` and comparison."""


@dataclass(frozen=True, slots=True)
class Ids:
    input_ids: list[int]
    trained: list[bool]


Example = Text | Chat | Ids


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """Settings for converting the rows of one source to examples, with every `auto` resolved."""

    format: str
    loss_on: str
    """all | completion | assistant | last_assistant"""
    template: str | None
    separator: str
    append_eos: bool
    vocabulary_size: int
    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    """`data.roles`: maps roles in the rows to roles of chat templates."""
    special_tokens: str = "auto"
    """`data.special_tokens_in_content`: auto | text | control"""
    names_in_file: Mapping[str, str] = field(default_factory=dict[str, str])
    """Original name of each renamed column, for messages about the user's file."""
    template_key: str = "data.chat_template"
    """The key that sets the template, for hints."""

    def example(self, row: dict[str, Any]) -> Example:
        """Convert a row. Raises: RowError if the row does not fit the format."""
        try:
            return self._example(row)
        except ColumnError as error:
            raise RowError(f"column `{self.names_in_file.get(error.column, error.column)}` {error.what}") from error

    def encodes_special_tokens_as_text(self, example: Example) -> bool:
        """Return whether a special token in the content is encoded as ordinary text; by default where a template surrounds the content."""
        if self.special_tokens == "auto":
            return isinstance(example, Chat) or self.format == "alpaca"
        return self.special_tokens == "text"

    def _example(self, row: dict[str, Any]) -> Example:
        match self.format:
            case "text":
                return Text("", _text(row, "text"), train_prompt=False)
            case "prompt_completion":
                return self._prompt_completion(row)
            case "alpaca":
                return self._alpaca(row)
            case "messages":
                return self._chat(read_messages(row, "messages", self.roles), row)
            case "sharegpt":
                return self._chat(read_sharegpt(row, self.roles), row)
            case _:
                return self._ids(row)

    def _prompt_completion(self, row: dict[str, Any]) -> Text | Chat:
        if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):  # both are chats, as in TRL
            prompt = read_messages(row, "prompt", self.roles)
            completion = read_messages(row | {"system": None}, "completion", self.roles)
            return self._chat([*prompt, *completion], row, first_answer=len(prompt))
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

    def _chat(self, messages: list[Message], row: dict[str, Any], first_answer: int = 0) -> Chat:
        """Answers before message `first_answer` are context. Messages after the last answer are dropped unless all is trained."""
        marks = [take_training_mark(message, index) for index, message in enumerate(messages, 1)]
        answers = [index for index in range(first_answer, len(messages)) if messages[index]["role"] == "assistant"]
        if not answers:
            raise RowError("no message is from the assistant: there is no answer to train on")
        tools = read_tools(row)
        variables = read_template_variables(row)
        lacks_tools = check_tool_messages(messages, tools)
        if self.loss_on == "all":
            if False in marks:
                raise RowError(f"message {marks.index(False) + 1} is marked as not trained, and `loss_on: all` trains every message")
            return Chat(messages, None, tools, variables)
        wanted = answers[-1:] if self.loss_on == "last_assistant" else answers
        kept = messages[: answers[-1] + 1]
        trained = tuple(index in wanted and marks[index] is not False for index in range(len(kept)))
        notes = [Note("mark-without-effect", f"`{messages[at]['role']}`") for at, mark in enumerate(marks) if mark and at not in wanted]
        if lacks_tools:
            notes.append(Note("tools-missing", "tool calls"))
        if len(kept) < len(messages):
            notes.append(Note("unanswered-turns", f"`{messages[-1]['role']}`"))
        return Chat(kept, trained, tools, variables, tuple(dict.fromkeys(notes)))

    def _ids(self, row: dict[str, Any]) -> Ids:
        ids = _numbers(row, "input_ids")
        outside = next((number for number in ids if not 0 <= number < self.vocabulary_size), None)
        if outside is not None:
            raise ColumnError("input_ids", f"holds {outside}, and the tokenizer has {self.vocabulary_size} tokens")
        if not all(_numbers(row, "attention_mask", len(ids)) if row.get("attention_mask") is not None else ()):
            raise ColumnError("attention_mask", "holds zeros: leave the padding out of `input_ids`")
        for column in ("completion_mask", "assistant_masks"):
            if row.get(column) is not None:
                return Ids(ids, [mask != 0 for mask in _numbers(row, column, len(ids))])
        if row.get("labels") is None:
            return Ids(ids, [True] * len(ids))
        labels = _numbers(row, "labels", len(ids))
        wrong = next((at for at, label in enumerate(labels) if label not in (IGNORE_INDEX, ids[at])), None)
        if wrong is not None:
            raise ColumnError(
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
        raise ColumnError(column, f"holds {kind_of(value)} instead of text")
    return value


def _numbers(row: dict[str, Any], column: str, length: int | None = None) -> list[int]:
    value: object = row.get(column)
    if not isinstance(value, list):
        raise ColumnError(column, f"holds {kind_of(value)} instead of a list of whole numbers")
    numbers = cast(list[Any], value)
    wrong = next((at for at, number in enumerate(numbers) if type(number) is not int), None)
    if wrong is not None:
        raise ColumnError(column, f"holds {kind_of(numbers[wrong])} at position {wrong}: all entries must be whole numbers")
    if length is not None and len(numbers) != length:
        raise ColumnError(column, f"holds {len(numbers)} numbers, and `input_ids` holds {length}")
    return numbers
