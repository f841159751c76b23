"""A run whose surroundings a test changes while it trains: its disk, its limits, its terminal, its
processes."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from tests.chaos.processes import MACHINE, MARK, Process, marked
from tests.conftest import REPOSITORY

LIMIT_SECONDS = 240.0
HANG_SECONDS = 15
"""A start on a busy machine takes longer than a few seconds without a heartbeat."""
KEYS: dict[str, Any] = {
    "training.max_steps": 100_000,
    "training.logging_steps": 1,
    "training.save_steps": 90_000,
    "training.eval_strategy": "no",
    "checkpoint.probe": False,
    "launch.hang_timeout": f"{HANG_SECONDS}s",
    "launch.num_cpu_threads_per_process": 1,
    "merge.at_end": False,
}
SHORT: dict[str, Any] = {"training.max_steps": 12, "training.save_steps": 4, "launch.hang_timeout": "60s"}
"""A run that ends."""


def words_of(run: RunDir, keys: Mapping[str, Any], *words: str) -> list[str]:
    settings = {**KEYS, "output_dir": run.path, **keys}
    options = [
        word
        for key, value in settings.items()
        for word in ("--set", f"{key}={str(value).lower() if value in (True, False) else value}")
    ]
    return [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *options, *words]


@dataclass
class Started:
    """A command that trains, found by a mark in the environment of its processes."""

    run: RunDir
    log: Path
    token: str
    command: subprocess.Popen[bytes] = field(init=False)
    signalled_at: float | None = None

    @property
    def text(self) -> str:
        return " ".join(self.log.read_text(encoding="utf-8", errors="replace").split())

    @property
    def steps(self) -> list[int]:
        return [int(line["step"]) for line in read_metrics(self.run) if "loss" in line]

    def processes(self, role: str | None = None) -> list[Process]:
        return [each for each in marked(self.token) if role is None or each.role == role]

    def process(self, role: str, rank: int | None = None) -> Process:
        """Return the process of a role, or of one rank. The table of processes may lack one for a moment."""
        found: list[Process] = []
        self.until(
            lambda: found.extend(each for each in self.processes(role) if rank in (None, each.rank)) or found
        )
        return found[0]

    def until(self, condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
        """Wait for a condition. Fails if the command ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.command.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(lambda: (self.steps or [0])[-1] >= step)

    def send(self, number: int) -> None:
        self.signalled_at = time.monotonic()
        self.command.send_signal(number)

    def end(self, seconds: float = LIMIT_SECONDS) -> int:
        """Wait for the end, when no process of the run may be left. Returns the exit code."""
        code = self.command.wait(timeout=seconds)
        deadline = time.monotonic() + 10
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == [], "orphans"
        return code

    def seconds_to_save(self) -> float:
        """Return the seconds from the signal to the newest complete checkpoint."""
        assert self.signalled_at is not None
        newest = max(path.stat().st_mtime for path in self.run.path.glob("checkpoint-*/manifest.json"))
        return newest - (time.time() - (time.monotonic() - self.signalled_at))


@contextlib.contextmanager
def started(
    folder: Path,
    keys: Mapping[str, Any] | None = None,
    *words: str,
    run: RunDir | None = None,
    prefix: Sequence[str] = (),
    **options: Any,
) -> Iterator[Started]:
    """Start `train` on two CPU ranks. What is left of it at the end of the block is killed."""
    with started_as(
        folder, lambda this: [*prefix, *words_of(this.run, keys or {}, *words)], run=run, **options
    ) as this:
        yield this


@contextlib.contextmanager
def started_as(
    folder: Path,
    command_of: Callable[[Started], list[str]],
    *,
    run: RunDir | None = None,
    environment: Mapping[str, str] | None = None,
    name: str = "command",
    **options: Any,
) -> Iterator[Started]:
    """Start any command, whose processes and theirs are known by a mark. Its output is in `name`.log, unless
    `options` of Popen differ."""
    this = Started(run or RunDir(folder / "run"), folder / f"{name}.log", secrets.token_hex(8))
    variables = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        MARK: this.token,
        MACHINE: "0",
        **(environment or {}),
    }
    with this.log.open("ab") as file:
        streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file} | options
        this.command = subprocess.Popen(command_of(this), cwd=folder, env=variables, **streams)
    try:
        yield this
    finally:
        for each in this.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)
        this.command.kill()
        this.command.wait()


def steps_of(run: RunDir) -> list[int]:
    return sorted(
        int(found[1])
        for path in run.path.glob("checkpoint-*")
        if (found := re.fullmatch(r"checkpoint-(\d+)", path.name))
    )


@contextlib.contextmanager
def small_disk(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own in memory. Needs root."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode == 0
    )
