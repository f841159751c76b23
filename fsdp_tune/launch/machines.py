"""What the supervisors of several machines tell each other, through the run directory that they share.

Each machine has one file, logs/machine-NN.json: which launch of the run it is in, and how that ended there. The first
machine judges for all and alone decides on another launch; the others follow its file. The files carry the first
machine's lock, so that those of an earlier command are never taken for this one's.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fsdp_tune.atomic import write_json
from fsdp_tune.errors import ExitCode, ExitReason, Problem
from fsdp_tune.launch.hang import Standing
from fsdp_tune.launch.lock import has_owner, read_owner
from fsdp_tune.launch.verdict import ECHO_CODES, Ended
from fsdp_tune.run_dir import RunDir
from fsdp_tune.units import format_seconds

LOOK_SECONDS = 1.0
"""Network file systems are not asked more often."""
GATHER_SECONDS = 90.0
"""For the other machines to end their ranks, once the first has; a network file system may show a file 30 s late."""
SHARE_SECONDS = 60.0
"""For the other machines to tell where their ranks stand."""
WORD_SECONDS = 600.0
"""For the first machine's word after a launch; hashing a large checkpoint takes it a while."""

State = Literal["running", "ended", "final"]


@dataclass(frozen=True, slots=True)
class Word:
    """The last that a machine said of itself."""

    machine: int
    launch: int
    """0 for the first launch of the command, then one more for each restart."""
    state: State
    """running; ended: this launch, here; final (of the first machine): no other launch will come."""
    ended: Ended | None = None
    standings: tuple[Standing, ...] = ()
    """Where its ranks stand, once nothing moves."""
    silent_seconds: float = 0.0


