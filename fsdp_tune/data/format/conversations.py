"""Convert conversations in rows, as OpenAI's messages or ShareGPT's turns, to messages for chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, cast

from fsdp_tune.data.format.chat_columns import after_system, without_nulls
from fsdp_tune.data.format.message_keys import (
    CALL_KEYS,
    CALL_PARTS,
    FUNCTION_CALL,
    FUNCTION_KEYS,
    MESSAGE_KEYS,
    PAIRS,
    PART_KEYS,
    REASONING_KEYS,
    REASONING_NAMES,
    REASONING_PARTS,
    RESULT_KEYS,
    RESULT_PART,
    ROLES,
    TEXT_PARTS,
    USE_KEYS,
    USE_PART,
    Message,
)
from fsdp_tune.data.format.row_account import NESTED_METADATA, RowAccount
from fsdp_tune.data.format.row_marks import MARKS, mark_of_parts, take_mark
from fsdp_tune.data.read.row_files import ColumnError, RowError, kind_of, parse_text


@dataclass(frozen=True, slots=True)
class MessageReader:
    """Reads the messages of one row, and enters each of their keys in the row's account."""

    account: RowAccount
    roles: Mapping[str, str]
    """`data.roles`: extends the known roles."""
    template: str | None
    names_in_file: Mapping[str, str]

    def read(self, row: dict[str, object], column: str) -> list[Message]:
        """Return messages with `role` and `content`, after that of a column `system`. Turns may have `from`
        and `value` instead.

        A message with a mark of what is trained has it as `train`, whatever its name in the row.
        """
        path = f"{self.names_in_file.get(column, column)}."
        given = _turns(row, column)
        if isinstance(row.get("system"), list) and row["system"]:  # parts, as Anthropic's
            row, given = row | {"system": None}, [{"role": "system", "content": row["system"]}, *given]
        turns = [
            turn
            for index, value in enumerate(given, 1)
            for turn in self._turns_of(_object(value, index), path)
        ]
        messages: list[Message] = []
        for index, turn in enumerate(turns, 1):
            message = self._message(turn, index, path)
            if messages and messages[-1]["role"] == "assistant" and self._is_call_alone(turn):
                _join_call(messages[-1], message, index)
            else:
                messages.append(message)
        return after_system(messages, row)

    def _is_call_alone(self, turn: Message) -> bool:
        """Return whether a turn is a call by its role, which continues an answer of the turn before it, as in
        ms-swift."""
        spoken: object = turn.get("role", turn.get("from"))
        return isinstance(spoken, str) and (ROLES | dict(self.roles)).get(spoken) == FUNCTION_CALL

    def _turns_of(self, turn: Message, path: str) -> list[Message]:
        """Return a turn without the keys that are not read; two for a question and its answer in one
        object."""
        keys = next((keys for keys in PAIRS if all(key in turn for key in keys)), None)
        if keys is not None and not any(key in turn for key in ("role", "from")):
            pair = self._closed(turn, dict.fromkeys(keys, ""), path)
            return [
                {"from": speaker, "value": pair.get(key)} for speaker, key in zip(PAIRS[0], keys, strict=True)
            ]
        return list(self._with_results(self._closed(turn, MESSAGE_KEYS, path), path))

    def _with_results(self, turn: Message, path: str) -> Iterator[Message]:
        """Yield a turn; for Anthropic's results in a message of the user, a message for each, and those of
        the text between them."""
        name = "value" if "value" in turn else "content"
        content: object = turn.get(name)
        parts = cast(list[Any], content) if isinstance(content, list) else []
        if not any(map(_is_result, parts)):
            yield turn
            return
        marks = {mark: turn[mark] for mark in MARKS if mark in turn}
        for is_result, group in groupby(parts, _is_result):
            if not is_result:
                yield turn | {name: list(group)}
                continue
            for part in group:
                # An error is described by the content, which is what the model receives.
                metadata = (
                    NESTED_METADATA | {"is_error"} if part.get("is_error") is False else NESTED_METADATA
                )
                closed = self.account.close(part, RESULT_KEYS, path=f"{path}{name}.", metadata=metadata)
                call = {"tool_call_id": closed["tool_use_id"]} if "tool_use_id" in closed else {}
                own = {mark: closed[mark] for mark in MARKS if mark in closed}
                yield {"role": "tool", "content": closed.get("content", ""), **call, **(marks | own)}

    def _closed(self, values: Message, known: Mapping[str, str], path: str) -> Message:
        return self.account.close(values, known, path=path, template=self.template)

    def _message(self, message: Message, index: int, path: str) -> Message:
        message = _renamed_turn(message, index)
        known = ROLES | dict(self.roles)
        spoken: object = message.get("role")
        role = known.get(spoken) if isinstance(spoken, str) else None
        if role is None:
            raise RowError(
                f"message {index} has the unknown role `{spoken}`; known: {', '.join(known)} "
                "(`data.roles` maps others)"
            )
        mark = take_mark(message, MARKS, f"message {index}: ", path, self.account.ignored)
        content = cast(object, message.get("content"))
        calls = self._calls(message, index, path)
        marked = self._join_reasoning(message, index, path)
        listed = cast(list[object], content) if isinstance(content, list) else None
        if listed is not None and not (role == FUNCTION_CALL and all(map(_is_call, listed))):
            parts = self._parts(listed, index, path)
            content = parts.text
            marked.append(parts)
            for name, inside in (("tool_calls", parts.calls), ("reasoning_content", parts.reasoning)):
                if inside and (calls if name == "tool_calls" else message.get(name)):
                    raise RowError(
                        f"message {index} has `{name}`, and a part of `content` that means the same; "
                        "remove one of them"
                    )
            calls = calls or parts.calls
            message |= {"reasoning_content": parts.reasoning} if parts.reasoning else {}
        mark = _mark_of_message(marked, index, own=mark, is_answer=role in ("assistant", FUNCTION_CALL))
        if mark is not None:
            message["train"] = mark
        if role == FUNCTION_CALL:
            given = self._function_calls(cast(object, content), index, f"{path}content.")
            return message | {"role": "assistant", "content": "", "tool_calls": given}
        if content is None and calls:
            content = ""
        if not isinstance(content, str):
            raise RowError(
                f"message {index}: `content` holds {kind_of(cast(object, content))} instead of text"
            )
        if role == "assistant" and not content.strip() and not calls:
            raise RowError(
                f"message {index}: the answer is empty; remove the message, or give it `content` or "
                "`tool_calls`"
            )
        return message | {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})

    def _calls(self, message: Message, index: int, path: str) -> list[Message]:
        """Remove the calls of a message and return them: `tool_calls`, or the `function_call` of OpenAI's
        older format."""
        calls = self._closed_calls(_tool_calls(message.pop("tool_calls", None), index), f"{path}tool_calls.")
        older = message.pop(FUNCTION_CALL, None)
        if older is None:
            return calls
        if calls:
            raise RowError(f"message {index} has both `{FUNCTION_CALL}` and `tool_calls`; remove one of them")
        return self._function_calls(older, index, f"{path}{FUNCTION_CALL}.")

    def _join_reasoning(self, message: Message, index: int, path: str) -> list[_Parts]:
        """Replace reasoning that is a list of parts by its text, and return the lists."""
        found: list[_Parts] = []
        for name in REASONING_NAMES:
            value: object = message.get(name)
            if value == []:
                del message[name]
            elif isinstance(value, list):
                found.append(self._parts(cast(list[object], value), index, path, name))
                message[name] = found[-1].text
            elif value is not None and not isinstance(value, str):
                raise RowError(f"message {index}: `{name}` holds {kind_of(value)} instead of text")
        return found

    def _parts(self, parts: list[object], index: int, path: str, name: str = "content") -> _Parts:
        """Return the text, the reasoning and the calls in a list of parts, which must have this order. Parts
        of reasoning are all text."""
        found = _Parts(name)
        last = 0
        orders = (
            (REASONING_PARTS, TEXT_PARTS, CALL_PARTS)
            if name == "content"
            else ((*REASONING_PARTS, *TEXT_PARTS),)
        )
        for number, part in enumerate(parts, 1):
            where = f"message {index}: part {number}"
            fields = cast(dict[str, object], part) if isinstance(part, dict) else {"text": part}
            kind: object = fields.get("type", "text")
            order = next((order for order, kinds in enumerate(orders) if kind in kinds), None)
            if order is None:
                raise RowError(
                    f"{where} of `{name}` is of type `{kind}`; only text is supported, so leave such rows out"
                )
            if order < last:
                raise RowError(
                    f"{where} of `content` is of type `{kind}`, after one of another type: "
                    "reasoning, text and calls have this order"
                )
            last = order
            if kind == USE_PART:
                found.calls.append(self._use(fields, where, f"{path}{name}."))
                found.marks.append(None)
                continue
            known = REASONING_KEYS if kind in REASONING_PARTS else PART_KEYS
            # Parts are joined to text, so the template does not receive their keys, though it may read them
            # of messages.
            closed = self.account.close(fields, known, path=f"{path}{name}.")
            found.mark_names += [mark for mark in MARKS if mark in closed and mark not in found.mark_names]
            found.marks.append(take_mark(closed, MARKS, f"{where}: ", f"{path}{name}.", self.account.ignored))
            given = [key for key in known if key != "type" and closed.get(key) not in (None, "")]
            if len(given) > 1:
                raise RowError(
                    f"{where} of `{name}` has both `{given[0]}` and `{given[1]}`; remove one of them"
                )
            value: object = (
                closed[given[0]]
                if given
                else next((closed[key] for key in ("text", "value", "content") if key in closed), None)
            )
            if kind in CALL_PARTS:
                found.calls += self._function_calls(
                    value, index, f"{path}content.{given[0] if given else 'value'}."
                )
                continue
            if not isinstance(value, str):
                raise RowError(
                    f"{where} of `{name}` is not text; only text is supported, so leave such rows out"
                )
            if kind in REASONING_PARTS and name == "content":
                found.reasoning += value
            else:
                found.text += value
        return found

    def _use(self, part: Message, where: str, path: str) -> Message:
        """Return Anthropic's part for a call as one of `tool_calls`."""
        closed = self.account.close(part, USE_KEYS, path=path)
        if not isinstance(closed.get("name"), str) or not isinstance(closed.get("input", {}), dict):
            raise RowError(f"{where} of `content` is a call: `name` must be text, and `input` an object")
        call = {
            "type": "function",
            "function": {"name": closed["name"], "arguments": closed.get("input", {})},
        }
        return {"id": closed["id"], **call} if "id" in closed else call

    def _function_calls(self, content: object, index: int, path: str) -> list[Message]:
        """Return the calls of LLaMA-Factory's `function_call`, stored as the JSON of one object or of a
        list."""
        why = f"message {index}: a function call is JSON with `name` and `arguments`"
        value = _json(content, why) if isinstance(content, str) else content
        calls = cast(list[object], value) if isinstance(value, list) else [value]
        if not calls or not all(
            isinstance(call, dict) and isinstance(cast(Message, call).get("name"), str) for call in calls
        ):
            raise RowError(why)
        return [
            {
                "type": "function",
                "function": _with_arguments(self._closed(without_nulls(call), FUNCTION_KEYS, path)),
            }
            for call in calls
        ]

    def _closed_calls(self, calls: list[Message], path: str) -> list[Message]:
        """Return calls without the keys that are not read."""
        return [
            closed
            | {
                "function": _with_arguments(
                    self._closed(closed["function"], FUNCTION_KEYS, f"{path}function.")
                )
            }
            if isinstance((closed := self._closed(call, CALL_KEYS, path)).get("function"), dict)
            else _with_arguments(closed)
            for call in calls
        ]


