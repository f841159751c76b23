"""Import a file of another trainer, and show what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.migrate.importing import ImportedRecipe, import_file
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.schema.keys import values_by_key
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.migrate.foreign_files import FILES

TEMPLATES = ("chatml", "qwen2.5", "llama3")
TORCHTUNE_STEP = """\
checkpointer: {{checkpoint_dir: m}}
dataset: {{_component_: torchtune.datasets.alpaca_dataset}}
model: {{_component_: torchtune.models.llama3_2.llama3_2_1b}}
optimizer: {{_component_: {}, lr: 1.0e-5{}}}
"""
AUTOMODEL_STEP = """\
step_scheduler: {{max_steps: 4}}
model: {{_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: m}}
optimizer: {{_target_: {}, lr: 1.0e-5{}}}
"""


def write(directory: Path, name: str) -> Path:
    _, file, text = FILES[name]
    (directory / file).write_text(text, encoding="utf-8")
    return directory / file


def imported(directory: Path, name: str, **options: Any) -> ImportedRecipe:
    return import_file(write(directory, name), templates=TEMPLATES, **options)


def from_text(directory: Path, text: str, file: str = "config.yaml", **options: Any) -> ImportedRecipe:
    (directory / file).write_text(text, encoding="utf-8")
    return import_file(directory / file, templates=TEMPLATES, **options)


def loaded(result: ImportedRecipe) -> Recipe:
    """Return the recipe that is written, as it loads."""
    return parse_recipe(result.text, Path("recipe.yaml")).recipe


def values(result: ImportedRecipe) -> dict[str, Any]:
    """Return the recipe that is written as it loads, by key."""
    return values_by_key(loaded(result))


def row(result: ImportedRecipe, key: str) -> tuple[str, str]:
    """Return what became of a key, and why."""
    (found,) = [row for row in result.rows if row.key == key]
    return found.fate.value, found.reason


def questions(result: ImportedRecipe) -> list[str]:
    return [row.key for row in result.rows if row.fate.value == "question"]


def refusal(directory: Path, text: str, file: str = "config.yaml", **options: Any) -> str:
    """Return the single error of a file as `code: message; hint`."""
    with pytest.raises(FsdpTuneError) as caught:
        from_text(directory, text, file, **options)
    (problem,) = caught.value.problems
    assert caught.value.exit_code == 2
    return f"{problem.code}: {problem.message}; {problem.hint}"
