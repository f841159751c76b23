"""Start the commands of a run, disturb them at the drawn moment, and wait for their end."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.run_dir import RunDir
from tests.chaos.draw import (
    CLOCK,
    DISKS,
    FULL_DISK,
    KILL,
    READ_ONLY_DISK,
    SLOW_DISK,
    Disturbance,
)
from tests.chaos.invariants import Attempt
from tests.chaos.processes import MACHINE, MARK, Moment, Process, marked, moment

HANG_SECONDS = 20.0
LAST_STEP = 16
KEEP = 2
LIMIT_SECONDS = 420.0
"""For one start of the commands to end, on a busy machine."""
GONE_SECONDS = 5.0
POLL_SECONDS = 0.02
SCAN_SECONDS = 0.25
_DISK_MODES = {SLOW_DISK: (1, 60_000, 1000), FULL_DISK: (2, 0, 0), READ_ONLY_DISK: (3, 0, 0)}
_KEYS = {
    "training.max_steps": LAST_STEP,
    "training.logging_steps": 1,
    "training.save_steps": 3,
    "training.eval_steps": 5,
    "training.save_total_limit": KEEP,
    "training.dataloader_num_workers": 1,
    "model.from_config.resid_pdrop": 0.1,
    "launch.hang_timeout": f"{HANG_SECONDS:.0f}s",
    "launch.num_cpu_threads_per_process": 1,
}


def compile_shim(folder: Path) -> Path:
    shim = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True)
    return shim


@dataclass
class Stage:
    """One run directory, and what it is started with."""

    folder: Path
    shim: Path
    machines: int
    max_restarts: int = 0
    pids: set[int] = field(default_factory=set)
    """Every process of the run so far."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    def command(self, *, resume: bool) -> list[str]:
        keys = {**_KEYS, "launch.max_restarts": self.max_restarts, "output_dir": self.run.path}
        if self.machines > 1:
            keys |= {"launch.num_machines": self.machines, "launch.main_process_ip": "127.0.0.1"}
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *words, *(["--resume", "auto"] if resume else [])]

    def environment(self, token: str, machine: int) -> dict[str, str]:
        values = {
            MARK: token,
            MACHINE: str(machine),
            "LD_PRELOAD": str(self.shim),
            "CHAOS_ROOT": str(self.run.path),
            "CHAOS_CONTROL": str(self._control(machine)),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "XDG_CACHE_HOME": str(self.folder.parents[1] / "cache"),
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        }
        return {**os.environ, **values}

    def _control(self, machine: int) -> Path:
        return self.folder / f"control-{machine}"

    def control(self, machine: int, disk: str | None = None, clock_seconds: float = 0.0) -> None:
        """Set the disk (one of `DISKS`, or None for a healthy one) and the clock of a machine, for processes that run too."""
        path = self._control(machine)
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write(struct.pack("iiii", *_DISK_MODES.get(disk or "", (0, 0, 0)), int(clock_seconds)))