@dataclass(slots=True)
class _Parts:
    name: str
    """The key of the message that holds the list."""
    text: str = ""
    reasoning: str = ""
    calls: list[Message] = field(default_factory=list[Message])
    marks: list[bool | None] = field(default_factory=list["bool | None"])
    """The mark of each part."""
    mark_names: list[str] = field(default_factory=list[str])


def _join_call(answer: Message, call: Message, index: int) -> None:
    """Add message `index`, which is a call alone, to the answer before it. Raises: RowError if their marks
    differ."""
    marks = [message.get("train") for message in (answer, call)]
    if False in marks and marks != [False, False]:
        raise RowError(
            f"messages {index - 1} and {index} are one answer, and one of them is marked as not trained",
            hint="mark both with `train: false`, or neither; an answer is trained as a whole",
        )
    answer["tool_calls"] = [*answer.get("tool_calls", []), *call["tool_calls"]]
    if True in marks:
        answer["train"] = True


def _mark_of_message(lists: list[_Parts], index: int, *, own: bool | None, is_answer: bool) -> bool | None:
    """Return the mark of a message, from its own and those of its lists of parts. Raises: RowError if parts
    of an answer differ."""
    if not lists:
        return own
    marks = [mark for parts in lists for mark in parts.marks]
    if all(parts.name != "content" for parts in lists):  # the content is text, and has no mark of its own
        marks.append(None)
    names = list(dict.fromkeys(name for parts in lists for name in parts.mark_names))
    of = " and ".join(f"`{parts.name}`" for parts in lists if parts.mark_names)
    return mark_of_parts(marks, f"message {index}: ", own=own, names=names, of=of, is_answer=is_answer)


