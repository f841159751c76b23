"""The schema against the contract, and the generated files against the schema."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.recipe.rules.trackers import TRACKERS
from fsdp_tune.recipe.schema.keys import all_keys, default_of, value_of
from fsdp_tune.recipe.schema.recipe import Recipe, Training
from fsdp_tune.recipe.schema.reference import json_schema, reference_yaml, surface_lines
from fsdp_tune.recipe.schema.training_fields import (
    TRAINING_FIELDS,
    owned_names,
    owner_of,
    training_value,
    version_gap,
)
from fsdp_tune.recipe.schema.unsupported_values import NOT_YET, refused
from fsdp_tune.recipe.schema.value_kinds import Section

CONTRACT = yaml.safe_load((Path(__file__).parent / "contract.yaml").read_text())
CONTRACT["training"]["learning_rate"] = 2.0e-5  # PyYAML reads `2.0e-5` as text
SOURCE_KEYS = {
    *("path", "name", "data_dir", "data_files", "split", "revision", "columns", "rename_columns"),
    *(
        "format",
        "loss_on",
        "chat_template",
        "weight",
        "max_rows",
        "repeats",
        "label",
        "loader",
        "loader_options",
    ),
}


def test_defaults_match_contract() -> None:
    assert Recipe().model_dump(by_alias=True) == CONTRACT


def test_source_keys_match_contract() -> None:
    assert {
        key.path[-1] for key in all_keys() if key.path[:2] == ("data", "train") and len(key.path) == 3
    } == SOURCE_KEYS


def test_every_key_has_a_description() -> None:
    silent = [
        key.name
        for key in all_keys()
        if not key.field.description and not isinstance(default_of(key.field), Section)
    ]
    assert silent == []


def test_resolved_recipe_round_trips_through_json() -> None:
    recipe = Recipe.model_validate(
        {"data": {"eval": {"rows": 5}}, "training": {"max_steps": 7}, "checkpoint": {"async": False}}
    )
    again = Recipe.model_validate_json(recipe.model_dump_json(by_alias=True))
    assert again == recipe
    assert again.checkpoint.async_ is False
    assert training_value(again.training, "max_steps") == 7


def test_generated_reference_is_yaml_of_the_defaults() -> None:
    document = yaml.safe_load(reference_yaml())
    document["training"]["learning_rate"] = float(document["training"]["learning_rate"])
    assert document == CONTRACT


def test_generated_files_are_current(repository: Path) -> None:
    generator = runpy.run_path(str(repository / "scripts" / "generate"), run_name="generator")
    assert generator["REFERENCE"].read_text() == reference_yaml()
    assert generator["SURFACE"].read_text().splitlines() == surface_lines()
    assert generator["TABLE"].read_text() == generator["training_table"](None)


def test_table_lists_the_fields_of_the_installed_transformers() -> None:
    installed = importlib.metadata.version("transformers")
    if installed not in TRAINING_FIELDS.versions:
        pytest.skip(f"the table knows transformers {TRAINING_FIELDS.versions}, not {installed}")
    from transformers import TrainingArguments  # the class itself; the table is made from its source

    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    assert {name for name, field in TRAINING_FIELDS.fields.items() if installed in field.versions} == fields


def test_trackers_are_those_of_the_installed_transformers() -> None:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "integrations" / "integration_utils.py").read_text()
    table = source.split("INTEGRATION_TO_CALLBACK = {")[1].split("}")[0]
    assert set(re.findall(r'"(\w+)":', table)) == set(TRACKERS)


def test_every_owned_field_exists_and_names_its_key() -> None:
    assert owned_names() <= set(TRAINING_FIELDS.fields)
    assert not owned_names() & set(Training.model_fields)
    assert all(owner_of(name) for name in owned_names())


def test_field_of_one_version_only_names_that_version() -> None:
    assert (
        version_gap("activation_checkpointing", "5.17.0")
        == "transformers 5.17.0 has no such field; it is in 5.23.0 and 5.24.0"
    )
    assert version_gap("activation_checkpointing", "5.23.0") is None
    assert version_gap("weight_decay", "5.17.0") is None
    assert version_gap("activation_checkpointing", "6.0.0") is None  # never tested: nothing is known


def test_defaults_are_all_supported() -> None:
    assert refused(Recipe()) == []


@pytest.mark.parametrize("row", NOT_YET, ids=lambda row: row.key)
def test_every_unsupported_key_has_a_default_that_works(row: Any) -> None:
    assert value_of(Recipe(), row.key) in row.works


def test_json_schema_accepts_what_the_loader_accepts() -> None:
    schema = json_schema()
    definitions = schema["$defs"]
    assert schema["additionalProperties"] is False
    assert "num_train_epochs" in definitions["Training"]["properties"]
    assert "bf16" not in definitions["Training"]["properties"]
    assert {"type": "boolean"} in definitions["Precision"]["properties"]["mixed_precision"]["anyOf"]
    assert "async" in definitions["CheckpointSection"]["properties"]
    json.dumps(schema, allow_nan=False)
