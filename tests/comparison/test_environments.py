"""Environments of `compare --with`. The installer is a script that records its calls, but for the slow
test."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest

from fsdp_tune.comparison import environments
from fsdp_tune.comparison.environments import COMPLETE, PARTLY, python_with
from fsdp_tune.core.errors import FsdpTuneError
from tests.cli.conftest import Cli, cli, document  # noqa: F401  a fixture

UV = """#!/bin/sh
echo "$@" >> {calls}
for last; do :; done
case "$1" in
  venv) mkdir -p "$last/bin" "$last/lib/python3.11/site-packages"; ln -s {python} "$last/bin/python" ;;
  pip) {install} ;;
esac
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the installer was called with, a line each. It installs at once."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return installer(tmp_path, "sleep 0.2")


def installer(folder: Path, install: str) -> Path:
    (folder / "bin").mkdir(exist_ok=True)
    uv = folder / "bin" / "uv"
    uv.write_text(UV.format(calls=folder / "calls", python=sys.executable, install=install))
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    return folder / "calls"


def lines(calls: Path) -> list[str]:
    return calls.read_text().splitlines() if calls.exists() else []


def test_environment_is_made_once_for_a_list_of_requirements(tmp_path: Path, calls: Path) -> None:
    python = python_with(["b==2", "a >= 1"], tmp_path / "cache")
    assert python_with(["a>=1", "b==2", "b==2"], tmp_path / "cache") == python
    first, second = lines(calls)
    assert first.startswith("venv ")
    assert second == f"pip install --quiet --python {python} a>=1 b==2"
    assert python_with(["a>=1"], tmp_path / "cache") != python
    (fallback,) = python.parents[1].glob("lib/python*/site-packages/*.pth")
    assert Path(fallback.read_text().strip()) == Path(pytest.__file__).parents[1]


def test_commands_at_the_same_time_take_turns(tmp_path: Path, calls: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=python_with, args=(["a==1"], tmp_path / "cache")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(lines(calls)) == 2


def test_half_made_environment_is_made_again(tmp_path: Path, calls: Path) -> None:
    python = python_with(["a==1"], tmp_path / "cache")
    (python.parents[1] / COMPLETE).unlink()  # a command that was killed before the end
    (python.parents[1] / "left over").write_text("")
    assert python_with(["a==1"], tmp_path / "cache") == python
    assert len(lines(calls)) == 4
    assert not (python.parents[1] / "left over").exists()


def test_what_cannot_be_installed_is_said_and_nothing_kept(tmp_path: Path, calls: Path) -> None:
    installer(tmp_path, "echo; echo no version of a satisfies a==99 >&2; exit 7")
    with pytest.raises(FsdpTuneError) as raised:
        python_with(["a==99"], tmp_path / "cache")
    (problem,) = raised.value.problems
    assert problem.code == "compare-environment"
    assert "pip install --quiet --python" in problem.message
    assert problem.message.endswith("ended with exit code 7: no version of a satisfies a==99")
    assert [path for path in (tmp_path / "cache" / "environments").iterdir() if path.is_dir()] == []
    installer(tmp_path, "true")
    assert python_with(["a==99"], tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["-r files.txt", "--index-url=http://evil", "a b", "", "./folder"])
def test_what_is_no_requirement_is_a_usage_error(tmp_path: Path, calls: Path, text: str) -> None:
    with pytest.raises(FsdpTuneError) as raised:
        python_with(["a==1", text], tmp_path / "cache")
    assert raised.value.problems[0].code == "compare-with"
    assert lines(calls) == []


def test_chosen_version_is_kept_however_its_name_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`axolotl` needs another version of it, and does not find it."""
    installed: list[str] = []
    answers = {
        environments._METADATA.format("axolotl"): (0, json.dumps(["typing-extensions==1"])),
        environments._IMPORT.format(PARTLY["axolotl"], environments._MISSING): (
            1,
            "no module: typing_extensions",
        ),
    }
    monkeypatch.setattr(environments, "_output", lambda command: answers[command[-1]])
    monkeypatch.setattr(environments, "_run", lambda command: installed.append(command[-1]))
    (tmp_path / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    wanted = ["axolotl", "typing_extensions==4"]
    with pytest.raises(FsdpTuneError, match="cannot be imported"):
        environments._make(tmp_path, tmp_path / "bin" / "python", wanted, "home")
    assert "typing-extensions==1" not in installed


@pytest.mark.slow
@pytest.mark.e2e
def test_side_is_computed_with_a_package_that_is_installed_for_it(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    """The installed package hides the xxhash of this environment, and torch is that of this environment."""
    wheel = tmp_path / "packaging-99.0-py3-none-any.whl"
    import packaging

    with zipfile.ZipFile(wheel, "w") as archive:
        for file in Path(packaging.__file__).parent.rglob("*.py"):
            archive.write(file, Path("packaging", file.relative_to(Path(packaging.__file__).parent)))
        archive.writestr(
            "packaging-99.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: packaging\nVersion: 99.0\n"
        )
        archive.writestr(
            "packaging-99.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("packaging-99.0.dist-info/RECORD", "")
    arguments = ("compare", "gpt2_smoke", "--with", f"packaging @ {wheel.as_uri()}", "--json")
    done = cli(*arguments, XDG_CACHE_HOME=str(tmp_path / "cache"))
    found = document(done)
    assert done.returncode == 0, done.stderr
    python = Path(found["b"]["python"])
    assert python.is_relative_to(tmp_path / "cache")
    assert found["a"]["python"] == sys.executable
    assert (next(python.parents[1].glob("lib/python*/site-packages")) / "packaging-99.0.dist-info").is_dir()
    refused = cli("compare", "gpt2_smoke", "--with", "a", "--python", sys.executable, "--json")
    assert (refused.returncode, document(refused)["errors"][0]["code"]) == (2, "compare-with")
