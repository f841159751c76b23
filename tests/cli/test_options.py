"""One way from a recipe's name to what a command works with."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from fsdp_tune.cli.options import asked_recipe
from fsdp_tune.cli.output import Screen
from fsdp_tune.core import devices
from fsdp_tune.core.devices import Device
from tests.recipe.loading import MINIMAL


def test_a_device_that_is_named_is_counted_as_one_that_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`validate` and `prepare` took a named `cuda` for eight assumed devices, on a machine that shows four."""
    monkeypatch.setattr(devices, "visible_devices", lambda _: [Device("cuda", "A GPU")] * 4)
    monkeypatch.setattr(devices, "torch_facts", lambda: pytest.fail("a command that starts nothing waits for torch"))
    file = tmp_path / "recipe.yaml"
    for device in ("auto", "cuda"):
        file.write_text(MINIMAL + f"launch: {{device: {device}}}\n")
        for starts_here in (True, False):
            asked = asked_recipe(Screen(json_output=True), str(file), starts_here=starts_here)
            assert (asked.recipe.world_size, asked.recipe.launch.device) == (4, "cuda")


def test_a_tracker_that_is_not_installed_gets_one_verdict_from_validate_dry_run_and_train(tmp_path: Path) -> None:
    missing = "comet_ml"
    if importlib.util.find_spec(missing) is not None:
        pytest.skip(f"{missing} is installed")
    file = tmp_path / "recipe.yaml"
    file.write_text(MINIMAL + "training: {report_to: [comet_ml]}\nlaunch: {device: cpu, num_processes: 1}\n")
    for words in (["validate", str(file)], ["train", str(file), "--dry-run"], ["train", str(file), "--no-start"], ["train", str(file)]):
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == 2, words
        assert [error["code"] for error in json.loads(done.stdout)["errors"]] == ["tracker-not-installed"], words
    assert asked_recipe(Screen(json_output=True), str(file)).recipe.training.report_to == ["comet_ml"], "`plan` and `prepare` need none"


def test_no_verb_loads_a_recipe_in_a_way_of_its_own(repository: Path) -> None:
    """`plan` reads it a second time as it is written, for `--write`, and `plan_best` what is about to be written."""
    found = {
        path.name
        for path in (repository / "fsdp_tune" / "cli").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and node.module in {"fsdp_tune.recipe.read.loader", "fsdp_tune.recipe.resolve"}
        and {alias.name for alias in node.names} & {"load_recipe", "resolve"}
    }
    assert found == {"options.py", "plan.py", "plan_best.py"}
