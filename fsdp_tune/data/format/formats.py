"""Convert rows of seven formats to joined text, a chat or token ids, with a trained flag for each part."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from fsdp_tune.data.format.chat_columns import CHAT_KEYS, after_system, parsed_column, read_template_variables
from fsdp_tune.data.format.conversations import MessageReader
from fsdp_tune.data.format.message_keys import Message
from fsdp_tune.data.format.row_account import METADATA, PACKED, KeyUse, RowAccount, names_variable
from fsdp_tune.data.format.row_marks import MARKS, MEANING, TOKEN_MASKS, read_token_mask, take_mark
from fsdp_tune.data.format.row_notes import Note
from fsdp_tune.data.format.tools import check_tool_messages, odd_arguments, read_tools
from fsdp_tune.data.read.row_files import ColumnError, RowError, kind_of
from fsdp_tune.data.store import IGNORE_INDEX
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS

TOKENIZED_KEYS = {
    "input_ids": "",
    "labels": "what is trained",
    **dict.fromkeys(TOKEN_MASKS, "what is trained"),
    "attention_mask": "padding, of which there is none",
    "position_ids": "positions from 0, one example a row",
    "seq_lengths": "the length of the only example",
    "token_type_ids": "one type of token",
}
SEGMENT_KEYS = {"text": "", "label": "what is trained"}

# Stanford Alpaca's two prompts, verbatim: github.com/tatsu-lab/stanford_alpaca, train.py, PROMPT_DICT.
STANFORD_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
STANFORD_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


@dataclass(frozen=True, slots=True)
class Text:
    """`prompt` and `completion`, to be concatenated unchanged; the completion is trained, the prompt only
    with `train_prompt`."""

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
    tools: list[object] | None = None
    variables: dict[str, object] = field(default_factory=dict[str, object])
    """Values for variables of the chat template, such as `enable_thinking`."""
    notes: tuple[Note, ...] = field(default=(), repr=False, compare=False)
    """Parts of the row that were dropped or had no effect. Excluded from `repr` and comparison."""


@dataclass(frozen=True, slots=True)
class Ids:
    input_ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Texts to be concatenated unchanged, each with whether it is trained; neighbours differ in that."""

    texts: list[tuple[str, bool]]


