"""The command line that users and scripts rely on: frozen, light, and documented."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer.main

from fsdp_tune.cli.app import app
from tests.structure.interpreter import Interpreter, fresh_interpreter

HEAVY = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "numpy",
    "pyarrow",
    "tokenizers",
    "huggingface_hub",
)
REFERENCE_IMPORTS = "import typer, pydantic, yaml, rich.console"


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, command) of the app, every group and every verb."""
    command = typer.main.get_command(app) if command is None else command
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


PATHS = [path for path, _ in commands()]


def surface() -> str:
    """One line for each command, argument and option, with type and default."""
    lines: list[str] = []
    for path, command in commands():
        lines.append(" ".join(("fsdp-tune", *path)))
        for parameter in command.params:
            if parameter.name in ("install_completion", "show_completion"):
                continue  # Typer's own
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            annotation = parameter.type_descriptor.annotation
            choices = (
                [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else []
            )
            kind = "|".join(choices) or getattr(annotation, "__name__", str(annotation))
            many = " repeatable" if getattr(parameter, "multiple", False) else ""
            lines.append(f"    {parameter.param_type_name} {names}: {kind}{many} = {parameter.default}")
    return "\n".join(lines) + "\n"


def test_command_line_matches_golden_file(repository: Path, update_golden: bool) -> None:
    """Compared both ways: what is added shows as well as what is gone."""
    golden = repository / "tests" / "golden" / "surface_cli.txt"
    if update_golden:
        golden.write_text(surface(), encoding="utf-8")
    assert surface() == golden.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interpreter]:
    with fresh_interpreter(tmp_path_factory.mktemp("surface")) as interpreter:
        yield interpreter


@pytest.mark.parametrize("path", PATHS, ids=[" ".join(path) or "fsdp-tune" for path in PATHS])
def test_help_is_light_and_has_an_example(path: tuple[str, ...], interpreter: Interpreter) -> None:
    """No library that computes is imported to print help."""
    done = interpreter.run(*path, "--help")
    assert done.code == 0, done.err
    assert done.modules.isdisjoint(HEAVY)
    is_group = path in {other[:-1] for other in PATHS if other}
    assert is_group or "Example" in done.out


READS_NO_DATA = {
    "data",
    "planner",
    "model",
    "worker",
    "comparison",
    "answer",
    "rehearsal",
    "migrate",
    "numpy",
    "jinja2",
    "torch",
    "transformers",
}


@pytest.mark.parametrize(
    ("arguments", "unneeded"),
    [
        ("explain data.train", {*READS_NO_DATA, "launch"}),
        ("recipes list", {*READS_NO_DATA, "launch"}),
        ("env", READS_NO_DATA - {"torch", "model"}),
        ("status .", READS_NO_DATA),
        ("cache list", READS_NO_DATA - {"data", "numpy"}),
        ("merge-checkpoint .", READS_NO_DATA - {"data", "numpy"}),  # `data` for what a model card says
        ("report .", READS_NO_DATA - {"data", "numpy", "jinja2"}),
    ],
)
def test_command_loads_no_room_that_it_does_not_use(
    arguments: str, unneeded: set[str], interpreter: Interpreter
) -> None:
    """One import at the top of a shared module once doubled the start of every command."""
    assert not unneeded & interpreter.run(*arguments.split()).rooms


def test_import_without_check_loads_nothing_that_compares(interpreter: Interpreter, tmp_path: Path) -> None:
    source = tmp_path / "axolotl.yaml"
    source.write_text("base_model: gpt2\nmicro_batch_size: 1\ndatasets: [{path: a.jsonl, type: alpaca}]\n")
    done = interpreter.run("import", str(source), "--num-gpus", "1")
    assert done.code == 0, done.err
    unneeded = READS_NO_DATA - {"data", "migrate"}
    assert not unneeded & done.rooms


@pytest.mark.parametrize(
    "arguments",
    [["--bogus"], ["train", "--bogus"], ["train", "--set"], ["bogus"], ["train", "a", "b"], ["recipes"]],
)
def test_usage_errors_use_own_format_in_text_and_json(arguments: list[str], interpreter: Interpreter) -> None:
    text, document = (interpreter.run(*arguments[:1], *extra, *arguments[1:]) for extra in ([], ["--json"]))
    assert (text.code, document.code) == (2, 2)
    assert text.err.startswith("Usage: " if arguments == ["recipes"] else "error: ")
    assert document.err.startswith("error: ")
    assert "Traceback" not in text.err + document.err
    assert json.loads(document.out)["errors"][0]["code"] == "usage"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_is_available(shell: str, interpreter: Interpreter) -> None:
    assert "fsdp-tune" in interpreter.run(_FSDP_TUNE_COMPLETE=f"source_{shell}").out


def cpu_seconds(program: str) -> float:
    """Return the least CPU time of a few starts of an interpreter: a busy machine adds to it and takes
    nothing away."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    times: list[float] = []
    for _ in range(4):
        before = os.times()
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, env=environment)
        after = os.times()
        times.append(
            after.children_user + after.children_system - before.children_user - before.children_system
        )
    return min(times)


@pytest.mark.slow
def test_start_up_costs_at_most_twice_its_libraries() -> None:
    help_program = (
        "import sys; sys.argv = ['fsdp-tune', '--help']; from fsdp_tune.cli.app import main; main()"
    )
    assert cpu_seconds(help_program) <= 2 * cpu_seconds(REFERENCE_IMPORTS)
