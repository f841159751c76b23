"""Coordination of the supervisors of several machines, through the run directory that they share.

Each machine has one file, logs/machine-NN.json: which launch of the run it is in, and how that launch ended there. The first
machine judges for all and alone decides on another launch; the others follow its file.

A life of the run is one start of it: the claim of the first machine's command on the run directory, whose id every file
carries. Files of an older life may be found at any time, also of commands that were killed a moment ago, so another machine
joins by a handshake: it writes a token that is new, and takes the life from the file of the first machine once that repeats
the token. Before each launch the first machine waits until all others have confirmed it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.errors import ExitCode, ExitReason, Problem
from fsdp_tune.core.ownership import is_abandoned, read_owner
from fsdp_tune.core.units import format_seconds
from fsdp_tune.launch.machines.work import WorkWatch
from fsdp_tune.launch.supervise.hang import Standing
from fsdp_tune.launch.supervise.verdict import ECHO_CODES, Ended
from fsdp_tune.run.directory import RunDir

JOIN_SECONDS = 3600.0
"""For the first machine's command to check its inputs and to confirm that this machine is in. It may take longer while its count of
work moves (`launch.machines.work`), as it may for the next launch."""
LOOK_SECONDS = 1.0
"""Network file systems are not asked more often."""
GATHER_SECONDS = 90.0
"""For the other machines to end their ranks, once the first has; a network file system may show a file 30 s late."""
SHARE_SECONDS = 60.0
"""For the other machines to tell where their ranks stand."""
WORD_SECONDS = 600.0
"""For the first machine's word after a launch."""

NOT_STARTED = -1
"""The launch of a machine that has confirmed none."""

State = Literal["waiting", "gathering", "ready", "running", "ended", "final"]


@dataclass(frozen=True, slots=True)
class Word:
    """The last that a machine said of itself."""

    machine: int
    launch: int
    """0 for the first launch of the command, then one more for each restart."""
    state: State
    """waiting: to join. ready: for this launch. running. ended: this launch, here. Of the first machine alone: gathering (the
    others for this launch), and final (no other launch will come)."""
    ended: Ended | None = None
    standings: tuple[Standing, ...] = ()
    """Where its ranks stand, once nothing moves."""
    silent_seconds: float = 0.0


