"""Words and variables that no command accepts are usage errors that name them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from tests.cli.conftest import Cli, document


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["validate", "--config", ""], "the value of `--config` is empty"),
        (["validate", "--config="], "the value of `--config` is empty"),
        (["train", ""], "an argument is empty"),
        (["status", ""], "an argument is empty"),
        (["report", "runs/a", "--output", ""], "the value of `--output` is empty"),
        (["merge-checkpoint", "runs/a", "-o", ""], "the value of `-o` is empty"),
        (["compare", "a", ""], "an argument is empty"),
        (["submit", "slurm", "gpt2_smoke", "--partition", ""], "the value of `--partition` is empty"),
    ],
)
def test_empty_word_is_a_usage_error(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 2, done.stdout
    [error] = json.loads(done.stdout)["errors"]
    assert (error["code"], error["message"]) == ("usage", named)
    assert list(tmp_path.iterdir()) == []


def test_text_may_be_empty() -> None:
    """The system message of a chat."""
    done = CliRunner().invoke(
        app, ["generate", "nothing", "--prompts", "nothing.txt", "--system", "", "--json"]
    )
    assert "empty" not in done.stdout


def test_switch_that_is_neither_on_nor_off(cli: Cli) -> None:
    done = cli("recipes", "list", "--json", HF_HUB_OFFLINE="maybe")
    assert done.returncode == 2
    [error] = document(done)["errors"]
    assert error["message"] == "the environment variable HF_HUB_OFFLINE=maybe is neither on nor off"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "train", "plan"])
@pytest.mark.parametrize("variable", ["TORCH_LOGS", "TORCH_DISTRIBUTED_DEBUG", "HF_HUB_DOWNLOAD_TIMEOUT"])
def test_variable_that_a_library_refuses(command: str, variable: str, cli: Cli, tmp_path: Path) -> None:
    more = ["--gpu", "A100-40GB"] if command == "plan" else []
    done = cli(command, "--config", "gpt2_smoke", *more, **{variable: "garbage"})
    assert done.returncode == 2, done.stderr
    assert f"does not accept the environment variable {variable}=garbage" in done.stderr
    assert f"hint: correct it, or remove it: `unset {variable}`" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_variable_of_the_recipe_that_the_launcher_refuses(cli: Cli, tmp_path: Path) -> None:
    keys = [
        "--set",
        "launch.env.TORCH_LOGS=garbage",
        "--allow-env",
        "TORCH_LOGS",
        "--set",
        f"output_dir={tmp_path}/run",
    ]
    done = cli("train", "--config", "gpt2_smoke", *keys)
    assert done.returncode == 2, done.stderr
    assert "torch does not accept the environment variable TORCH_LOGS=garbage" in done.stderr
