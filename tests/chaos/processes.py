"""The processes of a run, found by a mark in their environment, and the phase that they are in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.launch.ranks import verdict_path
from fsdp_tune.run_dir import RunDir
from tests.chaos.draw import AGENT, CHILD, COMMAND, LOADER, RANK

MARK, MACHINE = "CHAOS_RUN", "CHAOS_MACHINE"
STEP_PHASES = ("training", "forward", "backward", "optimizer step")
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
    return [Process(p.pid, p.parent, LOADER, p.machine, p.rank) if p.role == RANK and p.parent in ranks else p for p in found]


def _role(words: list[str]) -> str:
    if any(word.endswith("leash.py") for word in words):
        return "leash"  # about to become another
    if "accelerate.commands.launch" in words:
        return AGENT
    if "fsdp_tune.worker" in words:
        return RANK
    if "train" in words and "fsdp_tune" in words:
        return COMMAND
    return CHILD if "--multiprocessing-fork" not in words and not any("resource_tracker" in word for word in words) else "helper"


@dataclass(frozen=True)
class Moment:
    """What a run does at one time. Ranks are not in step, and a save may go on in the background: several phases at once."""

    phases: frozenset[str]
    step: int = 0


def moment(run: RunDir, processes: Iterable[Process], *, started_at: float, last_step: int) -> Moment:
    """Return the phases from the heartbeats of live ranks, the stages in the run directory, and the process table."""
    present = list(processes)
    if not any(process.role == AGENT for process in present):
        return Moment(frozenset(_of_command(run, present, started_at)))
    pids = {process.pid for process in present if process.role == RANK}
    beats = [beat for path in sorted(run.logs.glob("rank-*.heartbeat.json")) if (beat := _beat(path)).get("pid") in pids]
    step = max((int(beat["step"]) for beat in beats), default=0)
    phases = {_NAMES.get(beat["phase"], beat["phase"]) for beat in beats} or {"launching"}
    if "training" in phases:  # saves in the background have no phase of their own
        phases |= {"saving" for stage in run.path.glob(".checkpoint-[0-9]*.stage-*")}
    if "saving" in phases and step >= last_step:
        phases = phases - {"saving"} | {"final save"}
    return Moment(frozenset(phases), step)


def _of_command(run: RunDir, processes: list[Process], started_at: float) -> set[str]:
    if not any(process.role == COMMAND for process in processes):
        return set()
    try:
        has_ended = verdict_path(run).stat().st_mtime >= started_at
    except OSError:
        has_ended = False
    return {"merging"} if has_ended else {"preparing"}


def _beat(path: Path) -> dict[str, object]:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):  # it may be removed or replaced at any time
        return {}
