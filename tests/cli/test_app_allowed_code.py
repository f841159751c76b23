"""A recipe alone runs no code, in any command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from fsdp_tune.cli.app import app
from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.jobs import inspection as checks

SMALL = """\
model: {from_config: {model_type: gpt2, vocab_size: 384}, tokenizer: builtin:arithmetic%s}
data: {train: [{path: builtin:arithmetic}]}
launch: {num_processes: 2, device: cpu, env: {%s}}
output_dir: %s
"""


def refused(*arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 2, done.stdout
    return json.loads(done.stdout)["errors"]


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.children, "start", lambda *_, **__: pytest.fail("a child process was started"))


def write(tmp_path: Path, *, model: str = "", env: str = "") -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(SMALL % (model, env, tmp_path / "run"))
    return str(path)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("verb", ["validate", "train", "prepare", "rehearse", "plan"])
@pytest.mark.parametrize("key", ["trust_remote_code: true", "attn_implementation: someone/kernel"])
def test_command_runs_no_code_for_a_recipe_alone(tmp_path: Path, verb: str, key: str) -> None:
    words = [verb, write(tmp_path, model=f", {key}"), *(["--gpu", "A100-40GB"] if verb == "plan" else [])]
    (error,) = refused(*words)
    assert (error["code"], error["line"], error["key"]) == (
        "remote-code-not-trusted",
        1,
        f"model.{key.split(':')[0]}",
    )
    assert "--trust-remote-code" in error["hint"]
    assert not (tmp_path / "run").exists()


def test_children_of_a_command_import_nothing_from_the_working_directory(tmp_path: Path) -> None:
    """multiprocessing starts its processes with `python -c`, which puts the working directory first on the
    import path."""
    data, ran = tmp_path / "data", tmp_path / "ran"
    data.mkdir()
    for module in ("multiprocessing", "pickle", "selectors"):
        (data / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    script = tmp_path / "bin" / "command.py"  # as an installed script: not in the working directory
    script.parent.mkdir()
    script.write_text(
        "import multiprocessing, os\n"
        "from fsdp_tune.cli import app\n"
        "def start():\n"
        "    child = multiprocessing.get_context('spawn').Process(target=os.getpid)\n"
        "    child.start()\n"
        "    child.join()\n"
        "    raise SystemExit(child.exitcode)\n"
        "if __name__ == '__main__':\n"
        "    app.app = start\n"
        "    app.main()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=data, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not ran.exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("verb", ["train", "rehearse"])
def test_variable_that_can_run_code_is_refused_with_its_line_before_any_rank_starts(
    tmp_path: Path, verb: str
) -> None:
    evil = tmp_path / "evil"
    evil.mkdir()
    (evil / "sitecustomize.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    errors = refused(verb, write(tmp_path, env=f"PYTHONPATH: {evil}, LD_PRELOAD: x.so, NCCL_DEBUG: INFO"))
    assert [(error["code"], error["line"], error["key"]) for error in errors] == [
        ("variable-not-allowed", 3, "launch.env.LD_PRELOAD"),
        ("variable-not-allowed", 3, "launch.env.PYTHONPATH"),
    ]
    assert "--allow-env PYTHONPATH" in errors[1]["hint"]
    assert not (tmp_path / "ran").exists()


def test_inspection_of_a_model_does_not_get_variables_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = list[dict[str, str]]()

    def start(_command: object, environment: dict[str, str], **_: object) -> NoReturn:
        environments.append(environment)
        raise FsdpTuneError(Problem("not-started", "m"))

    monkeypatch.setattr(checks.children, "start", start)
    errors = refused("validate", write(tmp_path, env="LD_PRELOAD: x.so"))
    assert {error["code"] for error in errors} >= {"not-started"}
    [environment] = environments
    assert environment.get("LD_PRELOAD") != "x.so"


def test_variable_that_the_command_line_allows_is_set_and_recorded(tmp_path: Path) -> None:
    recipe = write(tmp_path, env="PYTHONPATH: lib, NCCL_DEBUG: INFO")
    done = CliRunner().invoke(app, ["train", recipe, "--allow-env", "PYTHONPATH", "--dry-run", "--json"])
    document = json.loads(done.stdout)
    assert done.exit_code == 0
    assert document["allowed_variables"] == ["PYTHONPATH"]
    assert document["environment"]["PYTHONPATH"] == "lib"
