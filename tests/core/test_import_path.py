"""Programs of the package import nothing from the working directory, and the standard library from nowhere
else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_tune.core import import_path
from fsdp_tune.core.import_path import leave_out_working_directory, named_directories, runs_this_package
from tests.conftest import REPOSITORY

HOSTILE = ("json", "platform", "psutil", "queue", "shlex", "token", "typer", "yaml")
"""Modules of the standard library, and of dependencies, that no start of Python has loaded."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory with modules that leave a trace when they are imported."""
    folder = tmp_path / "working"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r} + ' ')\n"
        )
    return folder


def traces(folder: Path) -> str:
    path = folder.parent / "imported"
    return path.read_text() if path.exists() else ""


def run(folder: Path, *words: str, python_path: str = str(REPOSITORY)) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder`, without coverage.py, which would import modules before the package does."""
    left_out = ("PYTHONSAFEPATH", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONPATH"] = python_path
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.cold
@pytest.mark.parametrize(
    "python_path", [str(REPOSITORY), f":{REPOSITORY}", f"{REPOSITORY}:"], ids=["named", "before", "after"]
)
def test_command_imports_nothing_from_the_working_directory(python_path: str, folder: Path) -> None:
    done = run(folder, "-m", "fsdp_tune", "explain", "launch.device", python_path=python_path)
    assert done.returncode == 0, done.stderr
    assert traces(folder) == ""


@pytest.mark.cold
@pytest.mark.parametrize(("options", "code"), [((), 2), (("-u",), 2)])
def test_worker_imports_nothing_from_the_working_directory(
    options: tuple[str, ...], code: int, folder: Path
) -> None:
    """As `accelerate launch` and `torchrun` start it, also if they are typed by hand."""
    done = run(folder, *options, "-m", "fsdp_tune.worker")
    assert (done.returncode, done.stderr) == (
        code,
        "usage: python -m fsdp_tune.worker RUN_DIR (started by a launcher)\n",
    )
    assert traces(folder) == ""


@pytest.mark.cold
def test_directory_of_python_path_replaces_libraries_and_not_the_standard_library(folder: Path) -> None:
    program = folder.parent / import_path.PROGRAM
    program.write_text("import fsdp_tune, json, token, yaml\n")
    done = run(folder.parent, str(program), python_path=f"{folder}:{REPOSITORY}")
    assert done.returncode == 0, done.stderr
    assert traces(folder).split() == ["yaml"]


@pytest.mark.cold
def test_program_of_a_user_imports_from_its_own_directory(folder: Path) -> None:
    (folder / "mine.py").write_text("import sys, fsdp_tune, yaml\nprint(sys.path[0])\n")
    done = run(folder, "-m", "mine")
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert traces(folder).split() == ["yaml"]


@pytest.mark.parametrize(
    ("words", "is_ours"),
    [
        (("python", "-m", "fsdp_tune"), True),
        (("python", "-um", "fsdp_tune.worker", "RUN"), True),
        (("python", "-mfsdp_tune"), True),
        (("/venv/bin/fsdp-tune", "train"), True),
        (("python", "/venv/bin/fsdp-tune", "train"), True),
        (("python", "-m", "pytest", "fsdp_tune"), False),
        (("python", "-m", "fsdp_tuner"), False),
        (("python", "mine.py"), False),
        (("python",), False),
    ],
)
def test_programs_of_the_package(
    words: tuple[str, ...], is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", list(words))
    monkeypatch.setattr(sys, "argv", [next((word for word in words if word.endswith("fsdp-tune")), "-m")])
    assert runs_this_package() == is_ours


def test_empty_entries_are_not_named() -> None:
    assert [named_directories(value) for value in ("", ":", ":/a", "/a::/b:", "/a:/b")] == [
        "",
        "",
        "/a",
        "/a:/b",
        "/a:/b",
    ]


@pytest.mark.parametrize("python_path", [":/libs", "/libs:", "/libs::/other"])
def test_working_directory_that_is_named_stays(
    python_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    for value, stays in (
        (python_path, False),
        (f"{python_path}:{tmp_path}", True),
        (f"{python_path}:.", True),
    ):
        monkeypatch.setenv("PYTHONPATH", value)
        monkeypatch.setattr(sys, "path", ["/libs", str(tmp_path), *sys.path])
        leave_out_working_directory()
        assert (str(tmp_path) in sys.path) == stays
        assert os.environ["PYTHONPATH"] == named_directories(value)
        assert os.environ["PYTHONSAFEPATH"] == "1"
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
