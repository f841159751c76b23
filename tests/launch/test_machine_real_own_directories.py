"""Two commands as two machines, each of which sees another host name: train, stop, lose a machine or its
disk, continue, merge.

They see no directory in common, but in one test.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir, checkpoint_step, held_checkpoints
from fsdp_tune.run.rank_files import Heartbeat, read_heartbeat
from tests.conftest import REPOSITORY
from tests.launch.test_attempts_real import environment, restarted
from tests.parity.runs import lines, loss_lines

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]
LIMIT_SECONDS = 600
PLAYED_HOST = """
import os, socket
if "PLAYED_HOST" in os.environ:
    socket.gethostname = lambda: os.environ["PLAYED_HOST"]
"""


class OwnMachines:
    """The commands of two machines, each with its own run directory and cache, in `machine-N`."""

    def __init__(self, folder: Path, **keys: Any) -> None:
        self.folder = folder
        self.runs = [RunDir(folder / f"machine-{number}" / "run") for number in (0, 1)]
        (folder / "sitecustomize.py").write_text(PLAYED_HOST)
        self.keys = {
            "launch.num_machines": 2,
            "launch.num_processes": 2,
            "launch.device": "cpu",
            "launch.main_process_ip": "127.0.0.1",
            "launch.num_cpu_threads_per_process": 1,
            "launch.shared_directory": False,
            "training.save_steps": 4,
            "training.logging_steps": 1,
            "training.eval_strategy": "no",
        } | keys

    def start(self, number: int, *words: str, **keys: Any) -> subprocess.Popen[str]:
        own = {
            "output_dir": str(self.runs[number].path),
            "data.cache_dir": str(self.folder / f"machine-{number}" / "cache"),
        }
        settings = [
            word
            for key, value in (self.keys | own | keys).items()
            for word in ("--set", f"{key}={json.dumps(value)}")
        ]
        command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *settings]
        command += ["--machine-rank", str(number), *words]
        env = environment() | {
            "PLAYED_HOST": f"host-{number}",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{self.folder}",
        }
        with (self.folder / f"machine-{number}.log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)

    def both(self, *words: str, **keys: Any) -> list[subprocess.Popen[str]]:
        return [self.start(number, *words, **keys) for number in (1, 0)]

    def ends(self, *processes: subprocess.Popen[str]) -> list[int]:
        return [each.wait(timeout=LIMIT_SECONDS) for each in processes]

    @property
    def said(self) -> str:
        return "\n".join((self.folder / f"machine-{number}.log").read_text() for number in (0, 1))

    def wait_for_step(self, step: int) -> Heartbeat:
        """Return the heartbeat of rank 1 once it has come so far."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while (beat := read_heartbeat(self.runs[1], 1)) is None or beat.step < step:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)
        return beat

    def losses(self) -> list[float]:
        return [line["loss"] for line in loss_lines(self.runs[0])]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "fsdp_tune", *words],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )


def test_run_is_the_one_of_a_shared_directory_and_continues_after_a_stop(tmp_path: Path) -> None:
    machines = OwnMachines(tmp_path, **{"training.max_steps": 12})
    both = machines.both()
    machines.wait_for_step(6)
    both[1].send_signal(signal.SIGTERM)
    assert machines.ends(*both) == [143, 143], machines.said
    newest = held_checkpoints(machines.runs[0])[0].step
    parts = [set(held_checkpoints(run)[0].files) for run in machines.runs]
    assert parts[0] - parts[1]
    assert parts[1] - parts[0]
    refused = machines.command("merge-checkpoint", str(machines.runs[0].path))
    assert refused.returncode == 1
    assert f"1 of its 9 files is not here; host-1:{machines.runs[1].path} had it" in " ".join(
        refused.stderr.split()
    )
    shown = machines.command("status", str(machines.runs[1].path)).stdout
    assert f"the end of the run are in {platform.node()}:{machines.runs[0].path}" in " ".join(shown.split())
    # Without the other machine's part nothing is trained again from step 0.
    aside = machines.runs[1].path.with_name("aside")
    machines.runs[1].path.rename(aside)
    assert machines.ends(*machines.both("--resume", "auto")) == [1, 1]
    assert f"checkpoint-{newest} cannot be used" in machines.said
    shutil.rmtree(machines.runs[1].path, ignore_errors=True)
    aside.rename(machines.runs[1].path)
    assert machines.ends(*machines.both("--resume", "auto")) == [0, 0], machines.said
    shared = sharing(tmp_path / "shared", machines.keys)
    assert shared.ends(*shared.both()) == [0, 0], shared.said
    assert machines.losses() == shared.losses()
    assert (machines.runs[0].merged / "model.safetensors").is_file()
    assert not machines.runs[1].merged.exists()


