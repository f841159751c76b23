"""The processes of a run, found by a mark in their environment, and the phase that they are in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import STAGE_MARK
from fsdp_tune.run.directory import RunDir
from tests.chaos.draw import AGENT, CHILD, COMMAND, LOADER, PHASES, RANK

MARK, MACHINE = "CHAOS_RUN", "CHAOS_MACHINE"
STEP_PHASES = ("training", "forward", "backward", "optimizer step")
FRESH_SECONDS = 0.3
"""A rank that has left a phase writes the next one within a second, so only a heartbeat as young as this
tells its phase, or one that was written since the last look."""
STALE_SECONDS = 2.0
_NAMES = {"starting": "launching"} | dict.fromkeys(STEP_PHASES, "training")


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    role: str
    machine: int
    rank: int | None
    """Of a rank and of what it has started."""

    def __str__(self) -> str:
        return f"{self.role} {self.pid}" + (f" (rank {self.rank})" if self.rank is not None else "")


def marked(token: str) -> list[Process]:
    """Return every process that carries the mark, wherever it is in the process tree. Zombies carry none."""
    found: list[Process] = []
    for place in Path("/proc").iterdir():
        if not place.name.isdigit() or int(place.name) == os.getpid():
            continue
        try:
            raw = (place / "environ").read_bytes()
            if f"{MARK}={token}\0".encode() not in raw:
                continue
            words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        variables = dict(entry.partition("=")[::2] for entry in raw.decode(errors="replace").split("\0"))
        rank = int(variables["RANK"]) if variables.get("RANK", "").isdigit() else None
        found.append(Process(int(place.name), parent, _role(words), int(variables[MACHINE]), rank))
    ranks = {process.pid for process in found if process.role == RANK}
    return [
        Process(p.pid, p.parent, LOADER, p.machine, p.rank) if p.role == RANK and p.parent in ranks else p
        for p in found
    ]


def _role(words: list[str]) -> str:
    if any(word.endswith("parent_death.py") for word in words):
        return "starter"  # about to become another
    if "accelerate.commands.launch" in words:
        return AGENT
    if "fsdp_tune.worker" in words:
        return RANK
    if "train" in words and "fsdp_tune" in words:
        return COMMAND
    return (
        CHILD
        if "--multiprocessing-fork" not in words and not any("resource_tracker" in word for word in words)
        else "helper"
    )


@dataclass(frozen=True)
class Moment:
    """What a run does at one time. Ranks are not in step, and a save may go on in the background: several
    phases at once."""

    phases: frozenset[str] = frozenset()
    step: int = 0
    phase_of_rank: dict[int, str] = field(default_factory=dict)
    """By rank, of the ranks that have written a heartbeat."""


class Watcher:
    """Read the phases of one start of the commands from heartbeats of live ranks, stages in the run
    directory, and the process table."""

    def __init__(self, run: RunDir, *, started_at: float, last_step: int) -> None:
        self._run, self._started_at, self._last_step = run, started_at, last_step
        self._agents: set[int] = set()
        """The agents that have run so far."""
        self._agents_of_beats: set[int] = set()
        """Those whose ranks have written heartbeats."""
        self._written_at: dict[int, float] = {}
        """By rank, when the heartbeat of the last look was written."""

    def moment(self, processes: Iterable[Process]) -> Moment:
        present = list(processes)
        agents = {process.pid for process in present if process.role == AGENT}
        if not agents:
            return Moment(frozenset(self._phases_without_agent(present)))
        self._agents |= agents
        pids = {process.pid for process in present if process.role == RANK}
        beats = {
            int(beat["rank"]): beat
            for path in self._heartbeats()
            if (beat := _read_beat(path)).get("pid") in pids
        }
        if not beats:
            return Moment(frozenset({"launching"} if not agents & self._agents_of_beats else ()))
        self._agents_of_beats |= agents
        step = max(int(beat["step"]) for beat in beats.values())
        named = {rank: _NAMES.get(beat["phase"], str(beat["phase"])) for rank, beat in beats.items()}
        now = time.time()
        fresh = {
            rank
            for rank, beat in beats.items()
            if self._written_at.get(rank) != beat["written_at"] > now - STALE_SECONDS
        }
        fresh |= {rank for rank, beat in beats.items() if now - beat["written_at"] < FRESH_SECONDS}
        self._written_at |= {rank: beat["written_at"] for rank, beat in beats.items()}
        phases = {named[rank] for rank in fresh}
        if "training" in named.values():  # saves in the background have no phase of their own
            phases |= {"saving" for _ in self._run.path.glob(f".checkpoint-[0-9]*{STAGE_MARK}*")}
        if "saving" in phases and step >= self._last_step:
            phases = phases - {"saving"} | {"final save"}
        return Moment(frozenset(phases & set(PHASES)), step, named)

    def _heartbeats(self) -> list[Path]:
        return sorted(self._run.logs.glob("rank-*.heartbeat.json"))

    def _phases_without_agent(self, processes: list[Process]) -> set[str]:
        if not any(process.role == COMMAND and process.machine == 0 for process in processes):
            return set()
        if self._agents:  # it may also decide on a restart
            return {"merging"} if self._has_ended_well() else set()
        # of a run that had finished before
        is_merging = any(self._run.path.glob(f".{self._run.merged.name}{STAGE_MARK}*"))
        return {"merging"} if is_merging else {"preparing"}

    def _has_ended_well(self) -> bool:
        try:
            return (
                self._run.outcome_json.stat().st_mtime >= self._started_at
                and json.loads(self._run.outcome_json.read_bytes())["exit_code"] == 0
            )
        except (OSError, ValueError):
            return False


def _read_beat(path: Path) -> dict[str, Any]:
    """Return a heartbeat with the time of its file; {} where it was removed or replaced meanwhile."""
    try:
        return json.loads(path.read_bytes()) | {"written_at": path.stat().st_mtime}
    except (OSError, ValueError):
        return {}


def listens_to(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, or ignores it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigCgt:", "SigIgn:"))]
    return any(mask & (1 << (number - 1)) for mask in masks)
