"""Marks of what is trained, by the names of other tools: obeyed where their meaning is exact, refused by name
where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.format.formats import FormatSettings, Ids
from fsdp_tune.data.format.row_marks import FLAGS, MARKS, NUMBERS, TOKEN_MASKS
from fsdp_tune.data.read.row_files import RowError
from fsdp_tune.recipe.schema.row_formats import ROW_FORMATS
from tests.data.support import CHATML, ByteEncoder, marked, prepared, rows_of, write_jsonl

USER, ANSWER = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}
CHAT = {"messages": [USER, ANSWER]}
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "a"},
    "prompt_completion": {"prompt": "a", "completion": "b"},
    "alpaca": {"instruction": "a?", "output": "b"},
    "messages": CHAT,
    "sharegpt": {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]},
    "segments": {"segments": [{"text": "a", "label": False}, {"text": "b", "label": True}]},
    "tokenized": {"input_ids": [1, 2, 3]},
}


def example(
    format_: str, row: dict[str, Any], *, loss_on: str | None = None, ignored: tuple[str, ...] = ()
) -> Any:
    wanted = loss_on or ROW_FORMATS[format_].loss_on[0]
    return FormatSettings(
        format_, wanted, CHATML, "", append_eos=True, vocabulary_size=100, ignored=ignored
    ).example(row)


def refusal(format_: str, row: dict[str, Any], **given: Any) -> RowError:
    with pytest.raises(RowError) as caught:
        example(format_, row, **given)
    return caught.value


def rendered(folder: Path, rows: list[dict[str, Any]], **data: Any) -> list[str]:
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    found = prepared(
        folder, write_jsonl(folder / "rows.jsonl", rows), encoder=encoder, max_length=256, **data
    )
    return [marked(row, encoder) for row in rows_of(found)]


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("format_", ["messages", "sharegpt", "prompt_completion"])
def test_every_mark_of_a_message_is_obeyed(name: str, format_: str) -> None:
    def trained(*marks: Any) -> Any:
        turns = [turn for mark in marks for turn in (USER, ANSWER | ({} if mark is None else {name: mark}))]
        row = (
            {"prompt": [USER], "completion": turns[1:]}
            if format_ == "prompt_completion"
            else {CHATS[format_]: turns}
        )
        chat = example(format_, row)
        assert all(set(message) == {"role", "content"} for message in chat.messages)
        return chat.trained

    assert trained(False, True) == trained(0, 1) == trained(0, None) == (False, False, False, True)
    assert trained(True, None) == trained(None, None) == (False, True, False, True)
    if name in NUMBERS:
        assert trained(0.0, 1.0) == (False, False, False, True)


CHATS = {"messages": "messages", "sharegpt": "conversations"}


def test_untrained_function_call_stays_context(tmp_path: Path) -> None:
    call = {
        "role": "function_call",
        "content": '{"name": "clock", "arguments": {"city": "Rome"}}',
        "loss": False,
    }
    assert example(
        "messages", {"messages": [USER, call, {"role": "tool", "content": "12"}, ANSWER]}
    ).trained == (False, False, False, True)
    texts = rendered(
        tmp_path,
        [{"messages": [USER, ANSWER | {"loss": False}, USER, ANSWER | {"content": "c", "loss": True}]}],
    )
    assert [text.count("[") for text in texts] == [1]
    assert "[c<|im_end|>]" in texts[0]


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("value", [0.5, 2, -1, "false", "0", [0, 1], {"a": 1}])
def test_mark_without_exact_meaning_is_refused_and_its_hint_works(name: str, value: Any) -> None:
    error = refusal("messages", {"messages": [USER, ANSWER | {name: value}]})
    assert str(error).startswith(f"message 2: `{name}`")
    if not isinstance(value, (list, dict)):
        assert f"--set 'data.ignore_columns=[messages.{name}]'" in (error.hint or "")
    assert example(
        "messages", {"messages": [USER, ANSWER | {name: value}]}, ignored=(f"messages.{name}",)
    ).trained == (False, True)


@pytest.mark.parametrize(
    "name", ["mask", "masked", "ignore", "no_loss", "train_detail", "trained_on", "Train", "weights"]
)
def test_mark_by_another_name_is_refused(name: str) -> None:
    for value in (True, False, 0, 1, [{"begin_offset": 0, "end_offset": 1, "train": False}]):
        error = refusal("messages", {"messages": [USER, ANSWER | {name: value}]})
        assert f"`messages.{name}` is not read" in str(error)
        assert error.hint


def test_contradicting_marks_are_refused() -> None:
    error = refusal("messages", {"messages": [USER, ANSWER | {"loss": True, "loss_weight": 0.0}]})
    assert str(error) == "message 2: `loss` and `loss_weight` contradict each other"


def parts(*marks: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} | mark for text, mark in zip("xyz", marks, strict=False)]


@pytest.mark.parametrize(
    ("marks", "own", "is_trained"),
    [
        ([{}, {}], {}, True),
        ([{"weight": 0}, {"train": False}], {}, False),
        ([{"weight": 1}, {}], {}, True),
        ([{"weight": 0}, {"weight": 0}], {"train": False}, False),
        ([{}, {"loss": True}], {"train": True}, True),
    ],
)
def test_equal_marks_of_parts_are_the_mark_of_the_message(
    marks: list[dict[str, Any]], own: dict[str, Any], *, is_trained: bool
) -> None:
    chat = example("messages", {"messages": [USER, ANSWER | {"content": parts(*marks)} | own, USER, ANSWER]})
    assert chat.trained == (False, is_trained, False, True)
    assert chat.messages[1] == {"role": "assistant", "content": "xy"}


@pytest.mark.parametrize(
    ("marks", "own"),
    [
        ([{"weight": 0}, {"weight": 1}], {}),
        ([{"weight": 0}, {}], {}),
        ([{"train": True}], {"train": False}),
        ([{"train": False}], {"train": True}),
    ],
)
def test_parts_of_an_answer_that_differ_are_refused(marks: list[dict[str, Any]], own: dict[str, Any]) -> None:
    error = refusal("messages", {"messages": [USER, ANSWER | {"content": parts(*marks)} | own]})
    assert "of parts of `content` exclude some of the answer" in str(error)
    assert example("messages", {"messages": [USER | {"content": parts(*marks)} | own, ANSWER]}).trained == (
        False,
        True,
    )


def test_mark_of_a_part_without_exact_meaning_is_refused() -> None:
    error = refusal("messages", {"messages": [USER, ANSWER | {"content": parts({"weight": 0.5})}]})
    assert str(error) == "message 2: part 1: `weight` is 0.5; it is 0 or 1"
    assert "messages.content.weight" in (error.hint or "")


@pytest.mark.parametrize("format_", ROWS)
@pytest.mark.parametrize("name", MARKS)
def test_mark_of_a_row_excludes_it_or_changes_nothing(format_: str, name: str) -> None:
    if format_ == "tokenized" and name in TOKEN_MASKS:
        return
    plain = example(format_, ROWS[format_])
    assert (
        example(format_, ROWS[format_] | {name: 1}) == example(format_, ROWS[format_] | {name: None}) == plain
    )
    assert example(format_, ROWS[format_] | {name: True}) == plain
    for value in (0, False, *([] if name in FLAGS else [0.0])):
        assert example(format_, ROWS[format_] | {name: value}) == Ids([], [])
    for value in (0.5, "x", 2, [0, 1]):
        assert f"`{name}`" in str(refusal(format_, ROWS[format_] | {name: value}))
        assert example(format_, ROWS[format_] | {name: value}, ignored=(name,)) == plain


def test_row_of_weight_0_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, ANSWER | {"content": text}], "weight": weight}
        for text, weight in (("good", 1.0), ("bad", 0.0))
    ]
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    found = prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows), encoder=encoder, max_length=256)
    assert [text for row in rows_of(found) for text in (marked(row, encoder),) if "bad" in text] == []
    assert found.report.rows_untrained.rows == 1
    assert [notice["code"] for notice in found.notices] == ["rows-untrained"]
    rows[0]["weight"] = 0.5
    with pytest.raises(FsdpTuneError, match=r"`weight` is 0\.5; it is 0 or 1"):
        prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", rows), encoder=encoder, max_length=256)


@pytest.mark.parametrize("name", TOKEN_MASKS)
def test_masks_of_tokens_are_obeyed(name: str) -> None:
    for mask in ([0, 1, 1], [False, True, True], [0.0, 1.0, 1.0]):
        assert example("tokenized", {"input_ids": [1, 2, 3], name: mask}) == Ids(
            [1, 2, 3], [False, True, True]
        )


def test_token_is_trained_if_labels_and_all_masks_select_it() -> None:
    row = {
        "input_ids": [1, 2, 3, 4],
        "completion_mask": [0, 1, 1, 1],
        "assistant_masks": [1, 1, 0, 1],
        "labels": [1, 2, 3, -100],
    }
    assert example("tokenized", row).trained == [False, True, False, False]


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        ([0, 0.5, 1], "holds 0.5 at position 1"),
        ([0, 2, 1], "holds 2"),
        ([1], "1 marks"),
        (1, "a list of 0 and 1"),
    ],
)
def test_mask_without_exact_meaning_is_refused(mask: Any, says: str) -> None:
    assert says in str(refusal("tokenized", {"input_ids": [1, 2, 3], "loss_mask": mask}))


@pytest.mark.parametrize("name", [*TOKEN_MASKS, "labels", "attention_mask"])
@pytest.mark.parametrize("format_", ["text", "prompt_completion", "alpaca", "messages"])
def test_masks_of_tokens_without_ids_are_refused(name: str, format_: str) -> None:
    error = refusal(format_, ROWS[format_] | {name: [0, 1]})
    assert f"`{name}`" in str(error)
    assert "write the row tokenized" in (error.hint or "")


def test_thinking_is_switched_by_a_column_as_in_verl() -> None:
    chat = example("messages", CHAT | {"enable_thinking": False})
    assert chat.variables == {"enable_thinking": False}
    assert [note.detail for note in chat.notes] == ["variable `enable_thinking`"]  # the template has none
    assert example(
        "messages", CHAT | {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": True}}
    ).variables
    both = CHAT | {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    assert "set it differently" in str(refusal("messages", both))
    assert "instead of true or false" in str(refusal("messages", CHAT | {"enable_thinking": "yes"}))


def test_marks_of_parts_of_reasoning_are_marks_of_parts() -> None:
    def answer(first: Any, second: Any) -> dict[str, Any]:
        parts = [{"type": "text", "text": "r"} | first, {"type": "text", "text": "s"} | second]
        return {"messages": [USER, ANSWER, USER, ANSWER | {"reasoning_content": parts}]}

    assert example("messages", answer({"train": True}, {})).trained == (False, True, False, True)
    says = str(refusal("messages", answer({"train": False}, {"train": True})))
    assert "`train` of parts of `reasoning_content` exclude some of the answer" in says
    assert "exclude some of the answer" in str(
        refusal("messages", answer({"train": False}, {"train": False}))
    )