Example = Text | Chat | LabelledText | Ids
NOTHING_TRAINED = Ids([], [])
"""A row that its mark excludes: it is counted among those without a token to train."""


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
    ignored: tuple[str, ...] = ()
    """`data.ignore_columns`"""
    other_columns: tuple[str, ...] = ()
    """Columns of another format, which the recipe has not chosen for rows that fit both."""

    def example(self, row: dict[str, object], uses: set[KeyUse] | None = None) -> Example:
        """Convert a row, and add how each of its keys is used to `uses`. Raises: RowError if the row does not
        fit the format."""
        account = RowAccount(self.ignored)
        template = self.template if ROW_FORMATS[self.format].holds == "chat" else None
        try:
            example = self._example(row, account)
        except ColumnError as error:
            account.finish(self.format, template)
            raise RowError(
                f"column `{self.names_in_file.get(error.column, error.column)}` {error.what}", hint=error.hint
            ) from error
        except RowError:
            account.finish(self.format, template)
            raise
        account.finish(self.format, template)
        if uses is not None:
            uses.update(account.uses)
        return NOTHING_TRAINED if self._is_left_out(row) else example

    def _is_left_out(self, row: dict[str, object]) -> bool:
        """Return whether a mark of the row excludes it. Raises: RowError if a mark is neither trained nor
        not."""
        names = [
            name
            for name in MARKS
            if row.get(name) is not None and not (self.format == "tokenized" and name in TOKENIZED_KEYS)
        ]
        given = {self.names_in_file.get(name, name): row[name] for name in names}
        marks = {name: value for name, value in given.items() if name not in self.ignored}
        return take_mark(marks, list(marks), "", "", self.ignored) is False

    def encodes_special_tokens_as_text(self, example: Example) -> bool:
        """Return whether a special token in the content is encoded as ordinary text; by default where a
        template surrounds the content."""
        if self.special_tokens == "auto":
            return isinstance(example, Chat) or ROW_FORMATS[self.format].surrounds is not None
        return self.special_tokens == "text"

    def _example(self, row: dict[str, object], account: RowAccount) -> Example:
        match self.format:
            case "text":
                return Text("", _text(self._read(row, account, {"text": ""}), "text"), train_prompt=False)
            case "prompt_completion":
                return self._prompt_completion(row, account)
            case "alpaca":
                return self._alpaca(row, account)
            case "messages" | "sharegpt":
                (column,) = needed_columns(self.format, row)
                row = self._read(row, account, {column: "", **CHAT_KEYS})
                return self._chat(self._messages(account).read(row, column), row)
            case "segments":
                return LabelledText(self._segments(self._read(row, account, {"segments": ""}), account))
            case "tokenized":
                return self._ids(self._read(row, account, TOKENIZED_KEYS))
            case _:
                raise AssertionError(f"rows of the format {self.format} are not read")

    def _read(
        self, row: dict[str, object], account: RowAccount, known: Mapping[str, str]
    ) -> dict[str, object]:
        """Return the row without the columns that are not read."""
        known = dict.fromkeys(MARKS, MEANING) | dict(known)
        return account.close(
            row, known, metadata=METADATA, names=self.names_in_file, other=self.other_columns
        )

    def _messages(self, account: RowAccount) -> MessageReader:
        return MessageReader(account, self.roles, self.template, self.names_in_file)

    def _prompt_completion(self, row: dict[str, object], account: RowAccount) -> Text | Chat:
        known = {"prompt": "", "completion": ""}
        if isinstance(row.get("completion"), dict):  # one message, as the better answers of LLaMA-Factory
            row = row | {"completion": [row["completion"]]}
        # the answer's text, as in Nemotron
        if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), str):
            row = row | {"completion": [{"role": "assistant", "content": row["completion"]}]}
        kinds = [isinstance(row.get(column), list) for column in known]
        if kinds in ([True, False], [False, True]):
            hint = (
                'write both as messages: `[{"role": "user", "content": …}]` and `[{"role": "assistant", '
                '"content": …}]`'
            )
            raise RowError("`prompt` and `completion` must both be text, or both messages", hint=hint)
        if all(kinds):  # both are chats, as in TRL
            row = self._read(row, account, known | CHAT_KEYS)
            prompt = self._messages(account).read(row, "prompt")
            completion = self._messages(account).read(row | {"system": None}, "completion")
            return self._chat([*prompt, *completion], row, first_answer=len(prompt))
        row = self._read(row, account, known)
        completion = _text(row, "completion")
        if not completion.strip():
            raise RowError("the completion is empty")
        return Text(_text(row, "prompt") + self.separator, completion, train_prompt=self.loss_on == "all")

    def _segments(self, row: dict[str, object], account: RowAccount) -> list[tuple[str, bool]]:
        """Return the texts of axolotl's `input_output` format; neighbours with the same label are one."""
        name = self.names_in_file.get("segments", "segments")
        segments: object = row.get("segments")
        if not isinstance(segments, list) or not segments:
            kind = "an empty list" if segments == [] else kind_of(cast(object, segments))
            raise ColumnError(
                "segments", f"holds {kind} instead of a list of objects with `text` and `label`"
            )
        found: list[tuple[str, bool]] = []
        for number, segment in enumerate(cast(list[object], segments), 1):
            if not isinstance(segment, dict):
                raise RowError(
                    f"segment {number} is {kind_of(segment)} instead of an object with `text` and `label`"
                )
            closed = account.close(cast(dict[str, object], segment), SEGMENT_KEYS, path=f"{name}.")
            text, label = closed.get("text"), closed.get("label")
            if not isinstance(text, str) or label not in (0, 1) or isinstance(label, float):
                raise RowError(
                    f"segment {number}: `text` is text and `label` true or false; they are "
                    f"{kind_of(text)} and {label!r}"
                )
            if found and found[-1][1] == bool(label):
                text = found.pop()[0] + text
            found.append((text, bool(label)))
        return found

    def _alpaca(self, row: dict[str, Any], account: RowAccount) -> Text | Chat:
        question, answer = needed_columns("alpaca", row)
        known = {question: "", answer: ""} | ({"input": ""} if question == "instruction" else {})
        more_keys = CHAT_KEYS | {"history": "earlier turns"}
        row = self._read(row, account, known | more_keys)
        instruction, output = _text(row, question), _text(row, answer)
        more = _text(row, "input") if row.get("input") is not None else ""
        if not output.strip():
            raise RowError(f"the {answer} is empty")
        if self.template is not None:
            asked = f"{instruction}\n\n{more}" if more else instruction
            messages = [
                *_earlier_turns(row),
                {"role": "user", "content": asked},
                {"role": "assistant", "content": output},
            ]
            return self._chat(after_system(messages, row), row)
        for column in more_keys:
            if row.get(column) not in (None, "", [], {}):
                hint = (
                    f"set `{self.template_key}`, for example to `plain`; `fsdp-tune templates` lists the "
                    "bundled ones"
                )
                raise ColumnError(column, "needs a chat template, and the tokenizer has none", hint=hint)
        prompt = STANFORD_WITH_INPUT if more else STANFORD_WITHOUT_INPUT
        filled = prompt.format_map({"instruction": instruction, "input": more})
        return Text(filled + self.separator, output, train_prompt=self.loss_on == "all", fixed_prompt=True)

    def _chat(self, messages: list[Message], row: dict[str, object], first_answer: int = 0) -> Chat:
        """Answers before message `first_answer` are context. Messages after the last answer are dropped
        unless all is trained."""
        marks: list[bool | None] = [message.pop("train", None) for message in messages]
        answers = [
            index for index in range(first_answer, len(messages)) if messages[index]["role"] == "assistant"
        ]
        if not answers:
            raise RowError("no message is from the assistant: there is no answer to train on")
        tools = read_tools(row)
        variables = read_template_variables(row)
        lacks_tools = check_tool_messages(messages, tools)
        found = [Note("tools-missing", "tool calls")] if lacks_tools else []
        found += [Note("arguments-not-an-object", each) for each in odd_arguments(messages)]
        found += self._unread_variables(variables)
        if self.loss_on == "all":
            if False in marks:
                raise RowError(
                    f"message {marks.index(False) + 1} is marked as not trained, and `loss_on: all` "
                    "trains every message"
                )
            return Chat(messages, None, tools, variables, tuple(dict.fromkeys(found)))
        wanted = answers[-1:] if self.loss_on == "last_assistant" else answers
        kept = messages[: answers[-1] + 1]
        trained = tuple(index in wanted and marks[index] is not False for index in range(len(kept)))
        notes = [
            Note("mark-without-effect", f"`{messages[at]['role']}`")
            for at, mark in enumerate(marks)
            if mark and at not in wanted
        ]
        notes += found
        if len(kept) < len(messages):
            notes.append(Note("unanswered-turns", f"`{messages[-1]['role']}`"))
        return Chat(kept, trained, tools, variables, tuple(dict.fromkeys(notes)))

    def _unread_variables(self, variables: Mapping[str, object]) -> tuple[Note, ...]:
        """Return a note for each variable that the chat template does not have."""
        template = self.template or ""
        return tuple(
            Note("not-rendered", f"variable `{name}`")
            for name in variables
            if not names_variable(template, name)
        )

    def _ids(self, row: dict[str, object]) -> Ids:
        ids = _numbers(row, "input_ids")
        outside = next((number for number in ids if not 0 <= number < self.vocabulary_size), None)
        if outside is not None:
            raise ColumnError(
                "input_ids", f"holds {outside}, and the tokenizer has {self.vocabulary_size} tokens"
            )
        _check_one_example(row, len(ids))
        trained = [True] * len(ids)
        for column in TOKEN_MASKS:
            if row.get(column) is not None:  # a token is trained if all masks and labels select it, as in TRL
                trained = [
                    one and other
                    for one, other in zip(
                        trained, read_token_mask(column, row[column], len(ids)), strict=True
                    )
                ]
        if row.get("labels") is None:
            return Ids(ids, trained)
        labels = _numbers(row, "labels", len(ids))
        wrong = next((at for at, label in enumerate(labels) if label not in (IGNORE_INDEX, ids[at])), None)
        if wrong is not None:
            raise ColumnError(
                "labels",
                f"holds {labels[wrong]} at position {wrong} where `input_ids` holds {ids[wrong]}: "
                "labels are the same ids, or -100 where not trained, and not shifted",
            )
        return Ids(ids, [mask and label != IGNORE_INDEX for mask, label in zip(trained, labels, strict=True)])


