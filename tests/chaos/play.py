"""Start the commands of a run, disturb them at the drawn moment, and wait for their end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from tests.chaos.draw import (
    AGENT,
    CLOCK,
    COMMAND,
    CUTS,
    DISKS,
    FULL_DISK,
    HARMLESS,
    KILL,
    LOADER,
    LONG_STOP,
    RANK,
    READ_ONLY_DISK,
    SHORT_STOP,
    SIGNALS,
    SLOW_DISK,
    Disturbance,
)
from tests.chaos.ends import Attempt, Situation
from tests.chaos.processes import MACHINE, MARK, Moment, Process, Watcher, listens_to, marked
from tests.cuda.environment import environment_on
from tests.launch.namespaces import ADDRESSES, Wire, on_machine

HANG_SECONDS = 30.0
LAST_STEP = 20
KEEP = 2
LIMIT_SECONDS = 1200.0
"""For one start of the commands to end, on a busy machine."""
GONE_SECONDS = 60.0
"""For what is left to end by itself. It is gone in five seconds, but not on a busy machine."""
PAST_SECONDS = 1.0
"""A phase that was not seen for so long before the disturbance had ended."""
DISMISS_SECONDS = 20.0
"""After the end of the first machine's command, for another command to see that."""
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
    device: str = "cpu"
    max_restarts: int = 0
    verify: str = "quick"
    """How the merge checks its output: `full` starts processes for that, which import torch."""
    wire: Wire | None = None
    """Of two machines, which are network namespaces."""
    pids: set[int] = field(default_factory=set)
    """Every process of the run so far."""
    clocks: dict[int, float] = field(default_factory=dict)
    """By machine, how far its clock has jumped."""
    disks: dict[int, str] = field(default_factory=dict)
    """By machine, which of `DISKS` it has; none for a healthy one."""

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    def log(self, machine: int) -> Path:
        """Return what the command of a machine has printed."""
        return self.folder / f"command-{machine}.log"

    def command(self, *, resume: bool) -> list[str]:
        keys = {
            **_KEYS,
            "launch.max_restarts": self.max_restarts,
            "merge.verify": self.verify,
            "output_dir": self.run.path,
        }
        keys["launch.device"] = self.device
        if self.machines > 1:
            keys |= {"launch.num_machines": self.machines, "launch.main_process_ip": ADDRESSES[0]}
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        return [
            sys.executable,
            "-m",
            "fsdp_tune",
            "train",
            "--config",
            "gpt2_smoke",
            *words,
            *(["--resume", "auto"] if resume else []),
        ]

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
        return environment_on(self.device, os.environ | values)

    def _control(self, machine: int) -> Path:
        return self.folder / f"control-{machine}"

    def control(self, machine: int) -> None:
        """Set the disk and the clock of a machine, for processes that run too."""
        path = self._control(machine)
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write(
                struct.pack(
                    "iiii",
                    *_DISK_MODES.get(self.disks.get(machine, ""), (0, 0, 0)),
                    int(self.clocks.get(machine, 0.0)),
                )
            )