def _turns(row: dict[str, object], column: str) -> list[object]:
    """Return the list in a column of messages, which may be JSON text."""
    value: object = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_text(value)
        except ValueError as error:
            what = f"holds text that is not JSON: {error}"
            raise ColumnError(
                column, what, hint="write it with `json.dumps`, not with `str`, or as a list of objects"
            ) from error
    if not isinstance(value, list) or not value:
        raise ColumnError(
            column,
            f"holds {'an empty list' if value == [] else kind_of(cast(object, value))} instead of a "
            "list of messages",
        )
    return cast(list[object], value)


def _object(turn: object, index: int) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"message {index} is {kind_of(turn)} instead of an object")
    return without_nulls(cast(Message, turn))


def _renamed_turn(turn: Message, index: int) -> Message:
    """Return a turn with `role` and `content` instead of `from` and `value`."""
    for name, other in (("from", "role"), ("value", "content")):
        if name in turn and other in turn:
            raise RowError(f"message {index} has both `{name}` and `{other}`; remove one of them")
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    renamed = {new: turn[old] for old, new in (("from", "role"), ("value", "content")) if old in turn}
    return others | renamed


def _tool_calls(value: object, index: int) -> list[Any]:
    """Return the list of tool calls, which some data sets store as JSON text; [] for null or blank text."""
    if isinstance(value, str):
        value = (
            None
            if not value.strip()
            else _json(value, f"message {index}: `tool_calls` holds text that is not JSON")
        )
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(call, dict) for call in cast(list[object], value)):
        raise RowError(
            f"message {index}: `tool_calls` holds {kind_of(cast(object, value))} instead of a list of objects"
        )
    return without_nulls(cast(list[object], value))


def _with_arguments(function: Message) -> Message:
    """Return a called function with an empty object as arguments if it has none: a template would write
    nothing in their place."""
    given: object = function.get("arguments")
    is_blank = given is None or (isinstance(given, str) and not given.strip())
    return function | {"arguments": {}} if is_blank and "name" in function else function


def _is_result(part: object) -> bool:
    return isinstance(part, dict) and cast(Message, part).get("type") == RESULT_PART


def _is_call(value: object) -> bool:
    call = cast(dict[str, object], value) if isinstance(value, dict) else {}
    return isinstance(call.get("name"), str) and "arguments" in call


def _json(text: str, why: str) -> object:
    try:
        return parse_text(text)
    except ValueError as error:
        raise RowError(f"{why}: {error}") from error