def matching_formats(columns: Collection[str]) -> list[str]:
    return [
        name
        for name, each in ROW_FORMATS.items()
        if any(all(column in columns for column in needed) for needed in each.columns)
    ]


def needed_columns(format_: str, columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that a format needs, in the first spelling that `columns` have; the first of all if
    they have none."""
    spellings = ROW_FORMATS[format_].columns
    return next((needed for needed in spellings if all(column in columns for column in needed)), spellings[0])


def other_columns(format_: str, columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that other formats need, if `columns` fit them too."""
    others = [needed_columns(name, columns) for name in matching_formats(columns) if name != format_]
    return tuple(
        column for needed in others for column in needed if column not in needed_columns(format_, columns)
    )


def _earlier_turns(row: dict[str, object]) -> list[Message]:
    """Return the messages of the column `history`, a list of [question, answer]."""
    history: object = parsed_column(row, "history") or []
    turns = cast(list[object], history) if isinstance(history, list) else [history]
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        pair = cast(list[Any], turn) if isinstance(turn, list) else []
        if len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ColumnError(
                "history",
                f"holds at position {number} something other than a question and its answer, as two texts",
            )
        if not pair[1].strip():
            raise ColumnError("history", f"holds at position {number} a question without an answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return messages


def _check_one_example(row: dict[str, object], length: int) -> None:
    """Check that columns about padding and packed examples describe one example of `length` tokens. Raises:
    ColumnError."""
    mask = _numbers(row, "attention_mask", length) if row.get("attention_mask") is not None else []
    if 0 in mask:
        raise ColumnError("attention_mask", "holds zeros: leave the padding out of `input_ids`")
    if (example := next((number for number in mask if number != 1), None)) is not None:
        raise ColumnError("attention_mask", f"holds {example}: the row is packed", hint=PACKED)
    positions = _numbers(row, "position_ids", length) if row.get("position_ids") is not None else []
    wrong = next((at for at, position in enumerate(positions) if position != at), None)
    if wrong is not None:
        raise ColumnError(
            "position_ids", f"holds {positions[wrong]} at position {wrong}: the row is packed", hint=PACKED
        )
    if row.get("seq_lengths") is not None and (lengths := _numbers(row, "seq_lengths")) != [length]:
        raise ColumnError(
            "seq_lengths", f"holds {lengths}, and `input_ids` {length} ids: the row is packed", hint=PACKED
        )
    if row.get("token_type_ids") is not None and any(_numbers(row, "token_type_ids", length)):
        raise ColumnError(
            "token_type_ids",
            "holds types other than 0, which causal models do not have",
            hint="remove the column",
        )


def _text(row: dict[str, object], column: str) -> str:
    if column not in row:
        raise RowError(f"it has no column `{column}`")
    value = row[column]
    if not isinstance(value, str):
        raise ColumnError(column, f"holds {kind_of(value)} instead of text")
    return value


def _numbers(row: dict[str, object], column: str, length: int | None = None) -> list[int]:
    value: object = row.get(column)
    if not isinstance(value, list):
        raise ColumnError(column, f"holds {kind_of(value)} instead of a list of whole numbers")
    numbers = cast(list[Any], value)
    wrong = next((at for at, number in enumerate(numbers) if type(number) is not int), None)
    if wrong is not None:
        raise ColumnError(
            column, f"holds {kind_of(numbers[wrong])} at position {wrong}: all entries must be whole numbers"
        )
    if length is not None and len(numbers) != length:
        raise ColumnError(column, f"holds {len(numbers)} numbers, and `input_ids` holds {length}")
    return numbers