class Machines:
    """This machine's part in a run over several. One machine alone tells nobody, and nobody is waited for."""

    def __init__(self, run: RunDir, machine: int, count: int, *, patience_seconds: float) -> None:
        self._run, self._machine, self._count, self._patience_seconds = run, machine, count, patience_seconds
        self._launch = 0
        self._began = self._looked = time.monotonic()
        self._words: dict[int, Word] = {}
        self._identity: str | None = None

    @property
    def others(self) -> list[int]:
        return [machine for machine in range(self._count) if machine != self._machine]

    def begin(self, launch: int) -> None:
        """Tells that this machine starts its ranks for a launch."""
        self._launch, self._began = launch, time.monotonic()
        self._identity = self._identity or _identity(self._run)
        self._words = {}
        self._say(Word(self._machine, launch, "running"))

    def end(self, ended: Ended) -> None:
        self._say(Word(self._machine, self._launch, "ended", ended))

    def conclude(self, ended: Ended) -> None:
        """The first machine's: no other launch will come."""
        self._say(Word(self._machine, self._launch, "final", ended))

    def is_time_to_look(self) -> bool:
        """At most once a second, and never on a machine that is alone."""
        if not self.others or time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return True

    def trouble(self) -> Problem | None:
        """What ends the ranks here although they may still run: a machine that never came, or one whose ranks have ended badly."""
        for word in self._read_others():
            if word.ended is not None and word.ended.problem is not None:
                return Problem("machine-failed", f"machine {word.machine}: {word.ended.problem.message}", hint=word.ended.problem.hint)
        return self.missing() if time.monotonic() - self._began > self._patience_seconds else None

    def missing(self) -> Problem | None:
        """Machines that have not come to this launch; asked of the first machine, to which all the others come."""
        come = {word.machine for word in self._read_others()}
        absent = [machine for machine in self.others if machine not in come]
        if self._machine != 0 or not absent:
            return None
        waited = format_seconds(time.monotonic() - self._began)
        names = ", ".join(f"machine {machine}" for machine in absent)
        message = f"{self._count - len(absent)} of {self._count} machines came within {waited}; missing: {names}"
        hint = "start `fsdp-tune train … --machine-rank N` on each of them, with the same recipe; all must see the run directory"
        return Problem("machines-missing", message, hint=hint)

    def asked_to_look(self) -> float | None:
        """For how long nothing has moved, where another machine has found that and wants to know where the ranks of this one stand."""
        return max((word.silent_seconds for word in self._read_others() if word.standings), default=None)

    def share(self, standings: Sequence[Standing], silent_seconds: float) -> list[Standing]:
        """Tells where the ranks of this machine stand, and waits for the other machines to tell the same: all ranks that are known."""
        self._say(Word(self._machine, self._launch, "running", standings=tuple(standings), silent_seconds=silent_seconds))
        deadline = time.monotonic() + SHARE_SECONDS
        while not all(word.standings for word in self._read_others()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        every = [*standings, *(standing for word in self._read_others() for standing in word.standings)]
        return sorted(every, key=lambda standing: standing.rank)

    def verdict(self, ended: Ended) -> Ended:
        """The first machine's judgement for all: its own, or the first failure elsewhere that is no echo of another."""
        if ended.problem is None or not self.others:
            return ended
        deadline = time.monotonic() + GATHER_SECONDS
        while any(word.ended is None for word in self._read_others()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return combined(ended, [word.ended for word in self._read_others() if word.ended is not None])

    def next_launch(self, *, started: bool) -> int | Ended | None:
        """Waits for the first machine's word: the number of the next launch, or how the run ended; None where no word comes.

        `started`: whether this machine has taken part in a launch already.
        """
        deadline = time.monotonic() + (WORD_SECONDS if started else self._patience_seconds)
        while time.monotonic() < deadline:
            is_there = has_owner(self._run)
            word = self._read(0)
            if word is not None and word.state == "final" and started:
                return word.ended
            if word is not None and word.state == "running" and (word.launch > self._launch or not started):
                return word.launch
            if started and not is_there:
                return None
            time.sleep(LOOK_SECONDS)
        return None

    def _say(self, word: Word) -> None:
        if self.others:
            content = {
                "run": self._identity,
                "host": socket.gethostname(),
                "launch": word.launch,
                "state": word.state,
                "ended": word.ended.as_dict() if word.ended else None,
                "standings": [standing.as_dict() for standing in word.standings],
                "silent_seconds": word.silent_seconds,
            }
            write_json(_path(self._run, self._machine), content)

    def _read_others(self) -> list[Word]:
        """Of machines that are in this launch, by number. A machine that has gone on to the next one has ended this one."""
        for machine in self.others:
            word = self._read(machine)
            if word is not None and word.launch == self._launch:
                self._words[machine] = word
        return [self._words[machine] for machine in sorted(self._words)]

    def _read(self, machine: int) -> Word | None:
        try:
            raw: Any = json.loads(_path(self._run, machine).read_bytes())
            if raw["run"] != (self._identity or _identity(self._run)):
                return None
            standings = tuple(Standing(**each) for each in raw["standings"])
            return Word(machine, int(raw["launch"]), raw["state"], _ended(raw["ended"]), standings, float(raw["silent_seconds"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _path(run: RunDir, machine: int) -> Path:
    return run.logs / f"machine-{machine:02d}.json"


def machines_elsewhere(run: RunDir, count: int) -> set[int]:
    """Those of a run's machines that are not this one: processes on them cannot be seen from here."""
    owner = read_owner(run)
    hosts: dict[int, str] = {} if owner is None else {0: owner.host}
    for machine in range(1, count):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            hosts[machine] = str(json.loads(_path(run, machine).read_bytes())["host"])
    return {machine for machine, host in hosts.items() if host != socket.gethostname()}


def _identity(run: RunDir) -> str | None:
    owner = read_owner(run)
    return None if owner is None else f"{owner.host}:{owner.pid}:{owner.since}"


def _ended(raw: dict[str, Any] | None) -> Ended | None:
    if raw is None:
        return None
    problem = Problem.from_dict(raw["problem"]) if raw.get("problem") else None
    return Ended(ExitCode(raw["exit_code"]), ExitReason(raw["exit_reason"]), int(raw["step"]), problem)


def combined(ended: Ended, elsewhere: Sequence[Ended]) -> Ended:
    """`ended` with the problem of the machine where it began, and the largest step."""
    every = [ended, *elsewhere]
    cause = next((each for each in every if each.problem is not None and each.problem.code not in ECHO_CODES), ended)
    step = max(each.step for each in every)
    return replace(ended, exit_code=cause.exit_code, reason=cause.reason, step=step, problem=cause.problem)