class Machines:
    """The part of this machine in a run over several. A machine alone writes nothing and waits for none."""

    def __init__(self, run: RunDir, machine: int, count: int, *, patience_seconds: float) -> None:
        self._run, self._machine, self._count, self._patience_seconds = run, machine, count, patience_seconds
        self._launch = NOT_STARTED
        self._looked = time.monotonic()
        self._words: dict[int, Word] = {}
        self._life: str | None = None
        self._token = secrets.token_hex(8)
        self._tokens: dict[int, str] = {}
        """Of the first machine: the token of each machine that has joined."""

    @property
    def others(self) -> list[int]:
        return [machine for machine in range(self._count) if machine != self._machine]

    def gather(self, launch: int) -> Problem | None:
        """Announce a launch on the first machine and wait until every other machine has confirmed it.

        Returns why the launch must not start: a machine that did not come, or one that failed before it started.
        """
        self._launch = launch
        if not self.others:
            return None
        owner = read_owner(self._run.lock)
        self._life = owner.claim if owner is not None else None
        started = time.monotonic()
        self._words = {}
        self._say(Word(self._machine, launch, "gathering"))
        while True:
            self._admit()
            present = [word.machine for word in self._read_others()]
            failure = self.trouble()
            if failure is not None or len(present) == len(self.others):
                break
            if time.monotonic() - started > self._patience_seconds:
                failure = self._missing(present, time.monotonic() - started)
                break
            time.sleep(LOOK_SECONDS)
        if failure is None:
            self._say(Word(self._machine, launch, "running"))
        return failure

    def join(self) -> Problem | None:
        """Join the life of the run that the first machine's command leads now; returns the problem if that does not come."""
        is_announced = False
        work = WorkWatch(self._run)
        while work.silent_seconds() < JOIN_SECONDS:
            if not is_announced or not _path(self._run, self._machine).exists():  # `--overwrite` moves it aside with the old run
                with contextlib.suppress(FileNotFoundError):
                    self._say(Word(self._machine, NOT_STARTED, "waiting"))
                    is_announced = True
            leader = _load(self._run, 0)
            if leader.get("tokens", {}).get(str(self._machine)) == self._token:
                self._life = leader["life"]
                return None
            time.sleep(LOOK_SECONDS)
        message = f"the first machine did not confirm that machine {self._machine} takes part in {self._run.path}"
        return Problem("first-machine-missing", message, hint="its own output says why")

    def environment(self) -> dict[str, str]:
        """Variables for the launcher: agents of different lives or launches never form one group."""
        return {"PET_RDZV_ID": f"{self._life}-{self._launch}"} if self.others else {}

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
        """Return the failure of another machine, which ends the ranks here although they may still run."""
        for word in self._read_others():
            if word.ended is not None and word.ended.problem is not None:
                return Problem("machine-failed", f"machine {word.machine}: {word.ended.problem.message}", hint=word.ended.problem.hint)
        return None

    def stopped_elsewhere(self) -> ExitReason | None:
        """Return why the ranks of another machine were stopped; None where none were. Those here would wait for them."""
        return next((word.ended.reason for word in self._read_others() if word.ended is not None and word.ended.is_stop), None)

    def _missing(self, present: Sequence[int], seconds: float) -> Problem:
        absent = [machine for machine in self.others if machine not in present]
        names = ", ".join(f"machine {machine}" for machine in absent)
        message = f"{self._count - len(absent)} of {self._count} machines came within {format_seconds(seconds)}; missing: {names}"
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

    def next_launch(self) -> int | Ended | None:
        """Wait for the next launch of the first machine and confirm it.

        Returns its number once all machines have confirmed it, or how the run ended; None where the first machine is gone.
        """
        confirmed: int | None = None
        deadline, work = time.monotonic() + WORD_SECONDS, WorkWatch(self._run)
        while time.monotonic() < deadline or work.silent_seconds() < WORD_SECONDS:
            is_led = self._is_led()  # before its file is read: the last thing that it writes may be there by then
            word = self._read(0)
            if word is not None and word.state == "final":
                return word.ended
            if word is not None and word.state == "gathering" and word.launch > self._launch and word.launch != confirmed:
                confirmed = word.launch
                self._say(Word(self._machine, word.launch, "ready"))
                deadline = time.monotonic() + self._patience_seconds + GATHER_SECONDS
            if word is not None and word.state == "running" and word.launch == confirmed:
                self._launch, self._words = word.launch, {}
                return word.launch
            if not is_led:
                return None
            time.sleep(LOOK_SECONDS)
        return None

    def _is_led(self) -> bool:
        owner = read_owner(self._run.lock)
        return owner is not None and owner.claim == self._life and not is_abandoned(self._run.lock)

    def _is_admitted(self, machine: int, token: object) -> bool:
        """Whether a file is by the command that joined, and not by an earlier one for that machine; checked by the first machine."""
        return self._machine != 0 or self._tokens.get(machine) == token

    def _admit(self) -> None:
        """Repeat the token of each machine that waits to join, in the file of this one."""
        waiting = {machine: str(raw["token"]) for machine in self.others if (raw := _load(self._run, machine)).get("state") == "waiting"}
        if waiting.items() - self._tokens.items():
            self._tokens |= waiting
            self._say(Word(self._machine, self._launch, "gathering"))

    def _say(self, word: Word) -> None:
        if self.others:
            content = {
                "life": self._life,
                "token": self._token,
                "tokens": self._tokens,
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
            if word is not None and word.launch in (self._launch, NOT_STARTED):
                self._words[machine] = word
        return [self._words[machine] for machine in sorted(self._words)]

    def _read(self, machine: int) -> Word | None:
        """Return the last word of a machine in this life; None where it has none, or only one of an older life."""
        raw = _load(self._run, machine)
        if self._life is None or raw.get("life") != self._life or not self._is_admitted(machine, raw.get("token")):
            return None
        try:
            standings = tuple(Standing(**each) for each in raw["standings"])
            return Word(machine, int(raw["launch"]), raw["state"], _ended(raw["ended"]), standings, float(raw["silent_seconds"]))
        except (ValueError, KeyError, TypeError):
            return None


def _path(run: RunDir, machine: int) -> Path:
    return run.logs / f"machine-{machine:02d}.json"


def _load(run: RunDir, machine: int) -> dict[str, Any]:
    """Return the content of a machine's file; {} where there is none."""
    try:
        raw: Any = json.loads(_path(run, machine).read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], raw) if isinstance(raw, dict) else {}


def machines_elsewhere(run: RunDir, count: int) -> set[int]:
    """Return the machines of a run that are not this one: processes on them cannot be seen from here."""
    owner = read_owner(run.lock)
    hosts = {} if owner is None else {0: owner.host}
    life = _load(run, 0).get("life")
    for machine in range(count):
        if (raw := _load(run, machine)).get("life") == life is not None and "host" in raw:
            hosts[machine] = str(raw["host"])
    return {machine for machine, host in hosts.items() if host != socket.gethostname()}


def _ended(raw: dict[str, Any] | None) -> Ended | None:
    if raw is None:
        return None
    problem = Problem.from_dict(raw["problem"]) if raw.get("problem") else None
    return Ended(ExitCode(raw["exit_code"]), ExitReason(raw["exit_reason"]), int(raw["step"]), problem)


def combined(ended: Ended, elsewhere: Sequence[Ended]) -> Ended:
    """Return `ended` with the cause of the end, on whichever machine that was, and the largest step."""
    every = [ended, *elsewhere]
    failure = next((each for each in every if each.problem is not None and each.problem.code not in ECHO_CODES), None)
    cause = failure or next((each for each in every if each.is_stop), ended)
    step = max(each.step for each in every)
    return replace(ended, exit_code=cause.exit_code, reason=cause.reason, step=step, problem=cause.problem)
