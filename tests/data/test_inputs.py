"""Hints about files that fit no format, and rows of preferences: followed as they are, they lead to the rows
that are meant."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import FsdpTuneError
from tests.data.support import CHATML, ByteEncoder, marked, prepared, rows_of, write_jsonl

USER, GOOD, BAD = (
    {"role": role, "content": text}
    for role, text in (("user", "a?"), ("assistant", "good"), ("assistant", "bad"))
)
FROM_USER, FROM_GOOD, FROM_BAD = (
    {"from": role, "value": text} for role, text in (("human", "a?"), ("gpt", "good"), ("gpt", "bad"))
)


def prepared_by_hints(folder: Path, row: dict[str, Any], **data: Any) -> list[str]:
    """Prepare a row, and do what each hint proposes until it is accepted; return it as text with the trained
    part marked."""
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    entry: dict[str, Any] = {"path": str(write_jsonl(folder / "rows.jsonl", [row]))}
    for _ in range(4):
        try:
            found = prepared(folder, entry, encoder=encoder, max_length=256, **data)
        except FsdpTuneError as error:
            hint = error.problems[0].hint or ""
            renaming = re.search(r"`rename_columns: (\{[^}]*\})`", hint)
            ignoring = re.search(r"`--set (.*?)`(?: |$)", hint)
            if not renaming and not ignoring:
                raise
            if renaming:
                entry["rename_columns"] = yaml.safe_load(renaming[1])
            elif ignoring:
                (option,) = shlex.split(ignoring[1])
                data["ignore_columns"] = yaml.safe_load(option.partition("=")[2])
        else:
            return [marked(row, encoder) for row in rows_of(found)]
    raise AssertionError("the hints lead in a circle")


ASKED = "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\n[good<|im_end|>]\n"


@pytest.mark.parametrize(
    ("row", "rendered"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, ASKED),
        ({"prompt": "a?", "chosen": "good", "rejected": "bad"}, "a?[good<|im_end|>]"),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ASKED),
        ({"chosen_messages": [USER, GOOD], "rejected_messages": [USER, BAD]}, ASKED),
        ({"instruction": "a?", "chosen": "good", "rejected": "bad"}, ASKED),
        ({"conversations": [FROM_USER], "chosen": FROM_GOOD, "rejected": FROM_BAD}, ASKED),
        ({"messages": [USER], "chosen": GOOD, "rejected": BAD}, ASKED),
        ({"messages": [USER, GOOD], "rejected_response": "bad"}, ASKED),
        (
            {
                "prompt": "a?",
                "messages": [USER, GOOD],
                "chosen": [USER, GOOD],
                "rejected": [USER, BAD],
                "score_chosen": 1.0,
            },
            ASKED,
        ),
    ],
)
def test_hints_about_preferences_lead_to_the_chosen_answer(
    tmp_path: Path, row: dict[str, Any], rendered: str
) -> None:
    """The documented rows of TRL, LLaMA-Factory, ms-swift and UltraFeedback."""
    assert [text.rstrip("\n") for text in prepared_by_hints(tmp_path, row)] == [rendered.rstrip("\n")]


def test_hint_about_openais_preferences_leads_to_the_preferred_answer(tmp_path: Path) -> None:
    row = {
        "input": {"messages": [USER], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [GOOD],
        "non_preferred_output": [BAD],
    }
    old, new = write_jsonl(tmp_path / "old.jsonl", [row]), tmp_path / "new.jsonl"
    encoder = ByteEncoder(template=CHATML, eos="<|im_end|>")
    with pytest.raises(FsdpTuneError) as caught:
        prepared(tmp_path, old, encoder=encoder, max_length=256)
    [problem] = caught.value.problems
    assert "input, preferred_output, non_preferred_output" in problem.message
    found = re.search(r"`jq -c '(.*)' OLD.jsonl > NEW.jsonl`", problem.hint or "")
    assert found is not None
    written = {}
    for part in found[1].strip("{}").split(", "):  # jq itself is not installed everywhere
        name, _, path = part.partition(": .")
        value: Any = row
        for key in path.split("."):
            value = value[key]
        written[name] = value
    [text] = [
        marked(each, encoder)
        for each in rows_of(prepared(tmp_path, write_jsonl(new, [written]), encoder=encoder, max_length=256))
    ]
    assert text.rstrip("\n") == ASKED.rstrip("\n")


@pytest.mark.parametrize(
    ("row", "rendered"),
    [
        ({"question": "a?", "answer": "good"}, "a?[good<|im_end|>]"),
        ({"prompt": "a?", "generation": "good"}, "a?[good<|im_end|>]"),
        ({"problem": "a?", "solution": "good"}, "a?[good<|im_end|>]"),
        (
            {"system_prompt": "s", "question": "a?", "response": "good"},
            "<|im_start|>system\ns<|im_end|>\n" + ASKED,
        ),
        ({"system": "s", "question": "a?", "answer": "good"}, "<|im_start|>system\ns<|im_end|>\n" + ASKED),
        ({"texts": "good"}, "g[ood<|im_end|>]"),
    ],
)
def test_hints_about_other_names_lead_to_a_format(tmp_path: Path, row: dict[str, Any], rendered: str) -> None:
    assert [text.rstrip("\n") for text in prepared_by_hints(tmp_path, row)] == [rendered.rstrip("\n")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a?"},
        {"prompt": "a?", "completions": ["b"], "labels": [True]},
        {"article": "a", "title": "b"},
    ],
)
def test_hint_names_no_column_that_the_file_does_not_have(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(FsdpTuneError) as caught:
        prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]))
    assert caught.value.problems[0].code == "no-format"
    assert caught.value.problems[0].hint == (
        "a format needs `prompt` and `completion`, `instruction` and `output`, `messages`, or `text`: rename "
        "columns with `rename_columns: {OLD: NEW}` of the source, or write such rows"
    )


def test_completion_of_messages_as_text_is_an_answer(tmp_path: Path) -> None:
    encoder = ByteEncoder(template=CHATML)
    found = prepared(
        tmp_path,
        write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [USER], "completion": "good"}]),
        encoder=encoder,
    )
    assert "assistant\n[good<|im_end|>" in marked(rows_of(found)[0], encoder)


def test_messages_after_a_text_are_refused_with_the_remedy(tmp_path: Path) -> None:
    row = {"prompt": "a?", "completion": [GOOD]}
    with pytest.raises(
        FsdpTuneError, match="`prompt` and `completion` must both be text, or both messages"
    ) as caught:
        prepared(tmp_path, write_jsonl(tmp_path / "rows.jsonl", [row]), encoder=ByteEncoder(template=CHATML))
    assert '[{"role": "assistant", "content": …}]' in (caught.value.problems[0].hint or "")
