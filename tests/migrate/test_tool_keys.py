"""Keys of other tools, from the tools' own schemas: a default that is written out means the same as one that
is left out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.migrate.importing import ImportedRecipe, import_file
from fsdp_tune.migrate.tool_keys import is_default_of, tool_keys
from fsdp_tune.recipe.schema.keys import values_by_key
from fsdp_tune.recipe.schema.training_fields import TRAINING_FIELDS
from tests.migrate import tool_keys as generator
from tests.migrate.imports import from_text, row
from tests.migrate.tool_keys import SOURCES, keys_of

CHATS = {"path": "a", "type": "chat_template"}
FILES: dict[str, tuple[dict[str, Any], ...]] = {
    "LLaMA-Factory": (
        {"model_name_or_path": "m", "dataset": "a", "cutoff_len": 64},
        {"model_name_or_path": "m", "dataset": "a", "mask_history": True, "finetuning_type": "full"},
        {
            "model_name_or_path": "m",
            "dataset": "a",
            "stage": "pt",
            "quantization_bit": 4,
            "streaming": True,
            "max_steps": 3,
        },
    ),
    "ms-swift": (
        {"model": "m", "dataset": ["a.jsonl"]},
        {
            "model": "m",
            "dataset": ["a.jsonl", "b.jsonl"],
            "tuner_type": "full",
            "interleave_prob": [0.5, 0.5],
        },
        {"model": "m", "dataset": ["a.jsonl"], "quant_bits": 4, "streaming": True, "max_steps": 3},
    ),
    "TRL": (
        {"model_name_or_path": "m", "dataset_name": "a"},
        {
            "model_name_or_path": "m",
            "dataset_name": "a",
            "use_peft": True,
            "packing": True,
            "eval_strategy": "steps",
        },
    ),
    "axolotl": (
        {"base_model": "m", "datasets": [CHATS]},
        {
            "base_model": "m",
            "datasets": [CHATS],
            "adapter": "qlora",
            "cosine_min_lr_ratio": 0.1,
            "sample_packing": True,
        },
    ),
    "transformers examples": ({"model_name_or_path": "m", "train_file": "a.txt"},),
}
CASES = [(tool, number) for tool, files in FILES.items() for number in range(len(files))]


def imported(directory: Path, tool: str, values: dict[str, Any]) -> ImportedRecipe:
    (directory / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return import_file(directory / "config.yaml", tool=tool)


def defaults_of(tool: str, given: dict[str, Any]) -> dict[str, Any]:
    fields = {name: field.default for name, field in TRAINING_FIELDS.fields.items()}
    known = fields | tool_keys(tool)
    return {
        key: value for key, value in known.items() if key not in given and is_default_of(tool, key, value)
    }


def meaning(found: ImportedRecipe) -> dict[str, Any]:
    """Return the values of a recipe, with those of TrainingArguments that it leaves to their defaults."""
    values = values_by_key(found.recipe)
    fields = {f"training.{name}": field.default for name, field in TRAINING_FIELDS.fields.items()}
    return fields | {key: fields.get(key) if value is None else value for key, value in values.items()}


@pytest.mark.parametrize(("tool", "number"), CASES)
@pytest.mark.parametrize("are_first", [True, False])
def test_defaults_written_out_mean_the_same_as_left_out(
    tmp_path: Path, tool: str, number: int, are_first: bool
) -> None:
    """All defaults of a tool in one file, before its other keys and after them."""
    given = FILES[tool][number]
    defaults = {
        key: value
        for key, value in defaults_of(tool, given).items()
        if not key.startswith(("lora_", "use_do", "use_rs"))
    }
    short = imported(tmp_path, tool, given)
    full = imported(tmp_path, tool, defaults | given if are_first else given | defaults)

    assert meaning(full) == meaning(short)
    assert [each.key for each in full.rows if each.fate.value == "question" and each.key in defaults] == []
    assert dict(full.decisions) == dict(short.decisions)


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "number"), CASES)
def test_each_default_written_out_means_the_same(tmp_path: Path, tool: str, number: int) -> None:
    given = FILES[tool][number]
    short = meaning(imported(tmp_path, tool, given))
    for key, value in defaults_of(tool, given).items():
        try:
            assert meaning(imported(tmp_path, tool, {key: value} | given)) == short, key
        except FsdpTuneError as error:
            raise AssertionError(key) from error


def test_last_answer_is_trained_next_to_a_default_that_is_written_out(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nstage: sft\ndataset: a\n{}mask_history: true\n"
    for default in ("", "train_on_prompt: false\n"):
        found = from_text(tmp_path, text.format(default), tool="LLaMA-Factory")
        assert (found.recipe.data.loss_on, row(found, "mask_history")[0]) == ("last_assistant", "converted")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("embedding_lr_scale: 0.5", "parameter_groups"),
        ("otel_metrics_port: 9", "has no counterpart"),
        ("some_new_option: 3", "is not known here"),
    ],
)
def test_key_that_a_tool_has_is_not_called_unknown(tmp_path: Path, key: str, words: str) -> None:
    found = from_text(
        tmp_path, f"base_model: m\ndatasets: [{{path: a, type: completion}}]\n{key}\n", tool="axolotl"
    )
    assert words in row(found, key.partition(":")[0])[1]


@pytest.mark.parametrize(
    ("tool", "package"),
    [("axolotl", "axolotl"), ("TRL", "trl"), ("LLaMA-Factory", "llamafactory"), ("ms-swift", "swift")],
)
def test_table_has_the_keys_of_the_installed_tool(tool: str, package: str) -> None:
    """The table is that of the newest release (`scripts/test-newest --tools`), and the installed one may be
    older."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    keys = keys_of(tool, Path(next(iter(found.submodule_search_locations))))
    assert len(keys) > 50
    assert sorted(keys.keys() - tool_keys(tool).keys()) == []


def test_key_or_default_that_the_table_lacks_fails_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table, schema = tmp_path / "table.json", tmp_path / "trl" / "trainer" / "sft_config.py"
    monkeypatch.setattr(generator, "FILE", table)
    schema.parent.mkdir(parents=True)
    schema.write_text(
        "class SFTConfig:\n    LIMIT: int = 3\n    old: int = 1\n    packing: bool = False\n    "
        "rate: float = 2\n"
    )
    source = f"TRL={tmp_path / 'trl'}"
    assert generator.main([source]) == 0
    assert generator.main(["--check", source]) == 0
    assert json.loads(table.read_text()) == {"TRL": {"old": 1, "packing": False, "rate": 2}}
    schema.write_text("class SFTConfig:\n    packing: bool = 0\n    rate: float = 2.0\n    new: str = 'x'\n")
    before = table.read_bytes()
    assert generator.main(["--check", source]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "TRL has the key `new`, which the table lacks",
        "the default of TRL's `packing` is 0, in the table False",
    ]
    assert table.read_bytes() == before
    assert generator.main([source]) == 0
    assert json.loads(table.read_text())["TRL"] == {"new": "x", "old": 1, "packing": 0, "rate": 2.0}
    assert generator.main(["--check", f"TRL={tmp_path}"]) == 1, (
        "a directory without the schema is not a tool without keys"
    )


def test_every_tool_with_a_source_has_a_table() -> None:
    assert all(len(tool_keys(tool)) > 50 for tool in SOURCES)