def sharing(folder: Path, keys: dict[str, Any]) -> OwnMachines:
    """Machines that see the same directory."""
    folder.mkdir(exist_ok=True)
    machines = OwnMachines(folder, **(keys | {"launch.shared_directory": True}))
    machines.runs = [RunDir(folder / "run")] * 2
    return machines


def test_killed_rank_restarts_both_from_their_parts(tmp_path: Path) -> None:
    machines = OwnMachines(
        tmp_path, **{"training.max_steps": 40, "launch.max_restarts": 2, "training.save_steps": 2}
    )
    both = machines.both()
    os.kill(machines.wait_for_step(8).pid, signal.SIGKILL)
    assert machines.ends(*both) == [0, 0], machines.said
    (event,) = restarted(machines.runs[0])
    assert event["step"] > 0
    assert [line["step"] for line in loss_lines(machines.runs[0])] == list(range(1, 41))


def test_mirror_has_all_parts_and_one_machine_continues(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    keys = {
        "training.max_steps": 40,
        "training.save_total_limit": 2,
        "launch.max_restarts": 3,
        "launch.min_machines": 1,
        "launch.replacement_timeout": "5s",
        "checkpoint.mirror": mirror.as_uri(),
    }
    machines = OwnMachines(tmp_path, **keys)
    second, first = machines.both()
    deadline = time.monotonic() + LIMIT_SECONDS
    while not any((mirror / "run").glob("checkpoint-*[0-9]/manifest.json")):
        assert time.monotonic() < deadline, machines.said
        time.sleep(0.2)
    second.kill()
    second.wait()
    shutil.rmtree(machines.runs[1].path)
    assert machines.ends(first) == [0], machines.said
    (change,) = [line for line in lines(machines.runs[0]) if line.get("event") == "machines_changed"]
    assert (change["machines"], change["ranks"]) == ([0], 1)
    assert change["step"] > 0
    assert [line["step"] for line in loss_lines(machines.runs[0])] == list(range(1, 41))
    assert (
        max(
            checkpoint_step(path.parent) or 0
            for path in (mirror / "run").glob("checkpoint-*[0-9]/manifest.json")
        )
        == 40
    )


def test_two_machines_resume_after_both_commands_were_killed(tmp_path: Path) -> None:
    """The second machine's command is the quicker one: it meets the files of the killed commands before the
    first machine's is there."""
    machines = sharing(
        tmp_path, {"launch.hang_timeout": "60s", "training.save_steps": 2, "training.max_steps": 40}
    )
    both = machines.both()
    machines.wait_for_step(8)
    for each in both:
        each.kill()
        each.wait()
    second = machines.start(1, "--resume", "auto")
    time.sleep(8)
    assert machines.ends(second, machines.start(0, "--resume", "auto")) == [0, 0], machines.said
    assert json.loads(machines.runs[0].machines_json.read_bytes()) == {"0": "host-0", "1": "host-1"}
    assert [line["step"] for line in loss_lines(machines.runs[0])] == list(range(1, 41))
    assert restarted(machines.runs[0]) == []
