"""The prompts of a file, with the line of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs.generate import read_prompts


def test_each_line_of_text_that_is_not_blank_is_a_prompt(tmp_path: Path) -> None:
    """The white space of any language is blank."""
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\n \u3000\nfour and more\n", encoding="utf-8")
    found = read_prompts(str(file))
    assert [(each.shown, each.where.line) for each in found] == [("one", 1), ("four and more", 4)]
    assert {each.where.source for each in found} == {str(file)}


def test_every_row_without_a_prompt_is_reported_with_its_line(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one"},
        {"question": "two"},
        {"messages": [{"role": "user", "content": "three"}]},
        {"messages": 4},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "{not json\n")
    with pytest.raises(FsdpTuneError) as caught:
        read_prompts(str(file))
    problems = caught.value.problems
    assert [(each.code, each.where.line) for each in problems] == [
        ("prompt-unusable", 2),
        ("prompt-unusable", 4),
        ("prompt-unusable", 5),
    ]
    assert problems[0].message == "it has no `messages`, `prompt` or `text`; it has question"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows[::2]))
    assert [each.of_models[0].kind for each in read_prompts(str(file))] == ["question", "chat"]


@pytest.mark.parametrize(("text", "code"), [("\n \n", "no-rows"), (None, "usage")])
def test_file_without_prompts_is_refused(tmp_path: Path, text: str | None, code: str) -> None:
    file = tmp_path / "prompts.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(FsdpTuneError) as caught:
        read_prompts("" if text is None else str(file))
    assert caught.value.problems[0].code == code