class Play:
    """One attempt: `run` starts the commands, disturbs them once, and returns how they ended."""

    def __init__(self, stage: Stage, disturbance: Disturbance | None, dice: random.Random) -> None:
        self._stage, self._disturbance, self._dice = stage, disturbance, dice
        self._token = secrets.token_hex(8)
        self._started_at = time.time()
        self._commands: list[subprocess.Popen[bytes]] = []
        self._processes: list[Process] = []
        self._scanned_at = 0.0
        self._attempt = Attempt([])
        self._done_at: float | None = None
        """When the disturbance was done, monotonic seconds."""
        self._undo_at: float | None = None
        self._saved: set[int] = set()
        self._old_restarts = _restarts(stage.run.metrics())
        self.hit = False
        """Whether the drawn phase came."""

    def run(self, *, resume: bool) -> Attempt:
        stage = self._stage
        for machine in range(stage.machines):
            stage.control(machine)
        logs = [stage.folder / f"command-{machine}.log" for machine in range(stage.machines)]
        try:
            for machine, log in enumerate(logs):
                with open(log, "wb") as file:
                    self._commands.append(
                        subprocess.Popen(
                            stage.command(resume=resume) + (["--machine-rank", str(machine)] if stage.machines > 1 else []),
                            env=stage.environment(self._token, machine),
                            stdin=subprocess.DEVNULL,
                            stdout=file,
                            stderr=file,
                            start_new_session=True,
                        )
                    )
            self._watch()
        finally:
            self._undo()
            self._attempt.codes = [each.poll() for each in self._commands]
            self._end_what_is_left()
        self._attempt.text = "\n".join(log.read_text(errors="replace") for log in logs)
        self._attempt.problems = re.findall(r"error: .*?(?= hint:| ways out:|$)", " ".join(self._attempt.text.split()))
        self._note_metrics()
        return self._attempt

    def _watch(self) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(command.poll() is None for command in self._commands) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now - self._scanned_at > SCAN_SECONDS:
                self._scan()
                self._note_metrics()
                self._note_hang()
            if self._disturbance is not None and self._done_at is None:
                self._disturb_when_due(self._disturbance)
            if self._undo_at is not None and now > self._undo_at:
                self._undo()

    def _scan(self) -> None:
        self._processes, self._scanned_at = marked(self._token), time.monotonic()
        self._stage.pids |= {process.pid for process in self._processes}

    def _moment(self) -> Moment:
        return moment(self._stage.run, self._processes, started_at=self._started_at, last_step=LAST_STEP)

    def _disturb_when_due(self, disturbance: Disturbance) -> None:
        now = self._moment()
        if disturbance.phase not in now.phases or now.step < disturbance.step:
            return
        self._scan()
        here = [process for process in self._processes if process.machine == disturbance.machine]
        if disturbance.kind in (*DISKS, CLOCK):
            self._attempt.target = next(iter(here), None)
            if disturbance.kind == CLOCK:
                self._stage.control(disturbance.machine, clock_seconds=disturbance.seconds)
            else:
                self._stage.control(disturbance.machine, disk=disturbance.kind)
                self._undo_at = time.monotonic() + disturbance.seconds
        else:
            candidates = [process for process in here if process.role == disturbance.target]
            if not candidates:
                return  # it comes a little later, or not in this phase
            target = self._attempt.target = self._dice.choice(candidates)
            number = {KILL: signal.SIGKILL}.get(disturbance.kind) or getattr(signal, disturbance.kind, signal.SIGSTOP)
            try:
                os.kill(target.pid, number)
            except ProcessLookupError:
                return
            if number == signal.SIGSTOP:
                self._undo_at = time.monotonic() + disturbance.seconds
        self._done_at, self.hit = time.monotonic(), True

    def _undo(self) -> None:
        """End a stop or a bad disk. A clock that has jumped stays as it is."""
        self._undo_at = None
        if self._disturbance is None or self._done_at is None:
            return
        if self._disturbance.kind in DISKS:
            self._stage.control(self._disturbance.machine)
        elif (target := self._attempt.target) is not None and any(process.pid == target.pid for process in marked(self._token)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(target.pid, signal.SIGCONT)

    def _note_hang(self) -> None:
        if self._done_at is None or self._attempt.named_after_seconds is not None:
            return
        reports = [path for path in self._stage.run.logs.glob("hang*.txt") if path.stat().st_mtime >= self._started_at]
        if reports:
            self._attempt.named_after_seconds = time.monotonic() - self._done_at

    def _note_metrics(self) -> None:
        """Events are cut away when a run is resumed, so they are collected while it runs."""
        events = [line for line in self._stage.run.metrics() if "event" in line]
        self._saved |= {int(line["step"]) for line in events if line["event"] == "checkpoint_saved"}
        self._attempt.saved = sorted(self._saved)
        self._attempt.restarts = max(self._attempt.restarts, len(_restarts(events) - self._old_restarts))

    def _end_what_is_left(self) -> None:
        """Note the processes that outlive their command by more than they may, and kill them."""
        deadline = time.monotonic() + GONE_SECONDS
        while (left := marked(self._token)) and None not in self._attempt.codes and time.monotonic() < deadline:
            time.sleep(0.1)
        self._attempt.left = [str(process) for process in left] if None not in self._attempt.codes else []
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        for command in self._commands:
            command.wait()


def _restarts(lines: list[dict[str, Any]]) -> set[float]:
    """Return the times of restarts, by the clock of the run, which may have jumped."""
    return {line["time"] for line in lines if line.get("event") == "restarted"}


def port_of(run: RunDir) -> int | None:
    """The fixed port of the rendezvous of the last launch; None where the launcher chose one."""
    words: Sequence[str] = run.launch().get("argv", [])
    if "--main_process_port" not in words:
        return None
    return int(words[words.index("--main_process_port") + 1]) or None
