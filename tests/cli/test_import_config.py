"""`import` as a command: the recipe on stdout, the account beside it, JSON, exit codes; and foreign files
given to other verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from fsdp_tune.comparison.side_processes import ObservingChild
from fsdp_tune.core.errors import ExitCode
from fsdp_tune.migrate.ledger import leaves
from tests.cli.conftest import Cli
from tests.cli.in_process import answer, errors, invoke, settings
from tests.jobs.sides import LLAMA, in_process
from tests.migrate.foreign_files import AXOLOTL, FILES


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "axolotl.yaml"
    path.write_text(AXOLOTL, encoding="utf-8")
    return path


def test_recipe_is_on_stdout_and_the_account_on_stderr(source: Path) -> None:
    done = invoke("import", str(source))
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(done.stdout)["lora"]["r"] == 32
    assert "micro_batch_size" in done.stderr
    assert "# DECIDE:" in done.stderr
    assert "keys: 53 (13 kept, 27 converted, 1 computed, 3 question, 9 dropped)" in done.stderr
    assert "not checked: the model `Qwen/Qwen2.5-1.5B` is not on this machine" in done.stderr


def test_output_gets_the_recipe_and_stdout_the_account(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "recipe.yaml"
    done = invoke("import", str(source), "--output", str(target), "--num-gpus", "2")
    assert done.exit_code == 0, done.output
    assert yaml.safe_load(target.read_text())["training"]["global_batch_size"] == 16
    assert f"wrote {target}" in done.stdout
    again = invoke("import", str(source), "--output", str(target))
    assert (again.exit_code, again.stderr.splitlines()[1]) == (
        2,
        "hint: give another file name, or `--force`",
    )
    assert invoke("migrate", str(source), "--output", str(target), "--force").exit_code == 0


def test_piped_account_fits_100_columns(source: Path, tmp_path: Path) -> None:
    """Only a key that is longer than its column stays whole, so that it can be copied."""
    done = invoke("import", str(source), "--output", str(tmp_path / "recipe.yaml"))
    table = done.stdout[done.stdout.index(" became ") : done.stdout.index("\nkeys: ")]
    last_cells = [line.split("  ")[-1] for line in table.splitlines() if len(line) > 100]
    assert all(len(cell.split()) == 1 for cell in last_cells), last_cells
    assert len(last_cells) <= 1, last_cells


def test_json_document_has_the_account_of_every_key(source: Path) -> None:
    document = answer("import", source)
    assert (document["tool"], document["output"]) == ("axolotl", None)
    assert len(document["account"]) == sum(document["counts"].values())
    named = {row["key"] for row in document["account"]}
    assert {path[0] for path in leaves(yaml.safe_load(AXOLOTL))} == {
        key.partition(".")[0].partition("[")[0] for key in named
    }
    (row,) = [row for row in document["account"] if row["key"] == "evals_per_epoch"]
    assert (row["fate"], row["to"], row["value"]) == (
        "computed",
        ["training.eval_steps", "training.eval_strategy"],
        4,
    )
    assert [each["key"] for each in document["decisions"]][:1] == ["training.global_batch_size"]
    assert yaml.safe_load(document["recipe"])["model"]["name_or_path"] == "Qwen/Qwen2.5-1.5B"


def test_unknown_file_is_exit_2_with_what_was_tried(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")
    (problem,) = errors("import", tmp_path / "x.yaml")
    assert problem["code"] == "unknown-foreign-file"
    assert "axolotl 0" in problem["message"]
    assert invoke("import", str(tmp_path / "none.yaml")).exit_code == 2
    assert invoke("import", str(tmp_path / "x.yaml"), "--from", "caffe").exit_code == 2


@pytest.mark.parametrize("verb", ["validate", "train", "plan", "prepare", "rehearse"])
def test_foreign_file_given_to_another_verb_is_one_error(verb: str, tmp_path: Path) -> None:
    for name in ("axolotl", "unsloth"):  # YAML, and a script
        tool, file, text = FILES[name]
        (tmp_path / file).write_text(text, encoding="utf-8")
        (problem,) = errors(verb, "--config", tmp_path / file)
        kind = "a Python script" if file.endswith(".py") else f"a configuration of {tool}"
        assert (problem["code"], problem["message"]) == (
            "foreign-configuration",
            f"this is {kind}, and not a recipe",
        )
        assert problem["hint"] == f"fsdp-tune import {tmp_path / file} --output recipe.yaml"


@pytest.mark.parametrize("name", ["torchtune", "deepspeed", "soup", "automodel"])
def test_file_of_any_tool_is_recognised_where_a_recipe_is_expected(name: str, tmp_path: Path) -> None:
    tool, file, text = FILES[name]
    (tmp_path / file).write_text(text, encoding="utf-8")
    (problem,) = errors("validate", "--config", tmp_path / file)
    assert (problem["code"], problem["message"]) == (
        "foreign-configuration",
        f"this is a configuration of {tool}, and not a recipe",
    )


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("name", ["axolotl", "trl", "llama-factory"])
def test_imported_recipe_has_no_error_of_its_keys_offline(name: str, cli: Cli, tmp_path: Path) -> None:
    """Model and rows are not here: `validate` says so and has no other complaint."""
    _, file, text = FILES[name]
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert cli("import", file, "--output", "recipe.yaml").returncode == 0
    document = json.loads(
        cli("validate", "--config", "recipe.yaml", "--offline", "--trust-remote-code", "--json").stdout
    )
    schema = {
        "unknown-key",
        "wrong-value",
        "no-value",
        "unknown-field",
        "owned-field",
        "missing-key",
        "contradiction",
        "not-yet",
    }
    assert {problem["code"] for problem in document.get("errors", [])} & schema == set()


CHECKED = """\
python run_clm.py --model_name_or_path model --tokenizer_name builtin:arithmetic --train_file rows.jsonl --block_size 64 \\
    --per_device_train_batch_size 2 --max_steps 4 --learning_rate 0.001 --torch_dtype float32
