"""`fsdp-tune train` killed outright in the middle of training: five seconds later no process of the run is
left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fsdp_tune.run.directory import RunDir
from tests.conftest import REPOSITORY
from tests.cuda.devices import on_devices
from tests.cuda.environment import environment_on

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
PROMISED_SECONDS = 5.0
START_SECONDS = 240.0


def start(folder: Path, device: str) -> subprocess.Popen[bytes]:
    keys = (
        "training.max_steps=5000",
        "training.logging_steps=1",
        "training.save_steps=5",
        "checkpoint.probe=false",
        "output_dir=run",
    )
    keys += (f"launch.device={device}",)
    words = [word for key in keys for word in ("--set", key)]
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *words]
    environment = environment_on(
        device, {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    )
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_until_it_trains(run: RunDir, command: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert command.poll() is None, "the command ended by itself"
        if (
            run.metrics_jsonl.exists()
            and '"loss"' in run.metrics_jsonl.read_text()
            and list(run.path.glob("checkpoint-*"))
        ):
            return
        time.sleep(0.1)
    raise AssertionError("training did not begin")


def process_of(whole: list[psutil.Process], who: str) -> psutil.Process:
    """By its command line: the command itself, accelerate with torchrun's agent in it, or a rank."""
    words = {"command": "train", "accelerate": "accelerate.commands.launch", "rank": "fsdp_tune.worker"}[who]
    found = [process for process in whole if words in words_of(process)]
    if who == "rank":
        found = [process for process in found if "accelerate.commands.launch" not in words_of(process)]
    return found[0]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty for one that has ended since it was listed, as the probes of a start do."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@on_devices
@pytest.mark.parametrize("who", ["command", "accelerate"])
def test_no_process_survives_killed_launcher_for_five_seconds(who: str, tmp_path: Path, device: str) -> None:
    run = RunDir(tmp_path / "run")
    command = start(tmp_path, device)
    whole: list[psutil.Process] = []
    try:
        wait_until_it_trains(run, command)
        root = psutil.Process(command.pid)
        whole = [root, *root.children(recursive=True)]
        ranks = [json.loads(run.rank_heartbeat(rank).read_text())["pid"] for rank in range(2)]
        assert set(ranks) <= {process.pid for process in whole}
        shared_memory = set(Path("/dev/shm").iterdir())
        victim = process_of(whole, who)
        victim.kill()
        if victim.pid == command.pid:
            command.wait()
        below = (
            [process for process in whole if process.pid not in (command.pid, victim.pid)]
            if who != "command"
            else whole[1:]
        )
        _, alive = psutil.wait_procs(below, timeout=PROMISED_SECONDS)
        left = [
            process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        ]
        assert left == []
        if who == "accelerate":
            assert command.wait(timeout=60) == 5, "the command says that the launcher is lost"
        assert not [
            path
            for path in set(Path("/dev/shm").iterdir()) - shared_memory
            if path.name.startswith(("torch_", "psm_"))
        ]
    finally:
        for process in whole:
            if process.is_running():
                process.kill()
        command.kill()
        command.wait()
    from tests.faults.checks import half_files, verified_steps

    assert half_files(run.path) == []
    assert verified_steps(run), "the checkpoints of before are good"
