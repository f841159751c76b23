"""Which files are configurations of other trainers: given as a recipe, such a file is one error."""

from __future__ import annotations

import json
from typing import get_args

import pytest
import yaml

from fsdp_tune.recipe.read.catalogue import catalogue
from fsdp_tune.recipe.read.tool_detection import OPTION_NAMES, OptionName, foreign_tool, tool_of
from tests.migrate.foreign_files import FILES
from tests.recipe.loading import MINIMAL, one_problem, problems

MAPPINGS = {
    name: (tool, text) for name, (tool, file, text) in FILES.items() if not file.endswith((".sh", ".py"))
}


@pytest.mark.parametrize("name", MAPPINGS)
def test_configuration_of_another_tool_is_one_error_of_a_recipe(name: str) -> None:
    tool, text = MAPPINGS[name]
    problem = one_problem(problems(text))
    assert (problem.code, problem.message) == (
        "foreign-configuration",
        f"this is a configuration of {tool}, and not a recipe",
    )
    assert problem.hint == "fsdp-tune import recipe.yaml --output imported.yaml"


def test_recipe_with_foreign_keys_keeps_a_hint_for_each() -> None:
    found = problems(MINIMAL + "base_model: gpt2\nsequence_len: 8\nmicro_batch_size: 2\n")
    assert [problem.code for problem in found] == ["unknown-key"] * 3


def test_recipes_of_the_catalogue_are_not_of_another_tool() -> None:
    for path in catalogue().values():
        assert foreign_tool(yaml.safe_load(path.read_text(encoding="utf-8"))) is None


def test_one_key_is_not_enough_to_tell_a_tool() -> None:
    assert tool_of({"base_model": "gpt2"}) is None
    assert tool_of({"base_model": "gpt2", "sequence_len": 8}) == "axolotl"
    assert tool_of(json.loads('{"zero_optimization": {}}')) == "DeepSpeed"
    assert tool_of({"model_name_or_path": "gpt2", "dataset_name": "a/b"}) == "TRL"
    assert foreign_tool({"model_name_or_path": "a", "dataset_mixture": {"datasets": []}}) == "TRL"


def test_option_of_the_command_has_the_names_of_the_tools() -> None:
    assert list(get_args(OptionName)) == list(OPTION_NAMES)
