"""`plan --measure` as two commands on one host, which play two machines: real ranks over gloo."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.launch.test_attempts_real import environment
from tests.launch.test_machine_real_own_directories import PLAYED_HOST

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]
LIMIT_SECONDS = 600


def _free_port() -> int:
    """A port that is free, as the one after it probably is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class MeasuringPair:
    """The commands of two machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sitecustomize.py").write_text(PLAYED_HOST)
        self.keys: dict[str, Any] = {
            "launch.num_machines": 2,
            "launch.num_processes": 2,
            "launch.device": "cpu",
            "launch.main_process_ip": "127.0.0.1",
            "launch.main_process_port": _free_port(),
            "launch.num_cpu_threads_per_process": 1,
        }

    def start(self, number: int, *words: str, **keys: Any) -> subprocess.Popen[bytes]:
        own = {"output_dir": str(self.folder / "run"), "data.cache_dir": str(self.folder / "cache")}
        settings = [
            word
            for key, value in (own | self.keys | keys).items()
            for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        command = [sys.executable, "-m", "fsdp_tune", "plan", "--config", "gpt2_smoke", *settings, "--json"]
        command += ["--measure", "1", "--measure-steps", "2", "--machine-rank", str(number), *words]
        env = environment() | {
            "PLAYED_HOST": f"host-{number}",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{self.folder}",
        }
        with (
            (self.folder / f"machine-{number}.json").open("w") as out,
            (self.folder / f"machine-{number}.log").open("w") as log,
        ):
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=out, stderr=log)

    def both(self, *words: str, **keys: Any) -> list[subprocess.Popen[bytes]]:
        return [self.start(number, *words, **keys) for number in (0, 1)]

    def ends(self, *processes: subprocess.Popen[bytes]) -> list[int]:
        return [each.wait(timeout=LIMIT_SECONDS) for each in processes]

    def document(self, number: int) -> dict[str, Any]:
        return json.loads((self.folder / f"machine-{number}.json").read_text())

    @property
    def said(self) -> str:
        return "\n".join((self.folder / f"machine-{number}.log").read_text() for number in (0, 1))


def test_two_machines_measure_the_same_recipes(tmp_path: Path) -> None:
    pair = MeasuringPair(tmp_path)
    both = pair.both("--write", str(tmp_path / "best.yaml"))
    assert pair.ends(*both) == [0, 0], pair.said
    first, other = pair.document(0), pair.document(1)
    assert {each["outcome"] for each in first["measured"]} == {"measured"}, first["measured"]
    assert {each["num_processes"] for each in first["measured"]} == {2}
    assert other["measured"] == first["measured"]
    assert "num_machines: 2" in (tmp_path / "best.yaml").read_text()
    assert not list(tmp_path.glob("**/.fsdp-tune-measure-*"))


def test_machines_with_own_directories_measure(tmp_path: Path) -> None:
    pair = MeasuringPair(tmp_path)
    pair.keys["launch.shared_directory"] = False
    both = [
        pair.start(
            number,
            **{
                "output_dir": str(tmp_path / f"disk-{number}" / "run"),
                "data.cache_dir": str(tmp_path / f"disk-{number}" / "cache"),
            },
        )
        for number in (1, 0)
    ]
    assert pair.ends(*both) == [0, 0], pair.said
    assert {each["outcome"] for each in pair.document(0)["measured"]} == {"measured"}
    assert pair.document(1)["measured"] == pair.document(0)["measured"]


def test_killed_machine_ends_the_measurement_of_the_first(tmp_path: Path) -> None:
    pair = MeasuringPair(tmp_path)
    first, other = pair.both("--minutes", "1", "--measure", "2", **{"launch.hang_timeout": "30s"})
    deadline = time.monotonic() + LIMIT_SECONDS
    while "trial 1" not in pair.said:
        assert time.monotonic() < deadline, pair.said
        assert first.poll() is None, pair.said
        time.sleep(0.1)
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert pair.ends(first) == [1], pair.said
    assert "missing: machine 1" in pair.said