class Play:
    """One attempt: `run` starts the commands, disturbs them, and returns how they ended."""

    def __init__(
        self, stage: Stage, planned: Sequence[Disturbance], dice: random.Random, lengths: Mapping[str, float]
    ) -> None:
        self._stage, self._dice, self._lengths = stage, dice, lengths
        self.pending = list(planned)
        """Disturbances that have not come yet. After one that may end the run, none comes."""
        self.done: list[Disturbance] = []
        self._token = secrets.token_hex(8)
        self._started_at = time.time()
        self._watcher = Watcher(stage.run, started_at=self._started_at, last_step=LAST_STEP)
        self._commands: list[subprocess.Popen[bytes]] = []
        self._processes: list[Process] = []
        self._scanned_at = 0.0
        self._attempt = Attempt([])
        self._done_at: float | None = None
        """When the last disturbance was done, monotonic seconds."""
        self._lasting: list[tuple[float, Disturbance, Process | None]] = []
        """Stops, bad disks and cuts with their ends (monotonic seconds), and the process that is stopped."""
        self._leader_ended_at: float | None = None
        self._saved: set[int] = set()
        self._old_restarts = _restarts(read_metrics(stage.run))
        self._phase_times: dict[str, tuple[float, float]] = {}
        """When each phase was seen first and last, monotonic seconds."""

    def lengths(self) -> dict[str, float]:
        """Return the seconds from the first to the last sight of each phase that was not disturbed."""
        if self._done_at is None:
            return {phase: last - first for phase, (first, last) in self._phase_times.items()}
        return {
            phase: last - first
            for phase, (first, last) in self._phase_times.items()
            if last < self._done_at - PAST_SECONDS
        }

    def run(self, *, resume: bool) -> Attempt:
        stage = self._stage
        stage.clocks.clear()
        stage.disks.clear()
        for machine in range(stage.machines):
            stage.control(machine)
        logs = [stage.log(machine) for machine in range(stage.machines)]
        try:
            for machine, log in enumerate(logs):
                self._commands.append(self._start(machine, log, resume=resume))
            self._watch()
        finally:
            self._undo(float("inf"))
            self._attempt.codes = [each.poll() for each in self._commands]
            self._end_what_is_left()
        self._attempt.texts = [log.read_text(errors="replace") for log in logs]
        self._attempt.problems = re.findall(
            r"error: .*?(?= hint:| ways out:|$)", " ".join(self._attempt.text.split())
        )
        self._note_metrics()
        return self._attempt

    def _start(self, machine: int, log: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        stage = self._stage
        words = stage.command(resume=resume) + (
            ["--machine-rank", str(machine)] if stage.machines > 1 else []
        )
        words = on_machine(machine, words) if stage.wire is not None else words
        environment = stage.environment(self._token, machine)
        with open(log, "wb") as file:
            return subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _watch(self) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(command.poll() is None for command in self._commands) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            now = time.monotonic()
            if now - self._scanned_at > SCAN_SECONDS:
                self._scan()
                self._note_metrics()
                self._note_hang()
                self._dismiss_followers(now)
            self._disturb_when_due(now)
            self._undo(now)

    def _scan(self) -> None:
        self._processes, self._scanned_at = marked(self._token), time.monotonic()
        self._stage.pids |= {process.pid for process in self._processes}

    def _dismiss_followers(self, now: float) -> None:
        """End what waits for a first machine that ended before its ranks started. It would wait for an hour,
        as is documented."""
        leader, *followers = self._commands
        if leader.poll() is None or any(disturbance.kind in CUTS for _, disturbance, _ in self._lasting):
            return
        self._leader_ended_at = self._leader_ended_at or now
        for machine, command in enumerate(followers, start=1):
            agents = [
                process for process in self._processes if process.role == AGENT and process.machine == machine
            ]
            is_waiting = command.poll() is None and not agents and machine not in self._attempt.dismissed
            if is_waiting and now - self._leader_ended_at > DISMISS_SECONDS:
                command.terminate()
                self._attempt.dismissed.add(machine)

    def _disturb_when_due(self, now: float) -> None:
        moment = self._watcher.moment(self._processes)
        for phase in moment.phases:
            self._phase_times[phase] = (self._phase_times.get(phase, (now, now))[0], now)
        for disturbance in self.pending:
            if self._is_due(disturbance, moment, now) and self._disturb(disturbance, moment):
                self.pending.remove(disturbance)
                self.done.append(disturbance)
                self._done_at = time.monotonic()
                if disturbance.kind in (*DISKS, *CUTS, SHORT_STOP, LONG_STOP):
                    self._lasting.append(
                        (self._done_at + disturbance.seconds, disturbance, self._attempt.target)
                    )
                if disturbance.kind not in HARMLESS:
                    self.pending.clear()
                return

    def _is_due(self, disturbance: Disturbance, moment: Moment, now: float) -> bool:
        if disturbance.phase not in moment.phases or self._step(moment) < disturbance.step:
            return False
        if self._lasting and disturbance.kind in (*DISKS, *SIGNALS):
            return False  # a machine has one disk, and a process that is stopped passes no signal on
        delay_seconds = disturbance.delay * self._lengths.get(disturbance.phase, 0.0)
        return now - self._phase_times[disturbance.phase][0] >= delay_seconds

    def _step(self, moment: Moment) -> int:
        """A heartbeat may show a step up to a second late, metrics.jsonl has only those that are done."""
        return max([moment.step, *(int(line["step"]) for line in read_metrics(self._stage.run)[-1:])])

    def _disturb(self, disturbance: Disturbance, moment: Moment) -> bool:
        """Return whether it could be done. A process may come a little later, or not in this phase."""
        self._scan()
        here = [process for process in self._processes if process.machine == disturbance.machine]
        if disturbance.kind not in (*DISKS, *CUTS, CLOCK):
            return self._disturb_process(disturbance, moment, here)
        if disturbance.kind in CUTS:
            assert self._stage.wire is not None
            self._stage.wire.cut()
        elif disturbance.kind == CLOCK:
            self._stage.clocks[disturbance.machine] = disturbance.seconds
            self._attempt.has_jumped = True
        else:
            self._stage.disks[disturbance.machine] = disturbance.kind
        self._stage.control(disturbance.machine)
        self._attempt.target, self._attempt.situation = None, Situation(self._step(moment))
        return True

    def _disturb_process(self, disturbance: Disturbance, moment: Moment, here: list[Process]) -> bool:
        candidates = [process for process in here if process.role == disturbance.target]
        if disturbance.target == RANK:  # ranks are not in step
            candidates = [
                each
                for each in candidates
                if moment.phase_of_rank.get(each.rank or 0, disturbance.phase) == disturbance.phase
            ]
        if not candidates:
            return False
        target = self._dice.choice(candidates)
        number = {KILL: signal.SIGKILL}.get(disturbance.kind) or getattr(
            signal, disturbance.kind, signal.SIGSTOP
        )
        listens = number in (signal.SIGKILL, signal.SIGSTOP) or listens_to(target.pid, number)
        try:
            if number == signal.SIGINT and target.role == COMMAND:
                os.killpg(target.pid, number)  # what Ctrl-C in a terminal does
            else:
                os.kill(target.pid, number)
        except ProcessLookupError:
            return False
        self._attempt.target, self._attempt.situation = (
            target,
            Situation(self._step(moment), self._is_over(target), listens, self._is_early(target)),
        )
        return True

    def _is_early(self, target: Process) -> bool:
        """Whether the command of the machine had not let its ranks start, which it says first."""
        printed = self._stage.log(target.machine).read_text(errors="replace")
        return re.search(r"^starting ranks? ", printed, re.MULTILINE) is None

    def _is_over(self, target: Process) -> bool:
        """Whether a process had nothing left to do when it was disturbed. A killed or stopped one writes
        nothing from then on."""
        run = self._stage.run
        if target.role in (RANK, LOADER):
            return run.rank_outcome(target.rank or 0).exists()
        if target.role == AGENT:
            ranks = {
                process.rank
                for process in self._processes
                if process.role == RANK and process.machine == target.machine
            }
            return all(run.rank_outcome(rank or 0).exists() for rank in ranks)
        return target.role == COMMAND and run.merged.is_dir()

    def _undo(self, now: float) -> None:
        """End the stops, bad disks and cuts whose time is up. A clock that has jumped stays as it is."""
        due = [each for each in self._lasting if each[0] < now]
        self._lasting = [each for each in self._lasting if each[0] >= now]
        for _, disturbance, target in due:
            if disturbance.kind in CUTS:
                assert self._stage.wire is not None
                self._stage.wire.restore()
            elif target is None:
                self._stage.disks.pop(disturbance.machine)
                self._stage.control(disturbance.machine)
            elif any(process.pid == target.pid for process in marked(self._token)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target.pid, signal.SIGCONT)

    def _note_hang(self) -> None:
        if self._done_at is None or self._attempt.named_after_seconds is not None:
            return
        reports = [
            path
            for path in self._stage.run.logs.glob("hang*.txt")
            if path.stat().st_mtime >= self._started_at
        ]
        if reports:
            self._attempt.named_after_seconds = time.monotonic() - self._done_at

    def _note_metrics(self) -> None:
        """Events are cut away when a run is resumed, so they are collected while it runs."""
        events = [line for line in read_metrics(self._stage.run) if "event" in line]
        self._saved |= {int(line["step"]) for line in events if line["event"] == "checkpoint_saved"}
        self._attempt.saved = sorted(self._saved)
        self._attempt.restarts = max(self._attempt.restarts, len(_restarts(events) - self._old_restarts))

    def _end_what_is_left(self) -> None:
        """Note the processes that outlive their command by more than they may, and kill them."""
        deadline = time.monotonic() + GONE_SECONDS
        while (
            (left := marked(self._token)) and None not in self._attempt.codes and time.monotonic() < deadline
        ):
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
    words: Sequence[str] = json.loads(run.launch_json.read_text(encoding="utf-8"))["argv"]
    if "--main_process_port" not in words:
        return None
    return int(words[words.index("--main_process_port") + 1]) or None
