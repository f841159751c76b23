"""Every command has declared answers, and its JSON Schema is one of the documentation's."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from fsdp_tune.planner.predict.predict import Plan
from tests.answer_kinds import answers
from tests.cli.conftest import refuse_undeclared
from tests.structure.test_surface import commands

NO_ANSWER = {"recipes schema": "the JSON Schema of a recipe", "migrate": "another name of `import`"}


def test_every_command_has_declared_answers() -> None:
    verbs = {
        " ".join(path) for path, command in commands() if path and not getattr(command, "commands", None)
    }
    assert verbs - answers().keys() == NO_ANSWER.keys()
    assert answers().keys() < verbs


def test_every_command_has_a_schema_whose_references_resolve(repository: Path) -> None:
    folder = repository / "docs" / "reference" / "schemas"
    assert {path.stem for path in folder.iterdir()} == {
        "metrics-events",
        *(name.replace(" ", "-") for name in answers()),
    }
    for path in folder.iterdir():
        text = path.read_text(encoding="utf-8")
        schema = json.loads(text)
        named = {part.split('"')[0] for part in text.split("#/$defs/")[1:]}
        assert named <= schema["$defs"].keys(), path.name
        assert "_" not in {
            name[-1] for each in schema["$defs"].values() for name in each.get("properties", {})
        }, "words of Python"


def test_answer_of_plan_has_the_fields_of_a_plan() -> None:
    (kind,) = answers()["plan"]
    assert {each.name for each in fields(kind)} == {each.name for each in fields(Plan)} - {"memory"}


@pytest.mark.parametrize(
    "text", ['{"pushed": "address", "more": 1}', '{"pushed": 1}', "{}", '{"errors": [{"code": "bug"}]}']
)
def test_check_of_the_tests_refuses_another_answer(text: str) -> None:
    refuse_undeclared(["push"], '{"pushed": "address"}')
    with pytest.raises((AssertionError, ValueError)):
        refuse_undeclared(["push"], text)
