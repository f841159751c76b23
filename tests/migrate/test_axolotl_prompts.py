"""Prompts of axolotl's `type: {format: …}`: the program in the question makes rows with the same text."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.migrate.tools.axolotl_prompts import prompt_program
from tests.migrate.imports import from_text

ROWS = [
    {"question": 'a "b"?', "ctx": "c", "answer": "d"},
    {"question": "e", "ctx": "", "answer": "f"},
    {"question": "g", "answer": "h"},
]
FIELDS = {"field_instruction": "question", "field_input": "ctx", "field_output": "answer"}


def prompted(prompter: dict[str, Any], row: dict[str, Any]) -> str:
    """axolotl/prompt_strategies/user_defined.py, for one row."""
    system = prompter.get("system_prompt", "")
    head = prompter.get("system_format", "{system}").format(system=system) if system else ""
    chosen = prompter["format"] if row.get("ctx") else prompter.get("no_input_format", prompter["format"])
    return head + chosen.format(instruction=row["question"], input=row.get("ctx", ""))


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
@pytest.mark.parametrize(
    "formats",
    [
        {"format": "[INST] {instruction} [/INST]"},
        {"format": "Q: {instruction}\n{input}\nA: ", "no_input_format": "Q: {instruction}\nA: "},
        {
            "format": '<|user|> "{instruction}"\\',
            "system_prompt": "Be brief.",
            "system_format": "SYS {system}\n",
        },
    ],
)
def test_program_of_the_question_writes_the_prompts_of_axolotl(
    tmp_path: Path, formats: dict[str, str]
) -> None:
    prompter = FIELDS | formats
    text = yaml.safe_dump(
        {"base_model": "m", "sequence_len": 8, "datasets": [{"path": "a.jsonl", "type": prompter}]}
    )
    (asked,) = [each for each in from_text(tmp_path, text).rows if each.key == "datasets[0].type"]
    match = re.search(r"`(jq .*?) ROWS.jsonl > NEW.jsonl`", asked.reason, re.DOTALL)
    assert match is not None, asked.reason
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    made = subprocess.run(
        [*shlex.split(match[1]), "rows.jsonl"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout
    assert [json.loads(line) for line in made.splitlines()] == [
        {"prompt": prompted(prompter, row), "completion": row["answer"]} for row in ROWS
    ]


def test_format_with_other_fields_has_no_program(tmp_path: Path) -> None:
    assert prompt_program({"format": "{instruction} {other}"}) is None
    text = "base_model: m\nsequence_len: 8\ndatasets: [{path: a, type: {format: '{x}'}}]\n"
    assert [each.fate.value for each in from_text(tmp_path, text).rows if each.key == "datasets[0].type"] == [
        "question"
    ]
