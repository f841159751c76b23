"""All commands find and resolve recipes in the same way."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from fsdp_tune.core import devices
from fsdp_tune.core.devices import Device
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.session import Allowed, resolve_recipe
from fsdp_tune.recipe.read.loader import load_recipe
from tests.cli.conftest import Cli
from tests.recipe.loading import MINIMAL


@pytest.mark.parametrize("arguments", [(), ("cache",), ("recipes",)])
def test_bare_command_shows_its_help(cli: Cli, arguments: tuple[str, ...]) -> None:
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Usage: {' '.join(('python -m fsdp_tune', *arguments))} [OPTIONS] COMMAND [ARGS]...")
    assert "Commands:" in done.stderr


def test_help_refers_only_to_arguments_that_the_command_has() -> None:
    named = 0
    for name, command in vars(typer.main.get_command(app))["commands"].items():
        arguments = {parameter.metavar for parameter in command.params if parameter.param_type_name == "argument"}
        for parameter in command.params:
            for word in re.findall(r"argument ([A-Z]+)", getattr(parameter, "help", None) or ""):
                assert word in arguments, (name, parameter.name)
                named += 1
    assert named > 3


def test_named_device_is_counted_like_a_detected_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`validate` and `prepare` took a named `cuda` for eight assumed devices, on a machine that shows four."""
    monkeypatch.setattr(devices, "visible_devices", lambda _: [Device("cuda", "A GPU")] * 4)
    monkeypatch.setattr(devices, "torch_facts", lambda: pytest.fail("a command that starts nothing waits for torch"))
    file = tmp_path / "recipe.yaml"
    for device in ("auto", "cuda"):
        file.write_text(MINIMAL + f"launch: {{device: {device}}}\n")
        for starts_here in (True, False):
            recipe = resolve_recipe(load_recipe(file), Allowed(), Observer(), starts_here=starts_here).recipe
            assert (recipe.world_size, recipe.launch.device) == (4, "cuda")


def test_missing_tracker_is_refused_by_validate_dry_run_and_train(tmp_path: Path) -> None:
    missing = "comet_ml"
    if importlib.util.find_spec(missing) is not None:
        pytest.skip(f"{missing} is installed")
    file = tmp_path / "recipe.yaml"
    file.write_text(MINIMAL + "training: {report_to: [comet_ml]}\nlaunch: {device: cpu, num_processes: 1}\n")
    for words in (["validate", str(file)], ["train", str(file), "--dry-run"], ["train", str(file), "--no-start"], ["train", str(file)]):
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == 2, words
        assert [error["code"] for error in json.loads(done.stdout)["errors"]] == ["tracker-not-installed"], words
    planned = resolve_recipe(load_recipe(file), Allowed(), Observer()).recipe
    assert planned.training.report_to == ["comet_ml"], "`plan` and `prepare` need none"


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
    assert found == {"session.py", "plan.py"}
