"""Rows that cannot be used are skipped up to a share of all rows, and named with source, row and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.data.account import exceeds_bad_share
from fsdp_tune.data.preparation import Prepared
from tests.data.support import CHATML, ByteEncoder, prepared, write_jsonl

GOOD = {"prompt": "a", "completion": "b"}
BAD = {"prompt": "a", "completion": ""}


def skipping(folder: Path, rows: list[Any], **data: Any) -> Prepared:
    return prepared(folder, write_jsonl(folder / "rows.jsonl", rows), on_bad_row="skip", **data)


def problems(folder: Path, rows: list[Any], **data: Any) -> list[Problem]:
    with pytest.raises(FsdpTuneError) as caught:
        skipping(folder, rows, **data)
    return list(caught.value.problems)


def test_share_of_bad_rows_counts_from_a_thousand_rows() -> None:
    assert not exceeds_bad_share(10, 10, 0.01)
    assert exceeds_bad_share(11, 20, 0.01)
    assert not exceeds_bad_share(100, 10_000, 0.01)
    assert exceeds_bad_share(101, 10_000, 0.01)
    assert exceeds_bad_share(1, 10, 0.0)
    assert not exceeds_bad_share(10_000, 10_000, 1.0)


def test_more_bad_rows_than_the_share_are_an_error_that_names_the_first(tmp_path: Path) -> None:
    *first, total = problems(tmp_path, [*[GOOD] * 30, *[BAD] * 11])
    assert [found.where.line for found in first] == [31, 32, 33, 34, 35]
    assert total.code == "too-many-bad-rows"
    assert total.message == "11 of 41 rows cannot be used, more than `data.max_bad_share: 0.01`"
    assert "data.max_bad_share" in (total.hint or "")
    assert skipping(tmp_path, [*[GOOD] * 30, *[BAD] * 10]).report.rows_bad.rows == 10


def test_lower_share_refuses_data_from_the_cache(tmp_path: Path) -> None:
    rows = [GOOD, BAD, GOOD]
    kept = skipping(tmp_path, rows)
    [total] = problems(tmp_path, rows, max_bad_share=0.0)
    assert total.message == "1 of 3 rows cannot be used, more than `data.max_bad_share: 0.0`"
    assert str(Path(kept.path) / "bad_rows.jsonl") in (total.hint or "")
    assert skipping(tmp_path, rows).reused


def test_template_error_in_a_late_row_is_skipped_and_listed(tmp_path: Path) -> None:
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad questions') }}{% endif %}" + CHATML
    questions = ["good"] * 101
    questions[100] = "bad"
    rows = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "b"}]} for text in questions]
    found = skipping(tmp_path, rows, encoder=ByteEncoder(eos="<|im_end|>", template=template))
    [listed] = [json.loads(line) for line in (Path(found.path) / "bad_rows.jsonl").read_text().splitlines()]
    assert listed["row"] == 101
    assert listed["reason"] == "the chat template rejects the conversation: no bad questions"


DEEP = "[" * 100_000
CALL = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    ("answer", "tools", "reason"),
    [
        (CALL | {"tool_calls": [{"function": {"name": {"a": 1}, "arguments": "{}"}}]}, [{"name": "f"}], "an object instead of text"),
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
    found = skipping(tmp_path, [good, odd], encoder=ByteEncoder(eos="<|im_end|>", template=CHATML))
    listed = Path(found.path) / "bad_rows.jsonl"
    reasons = [json.loads(line)["reason"] for line in listed.read_text().splitlines()] if listed.exists() else []
    assert len(reasons) == 1
    assert reason is None or reason in reasons[0]
