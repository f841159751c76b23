"""All commands find and resolve recipes in the same way."""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.verbs import verb
from fsdp_tune.core import devices
from fsdp_tune.core.command import Argument, Only, Option
from fsdp_tune.core.devices import Device
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.recipes import resolve_recipe
from fsdp_tune.recipe.read.loader import load_recipe
from tests.cli.conftest import Cli
from tests.recipe.loading import MINIMAL


@dataclass(frozen=True, slots=True)
class Inner:
    left: Annotated[bool, Option("Left out by one command.")] = False
    kept: Annotated[bool, Option("Of both commands.")] = False


@dataclass(frozen=True, slots=True)
class Group:
    count: Annotated[int, Option("A number.", metavar="N", minimum=1)] = 3
    kind: Annotated[Literal["one", "two"] | None, Option("A choice.")] = None
    names: Annotated[tuple[str, ...], Option("Repeatable.", flags=("--name", "-n"))] = ()
    size: Annotated[float | None, Option("Read from text.", read=float)] = None
    on: Annotated[bool, Option("Turns it off.", flags=("--off",), read=operator.not_, typed=bool)] = True
    extra: Annotated[Mapping[str, Any], Inner] = field(default_factory=dict[str, Any])
    inner: Annotated[Inner, Only(())] = Inner()
    hidden: str = "no option"


def run(*words: str) -> Any:
    """What a command gets from these words; its document if it fails."""
    app, got = typer.Typer(), list[Any]()

    @app.command()
    @verb
    def take(
        screen: Screen, path: Annotated[Path, Argument("A path.", metavar="PATH")], group: Group
    ) -> None:
        """Take all."""
        got.append((path, group))
        screen.document({"fine": True})

    done = CliRunner().invoke(app, list(words))
    return got[0] if got else done.stdout


def test_group_of_options_has_its_defaults_and_what_was_typed() -> None:
    assert run("p") == (Path("p"), Group(extra={"left": False, "kept": False}))
    words = ["--count", "4", "--kind", "two", "-n", "a", "--name", "b", "--size", "1.5", "--off", "--kept"]
    expected = Group(4, "two", ("a", "b"), 1.5, on=False, extra={"left": False, "kept": True})
    assert run("p", *words) == (Path("p"), expected)


def test_value_outside_of_the_declaration_is_refused() -> None:
    for words in (["--count", "0"], ["--kind", "three"], ["--hidden", "x"], []):
        assert isinstance(run(*(["p", *words] if words else [])), str), words


def test_value_that_cannot_be_read_is_an_error_of_the_command() -> None:
    document = json.loads(run("p", "--size", "much", "--json"))
    assert document["errors"][0]["code"] == "bug", (
        "a reader that raises no usage error is a bug inside the boundary"
    )


def test_arguments_and_directories_that_are_not_utf_8_are_refused_at_the_door(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    command = [sys.executable, "-m", "fsdp_tune", "validate", "--json", "--config"]
    for cwd, name, what in (
        (tmp_path, f"{folder.name}.yaml", "the argument"),
        (folder, "gpt2_smoke", "the current directory"),
    ):
        done = subprocess.run([*command, name], cwd=cwd, capture_output=True, text=True, check=False)
        [error] = json.loads(done.stdout)["errors"]
        assert (done.returncode, error["code"]) == (2, "usage")
        assert error["message"].startswith(what), error
        assert "caf\\udce9" in error["message"]


def test_path_that_is_not_ascii_is_read_and_printed_in_any_locale(cli: Cli) -> None:
    done = cli("status", "läufe-ı", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: läufe-ı does not exist")


def test_word_of_thousands_of_characters_is_not_echoed(cli: Cli) -> None:
    for arguments in (
        ["9" * 5000],
        ["merge-checkpoint", "x", "--step", "9" * 5000],
        ["report", "--no-such-" + "9" * 5000],
    ):
        done = cli(*arguments)
        assert done.returncode == 2
        assert len(done.stderr) < 300


def test_bare_call_prints_help_on_stdout(cli: Cli) -> None:
    done = cli()
    assert (done.returncode, done.stderr) == (0, "")
    assert "Show the status of a run." in done.stdout


@pytest.mark.parametrize("arguments", [("cache",), ("recipes",)])
def test_bare_group_shows_its_help(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"Usage: {' '.join(('python -m fsdp_tune', *arguments))} [OPTIONS] COMMAND [ARGS]..."
    )
    assert "Commands:" in done.stderr


def test_help_refers_only_to_arguments_that_the_command_has() -> None:
    named = 0
    for name, command in vars(typer.main.get_command(app))["commands"].items():
        arguments = {
            parameter.metavar for parameter in command.params if parameter.param_type_name == "argument"
        }
        for parameter in command.params:
            for word in re.findall(r"argument ([A-Z]+)", getattr(parameter, "help", None) or ""):
                assert word in arguments, (name, parameter.name)
                named += 1
    assert named > 3


def test_named_device_is_counted_like_a_detected_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`validate` and `prepare` took a named `cuda` for eight assumed devices, on a machine that shows
    four."""
    monkeypatch.setattr(devices, "visible_devices", lambda _: [Device("cuda", "A GPU")] * 4)
    monkeypatch.setattr(
        devices, "torch_facts", lambda: pytest.fail("a command that starts nothing waits for torch")
    )
    file = tmp_path / "recipe.yaml"
    for device in ("auto", "cuda"):
        file.write_text(MINIMAL + f"launch: {{device: {device}}}\n")
        for starts_here in (True, False):
            recipe = resolve_recipe(load_recipe(file), Allowed(), Observer(), starts_here=starts_here).recipe
            assert (recipe.world_size, recipe.launch.device) == (4, "cuda")


@pytest.mark.parametrize(
    ("tracker", "install"),
    [("comet_ml", "pip install 'comet-ml>=3.43.2'"), ("tensorboard", "pip install 'fsdp-tune[tensorboard]'")],
)
def test_missing_tracker_is_refused_by_validate_dry_run_and_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, install: str
) -> None:
    monkeypatch.setattr("fsdp_tune.recipe.rules.trackers._is_installed", lambda _module: False)
    file = tmp_path / "recipe.yaml"
    file.write_text(
        MINIMAL + f"training: {{report_to: [{tracker}]}}\nlaunch: {{device: cpu, num_processes: 1}}\n"
    )
    for words in (
        ["validate", str(file)],
        ["train", str(file), "--dry-run"],
        ["train", str(file), "--no-start"],
        ["train", str(file)],
    ):
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == 2, words
        hints = {error["code"]: error["hint"] for error in json.loads(done.stdout)["errors"]}
        assert hints["tracker-not-installed"] == f"`{install}`, or leave it out", words
    planned = resolve_recipe(load_recipe(file), Allowed(), Observer()).recipe
    assert planned.training.report_to == [tracker], "`plan` and `prepare` need none"


def test_commands_resolve_recipes_in_one_place(repository: Path) -> None:
    """`best_recipe` resolves the text that `plan --write` is about to write."""
    found = {
        path.name
        for room in ("cli", "jobs")
        for path in (repository / "fsdp_tune" / room).glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module == "fsdp_tune.recipe.resolve"
        and "resolve" in {alias.name for alias in node.names}
    }
    assert found == {"recipes.py", "ranked_recipe.py"}
