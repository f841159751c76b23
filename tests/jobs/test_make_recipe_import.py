"""`import_recipe` from Python: the file that it writes, and what it says was not checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fsdp_tune
from fsdp_tune.comparison.side_processes import ObservingChild
from fsdp_tune.jobs.import_check import check_import
from tests.jobs.sides import LLAMA, in_process
from tests.migrate.foreign_files import ACCELERATE, AXOLOTL
from tests.migrate.imports import TORCHTUNE_STEP


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "axolotl.yaml"
    path.write_text(AXOLOTL, encoding="utf-8")
    return path


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write `a.sh`, a command of transformers' example, with a tiny model and rows, into the working
    directory. Compare in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ObservingChild, "computed", in_process)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"{n}+{n}={2 * n}"}) + "\n" for n in range(40))
    )
    options = (
        "--model_name_or_path model --tokenizer_name builtin:arithmetic --block_size 64 "
        "--per_device_train_batch_size 2"
    )
    (tmp_path / "a.sh").write_text(f"python run_clm.py {options} --train_file rows.jsonl\n")


def code(source: Path, output: Path, *, force: bool = False) -> str:
    with pytest.raises(fsdp_tune.FsdpTuneError) as caught:
        fsdp_tune.import_recipe(source, output=output, force=force)
    return caught.value.problems[0].code


def test_written_recipe_is_the_text_and_loads(source: Path, tmp_path: Path) -> None:
    found = fsdp_tune.import_recipe(source, output=tmp_path / "recipe.yaml")
    assert (tmp_path / "recipe.yaml").read_text(encoding="utf-8") == found.imported.text
    assert fsdp_tune.load_recipe(tmp_path / "recipe.yaml").recipe.lora is not None
    assert any("`Qwen/Qwen2.5-1.5B` is not on this machine" in line for line in found.unchecked)


def test_bundled_chat_templates_are_known_by_name(source: Path) -> None:
    assert "chat_template: qwen2.5" in fsdp_tune.import_recipe(source).imported.text


def test_existing_file_is_replaced_with_force_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("mine\n")
    assert code(source, tmp_path / "recipe.yaml") == "output-exists"
    assert (tmp_path / "recipe.yaml").read_text() == "mine\n"
    fsdp_tune.import_recipe(source, output=tmp_path / "recipe.yaml", force=True)
    assert "base_model" in (tmp_path / "recipe.yaml").read_text()


def test_source_is_never_replaced(source: Path, tmp_path: Path) -> None:
    assert code(source, source, force=True) == "output-exists"
    assert source.read_text(encoding="utf-8") == AXOLOTL
    assert code(source, tmp_path, force=True) == "output-exists"
    assert code(source, tmp_path / "none" / "recipe.yaml") == "no-directory"


def test_unknown_name_of_a_tool_is_a_usage_error(source: Path) -> None:
    with pytest.raises(fsdp_tune.FsdpTuneError, match="`axolotol` is not a tool"):
        fsdp_tune.import_recipe(source, tool="axolotol")


@pytest.mark.usefixtures("script")
def test_check_finds_what_the_written_recipe_has_changed(tmp_path: Path) -> None:
    found = fsdp_tune.import_recipe("a.sh", output="r.yaml", num_gpus=1)
    check = check_import(found.imported, Path("r.yaml"), num_gpus=1, overrides=())
    assert check.equal
    assert (
        "what transformers examples computes: a.sh is the recipe that `import` makes of it"
        in check.not_compared
    )
    assert {stage.name for stage in check.stages if stage.status == "equal"} >= {
        "tokens",
        "labels",
        "logits",
        "update",
    }
    (tmp_path / "r.yaml").write_text(found.imported.text.replace("max_length: 64", "max_length: 3"))
    changed = check_import(found.imported, Path("r.yaml"), num_gpus=1, overrides=())
    assert (changed.equal, changed.cause and [key.key for key in changed.cause.keys]) == (
        False,
        ["data.max_length"],
    )


def test_check_needs_a_written_recipe(source: Path) -> None:
    with pytest.raises(fsdp_tune.FsdpTuneError, match="`--output` is missing"):
        fsdp_tune.import_recipe(source, check=True)


@pytest.mark.usefixtures("script")
def test_check_shows_what_an_override_has_changed() -> None:
    check = fsdp_tune.import_recipe(
        "a.sh", output="r.yaml", num_gpus=1, overrides=["data.max_length=4"], check=True
    ).check
    assert check is not None
    assert (check.equal, check.cause and [key.key for key in check.cause.keys]) == (
        False,
        ["data.max_length"],
    )


def test_side_of_axolotl_and_trl_is_what_they_compute_themselves(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "fsdp_tune.jobs.import_check.compare", lambda a, b, options, **_: seen.append((a, b, options.tools))
    )
    fsdp_tune.import_recipe(
        source, output=tmp_path / "r.yaml", overrides=["training.learning_rate=1e-3"], check=True
    )
    ((a, b, tools),) = seen
    assert (a.recipe.training.learning_rate, b, tools) == (2e-4, tmp_path / "r.yaml", "run")


def test_what_the_file_leaves_open_is_answered_on_both_sides_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("fsdp_tune.jobs.import_check.compare", lambda a, *_, **__: seen.append(a.recipe))
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE, encoding="utf-8")
    answers = ["model.name_or_path=gpt2", "data.train=[{path: rows.jsonl}]", "training.seed=7"]
    fsdp_tune.import_recipe(tmp_path / "fsdp.yaml", output=tmp_path / "r.yaml", overrides=answers, check=True)
    ((name, paths, seed),) = [
        (recipe.model.name_or_path, [each.path for each in recipe.data.train], recipe.training.seed)
        for recipe in seen
    ]
    assert (name, paths, seed) == ("gpt2", ["rows.jsonl"], 42)


def test_recipe_without_model_and_rows_cannot_be_checked(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE, encoding="utf-8")
    with pytest.raises(fsdp_tune.FsdpTuneError, match="names model and rows"):
        fsdp_tune.import_recipe(tmp_path / "fsdp.yaml", output=tmp_path / "r.yaml", check=True)


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ("rows.jsonl", []),
        ("[rows.jsonl, more.jsonl]", ["more.jsonl"]),
        ("'*.jsonl'", []),
        ("'*.csv'", ["*.csv"]),
    ],
)
def test_files_of_a_builder_are_what_is_looked_for(
    files: str, missing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    text = TORCHTUNE_STEP.format("torch.optim.AdamW", "")
    text = text.replace(
        "alpaca_dataset}", f"text_completion_dataset, source: json, data_files: {files}}}"
    ).replace("dir: m}", "dir: .}")
    (tmp_path / "tune.yaml").write_text(text)
    expected = [f"the rows of `{name}` are not on this machine: their columns and format" for name in missing]
    assert list(fsdp_tune.import_recipe("tune.yaml").unchecked) == expected
