"""Draw disturbances: what is done, to which process, in which phase of a run."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

PHASES = (
    *("preparing", "launching", "importing", "loading the model", "reading back", "probing a save"),
    *("training", "saving", "evaluating", "final save", "merging"),
)
"""In the order of a run. `preparing` is the command before `accelerate launch`; `launching` is until the ranks start to import."""
SIGNALS = ("SIGHUP", "SIGTERM", "SIGINT")
KILL, SHORT_STOP, LONG_STOP = "SIGKILL", "short stop", "long stop"
SLOW_DISK, FULL_DISK, READ_ONLY_DISK = "slow disk", "full disk", "read-only disk"
CLOCK = "clock"
DISKS = (SLOW_DISK, FULL_DISK, READ_ONLY_DISK)
KINDS = (KILL, SHORT_STOP, LONG_STOP, *SIGNALS, *DISKS, CLOCK)
COMMAND, AGENT, RANK, LOADER, CHILD = "command", "agent", "rank", "loader", "child"
"""Processes of a run. A child is any other process that a command has started: it inspects the model, or checks the merged one."""

_BY_COMMAND = {"preparing": (COMMAND, CHILD), "merging": (COMMAND, CHILD)}
_EARLY = ("launching", "importing", "loading the model", "reading back")
"""Phases without processes of a data loader."""
MOST_IN_A_ROW = 3


@dataclass(frozen=True)
class Disturbance:
    kind: str
    phase: str
    target: str
    """Which process; a disk and a clock belong to a machine."""
    machine: int = 0
    step: int = 0
    """Not before this step."""
    seconds: float = 0.0
    """How long a stop or a bad disk lasts; for a clock, how far it jumps."""

    def __str__(self) -> str:
        where = f"machine {self.machine}" if self.kind in (*DISKS, CLOCK) else f"{self.target} of machine {self.machine}"
        how = f" {self.seconds:+.0f} s" if self.kind == CLOCK else f" {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{how}, {where}, {self.phase}" + (f" from step {self.step}" if self.step else "")


def draw(dice: random.Random, hits: Counter[str], *, machines: int, hang_seconds: float, last_step: int) -> Disturbance:
    """Draw one disturbance. Phases and kinds that were hit less often are more likely; `hits` counts both by name."""
    phase = _rare(dice, PHASES, hits)
    kind = _rare(dice, KINDS, hits)
    step = dice.randrange(1, last_step) if phase in ("training", "saving", "evaluating") else 0
    machine = 0 if phase == "merging" else dice.randrange(machines)
    if kind in DISKS:
        seconds = 2 * hang_seconds if kind == SLOW_DISK else dice.uniform(1.0, hang_seconds / 2)
        return Disturbance(kind, phase, "", machine, step, seconds)
    if kind == CLOCK:
        return Disturbance(kind, phase, "", machine, step, dice.choice((-1, 1)) * dice.choice((90, 3600, 86400)))
    target = dice.choice(_targets(phase))
    seconds = {SHORT_STOP: dice.uniform(0.5, hang_seconds / 2), LONG_STOP: hang_seconds + 20.0}.get(kind, 0.0)
    return Disturbance(kind, phase, target, machine, step, seconds)


def _targets(phase: str) -> tuple[str, ...]:
    if phase in _BY_COMMAND:
        return _BY_COMMAND[phase]
    return (COMMAND, AGENT, RANK) if phase in _EARLY else (COMMAND, AGENT, RANK, LOADER)


def _rare(dice: random.Random, names: tuple[str, ...], hits: Counter[str]) -> str:
    return dice.choices(names, [1 / (1 + hits[name]) ** 2 for name in names])[0]
