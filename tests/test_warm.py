"""Commands that are forks of a process that has imported the stack behave as new processes of Python do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")
CHILD = [sys.executable, "-m", "tests.warm_child"]


def run(*words: str, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHILD, *words], capture_output=True, text=True, check=False, **how)


@pytest.mark.parametrize("is_real", [pytest.param(True, marks=pytest.mark.cold), False])
def test_child_has_its_arguments_input_environment_folder_and_session(tmp_path: Path, is_real: bool) -> None:
    environment = os.environ | {"OF_A_TEST": "x", "PYTHONPATH": str(Path(warm.__file__).parents[1])}

    done = run("report", "a b", input="given", env=environment, cwd=tmp_path, start_new_session=True)

    expected = {"arguments": ["report", "a b"], "folder": str(tmp_path), "variable": "x", "read": "given"}
    assert json.loads(done.stdout) == expected | {"is_leader": True, "is_real": is_real}, done.stderr


def test_exit_codes_and_tracebacks_are_those_of_python() -> None:
    assert run("exit", "3").returncode == 3
    failed = run("raise")
    assert failed.returncode == 1
    assert failed.stderr.rstrip().endswith("ValueError: no sooner said")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signal_ends_a_child_and_is_its_exit_code(number: signal.Signals) -> None:
    with subprocess.Popen(
        [*CHILD, "wait"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        assert child.poll() is None
        child.send_signal(number)
        assert child.wait(10) == -number


def test_orphan_of_a_command_is_reported_and_ended() -> None:
    assert run("leave").returncode == 0
    [left] = warm.left_processes()
    assert left.endswith("an orphan of it")
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.split(",")[0]), 0)


def test_variable_that_libraries_read_at_import_starts_python() -> None:
    environment = os.environ | {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "PYTHONPATH": str(Path(warm.__file__).parents[1]),
    }
    assert json.loads(run("report", env=environment, stdin=subprocess.DEVNULL).stdout)["is_real"] is True