"""  # noqa: E501


def test_check_compares_the_file_with_the_written_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ObservingChild, "computed", in_process)
    (tmp_path / "run.sh").write_text(CHECKED)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"{n}+{n}={2 * n}"}) + "\n" for n in range(40))
    )
    command = ["import", "run.sh", "--output", "r.yaml", "--num-gpus", "1", "--check"]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert "keys: 8 (" in done.stdout
    assert "✓ tokens of the first rows" in done.stdout
    assert "\nequal: " in done.stdout, done.stdout
    (tmp_path / "r.yaml").unlink()
    (tmp_path / "rows.jsonl").unlink()
    found = answer(*command, code=ExitCode.NOT_COMPARABLE)["check"]
    assert (found["verdict"], found["a"]["kind"]) == ("not_comparable", "transformers examples")
    assert any(line.startswith("tokens of the first rows") for line in found["not_compared"])


def test_check_without_a_written_recipe_is_exit_2_and_nothing_is_printed(source: Path) -> None:
    done = invoke("import", str(source), "--check")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "`--check` compares the file with the written recipe" in done.stderr


def test_set_answers_in_the_same_command_and_a_wrong_one_writes_nothing(tmp_path: Path) -> None:
    _, file, text = FILES["accelerate"]
    (tmp_path / file).write_text(text, encoding="utf-8")
    (tmp_path / "chats.jsonl").write_text('{"text": "one"}\n' * 40, encoding="utf-8")
    target = tmp_path / "recipe.yaml"
    words = ["import", str(tmp_path / file), "--output", str(target)]
    answers = settings("model.from_config=gpt2", f"data.train=[{{path: {tmp_path / 'chats.jsonl'}}}]")
    wrong = invoke(*words, *answers, "--set", "trainin.seed=1")
    assert (wrong.exit_code, target.exists()) == (2, False)
    assert "error: --set #3: unknown key `trainin`" in wrong.stderr
    open_one = invoke(*words)
    assert "look for `# DECIDE:` in it, or answer with `import --set KEY=VALUE`" in open_one.stdout
    done = invoke(*words, "--force", *answers, "--set", "model.tokenizer=builtin:bytes")
    assert done.exit_code == 0, done.output
    assert "to decide" not in done.stdout
    assert yaml.safe_load(target.read_text())["data"]["train"] == [{"path": str(tmp_path / "chats.jsonl")}]


def test_manifest_is_imported_or_refused_by_its_engine(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(
        "num_nodes: 2\nworkdir: .\nrun: accelerate launch --num_processes 16 sft.py "
        "--model_name_or_path m --dataset_name d\n"
    )
    document = answer("import", path)
    assert (document["tool"], yaml.safe_load(document["recipe"])["launch"]) == ("TRL", {"num_processes": 16})

    path.write_text("num_nodes: 2\nworkdir: .\nrun: make train\n")
    done = invoke("import", str(path))
    assert done.exit_code == 2
    assert "this is a manifest for SkyPilot, and none of its commands starts a trainer" in done.stderr
    assert (
        "hint: import the script or the configuration that its command names; `fsdp-tune submit "
        "skypilot RECIPE`" in done.stderr
    )
