"""Rows that cannot be used are skipped up to a share of all rows, and named with source, row and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.bad_rows import BadRows, bad_row_examples, exceeds_bad_share
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.data.support import CHATML, ByteEncoder, prepared, write_jsonl

GOOD = {"prompt": "a", "completion": "b"}
BAD = {"prompt": "a", "completion": ""}


def skipping(folder: Path, rows: list[Any], **data: Any) -> Prepared:
    return prepared(folder, write_jsonl(folder / "rows.jsonl", rows), on_bad_row="skip", **data)


def problems(folder: Path, rows: list[Any], **data: Any) -> list[Problem]:
    with pytest.raises(FsdpTuneError) as caught:
        skipping(folder, rows, **data)
    return list(caught.value.problems)


def test_share_of_bad_rows_is_of_the_rows_read() -> None:
    assert not exceeds_bad_share(1, 100, 0.01)
    assert exceeds_bad_share(2, 100, 0.01)
    assert exceeds_bad_share(10, 60, 0.16)
    assert not exceeds_bad_share(29, 100, 0.29), "0.29 × 100 is below 29 in floating point"
    assert exceeds_bad_share(1, 10, 0.0)
    assert not exceeds_bad_share(10_000, 10_000, 1.0)


def test_more_bad_rows_than_the_share_are_an_error_that_says_what_a_higher_share_drops(
    tmp_path: Path,
) -> None:
    rows = [*[GOOD] * 39, *[BAD] * 20, "no object"]
    first, other, total = problems(tmp_path, rows)
    assert [found.where.line for found in (first, other)] == [40, 60]
    assert first.message == "the completion is empty (as in 19 more rows)"
    assert (total.code, total.message) == (
        "too-many-bad-rows",
        "21 of 60 rows (35 %) cannot be used, more than `data.max_bad_share: 0.01`",
    )
    assert "`--set data.max_bad_share=0.35` drops 21 of 60 rows (35 %)" in (total.hint or "")
    assert skipping(tmp_path, rows, max_bad_share=0.35).report.rows_bad.rows == 21
    assert problems(tmp_path, rows, max_bad_share=0.34)


def test_row_that_cannot_be_read_is_no_sample_of_those_that_are_not_encoded_after_it(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", ["no object", *[GOOD] * 299])
    with pytest.raises(FsdpTuneError) as caught:
        prepared(tmp_path, path)
    hint = caught.value.problems[-1].hint or ""
    assert "`--set data.on_bad_row=skip` drops about 0.333 % of the rows" in hint


def bad_rows(*reasons: str, unread: tuple[str, ...] = ()) -> list[tuple[int, BadRow]]:
    return [(0, BadRow(number, reason, unread=unread)) for number, reason in enumerate(reasons, 1)]


def test_one_row_of_each_kind_is_shown_with_the_number_of_its_kind() -> None:
    bad = bad_rows(
        *(f"message {number} is a list instead of an object" for number in range(50)),
        "it has no column `text`",
    )
    assert [(found.where.line, found.message) for found in bad_row_examples(bad, ["f"])] == [
        (1, "message 0 is a list instead of an object (as in 49 more rows)"),
        (51, "it has no column `text`"),
    ]
    names = [
        f"message {number} has the unknown role `{'abcdefghijklmnopqrstuvwxyz'[number]}`"
        for number in range(26)
    ]
    shown = bad_row_examples(bad_rows(*names, "the completion is empty"), ["f"])
    assert len(shown) == 10
    assert shown[-1].message == "the completion is empty", "the odd row is shown whatever comes before it"


def test_share_of_a_hint_admits_the_rows_also_where_later_rows_were_not_encoded() -> None:
    data = Recipe.model_validate({"data": {"train": [{"path": "a"}]}}).data
    bad = BadRows(
        bad_rows(*["the chat template rejects it"] * 700), ["f"], 2000, unencoded=1000, bad_unencoded=0
    )
    *_, total = bad.problems(data)
    assert total.message == "700 of 2,000 rows cannot be used"
    assert "`--set data.on_bad_row=skip --set data.max_bad_share=0.80` drops about 70 % of the rows" in (
        total.hint or ""
    )


def test_lower_share_refuses_data_from_the_cache(tmp_path: Path) -> None:
    rows = [GOOD, BAD, GOOD]
    kept = skipping(tmp_path, rows, max_bad_share=0.5)
    [total] = problems(tmp_path, rows, max_bad_share=0.0)
    assert total.message == "1 of 3 rows (33.3 %) cannot be used, more than `data.max_bad_share: 0`"
    assert str(Path(kept.path) / "bad_rows.jsonl") in (total.hint or "")
    assert skipping(tmp_path, rows, max_bad_share=0.5).reused


def test_template_error_in_a_late_row_is_skipped_and_listed(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad questions') }}{% endif %}" + CHATML
    )
    questions = ["good"] * 101
    questions[100] = "bad"
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]}
        for text in questions
    ]
    found = skipping(tmp_path, rows, encoder=ByteEncoder(eos="<|im_end|>", template=template))
    [listed] = [json.loads(line) for line in (Path(found.path) / "bad_rows.jsonl").read_text().splitlines()]
    assert listed["row"] == 101
    assert listed["reason"] == "the chat template rejects the conversation: no bad questions"


DEEP = "[" * 100_000
CALL = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("answer", "tools", "reason"),
    [
        (
            CALL | {"tool_calls": [{"function": {"name": {"a": 1}, "arguments": "{}"}}]},
            [{"name": "f"}],
            "an object instead of text",
        ),
        ({"role": "function_call", "content": DEEP}, None, "nested too deeply"),
        (CALL | {"tool_calls": DEEP}, None, "nested too deeply"),
        ({"role": "assistant", "content": "b"}, DEEP, "nested too deeply"),
        (CALL | {"tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}, [{"name": "f"}], None),
    ],
)
def test_odd_tool_call_is_one_bad_row(tmp_path: Path, answer: Any, tools: Any, reason: str | None) -> None:
    question = {"role": "user", "content": "a"}
    good = {"messages": [question, {"role": "assistant", "content": "b"}]}
    odd = {"messages": [question, answer], "tools": tools}
    found = skipping(
        tmp_path, [good, odd], max_bad_share=0.5, encoder=ByteEncoder(eos="<|im_end|>", template=CHATML)
    )
    listed = Path(found.path) / "bad_rows.jsonl"
    reasons = (
        [json.loads(line)["reason"] for line in listed.read_text().splitlines()] if listed.exists() else []
    )
    assert len(reasons) == 1
    assert reason is None or reason in reasons[0]
