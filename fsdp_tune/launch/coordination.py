"""The counter with which the first machine of a run shows the others that it works before a launch.

Long work before a launch (tokenising rows, hashing a checkpoint) is counted in a file that the others read. Only a change of the count
matters, so the file of a killed command is not mistaken for work.

Coordinate the supervisors of several machines through the shared run directory.

Each machine writes one file, logs/machine-NN.json: its current launch of the run, and how that launch ended there. The first machine
judges for all and alone decides on another launch; the others follow its file.

A life of the run is one start of it: the claim of the first machine's command on the run directory, whose id is in every file. Files of
an older life may exist at any time, also of commands that were killed a moment ago. So another machine joins by a handshake: it writes
a new token, and reads the life from the file of the first machine once that repeats the token. Before each launch the first machine
waits until all others have confirmed it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.command import Bar
from fsdp_tune.core.errors import ExitReason, Problem
from fsdp_tune.core.ownership import is_abandoned, read_owner
from fsdp_tune.core.units import format_seconds
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import ECHO_CODES, RankState, Verdict, train_command

PUBLISH_SECONDS = 1.0


class WorkCounter:
    """Count rows or bytes and publish the count at most once a second; a run on one machine publishes nothing."""

    def __init__(self, run: RunDir, machines: int) -> None:
        self._paths = _paths(run) if machines > 1 else ()
        self._count = 0
        self._published_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for path in self._paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def advance(self, n: int = 1) -> None:
        self._count += n
        if self._paths and time.monotonic() - self._published_at >= PUBLISH_SECONDS:
            self._published_at = time.monotonic()
            with suppress(OSError):
                DISK.mkdir(self._paths[0].parent)
            for path in self._paths:
                with suppress(OSError):  # try the next path; if none is writable, the others wait for their usual time
                    write_json(path, {"count": self._count, "time": time.time()})
                    return


class CountedBar:
    """A progress bar that also counts work."""

    def __init__(self, bar: Bar, work: WorkCounter) -> None:
        self._bar, self._work = bar, work

    def advance(self, n: int = 1) -> None:
        self._bar.advance(n)
        self._work.advance(n)


class WorkWatch:
    """Follow the counter from another machine."""

    def __init__(self, run: RunDir) -> None:
        self._paths = _paths(run)
        self._seen = self._content()
        self._changed_at = time.monotonic()

    def silent_seconds(self) -> float:
        """Return the seconds since the count was last seen to change, or since this watch was made."""
        if (content := self._content()) != self._seen:
            self._seen, self._changed_at = content, time.monotonic()
        return time.monotonic() - self._changed_at

    def _content(self) -> list[bytes | None]:
        return [_read(path) for path in self._paths]


def _paths(run: RunDir) -> tuple[Path, ...]:
    """Return the paths to try: next to the run directory, which may not exist yet, else in its logs."""
    return run.path.with_name(f".{run.name}.work.json"), run.logs / "work.json"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


JOIN_SECONDS = 3600.0
"""Limit for the first machine to check its inputs and to confirm that this machine has joined. It may take longer while its count of work
changes (`launch.machines.work`), as it may before the next launch."""
READ_SECONDS = 1.0
"""Time between two reads of a file on a network file system."""
GATHER_SECONDS = 90.0
"""Limit for the other machines to end their ranks after the first; a network file system may show a file 30 s late."""
SHARE_SECONDS = 60.0
"""Limit for the other machines to publish where their ranks are."""
DECISION_SECONDS = 600.0
"""Limit for the decision of the first machine after a launch."""

NOT_STARTED = -1
"""The launch number of a machine that has confirmed none."""

State = Literal["waiting", "gathering", "ready", "running", "ended", "final"]


@dataclass(frozen=True, slots=True)
class Report:
    """The last published state of a machine."""

    machine: int
    launch: int
    """0 for the first launch of the command, then one more for each restart."""
    state: State
    """waiting: to join. ready: for this launch. running. ended: this launch, on this machine. On the first machine only: gathering (waits
    for the others), and final (there is no other launch)."""
    ended: Verdict | None = None
    rank_states: tuple[RankState, ...] = ()
    """Where its ranks are, in a hang."""
    silent_seconds: float = 0.0


class Machines:
    """This machine in a run over several. A single machine writes nothing and never waits."""

    def __init__(self, run: RunDir, machine: int, count: int, *, timeout_seconds: float) -> None:
        self._run, self._machine, self._count, self._timeout_seconds = run, machine, count, timeout_seconds
        self._launch = NOT_STARTED
        self._polled_at = time.monotonic()
        self._reports: dict[int, Report] = {}
        self._life: str | None = None
        self._token = secrets.token_hex(8)
        self._tokens: dict[int, str] = {}
        """On the first machine: the token of each machine that has joined."""

    @property
    def others(self) -> list[int]:
        return [machine for machine in range(self._count) if machine != self._machine]

    def gather(self, launch: int) -> Problem | None:
        """Announce a launch on the first machine and wait until every other machine has confirmed it.

        Returns why the launch must not start: a missing machine, or one that failed before the launch.
        """
        self._launch = launch
        if not self.others:
            return None
        owner = read_owner(self._run.lock)
        self._life = owner.claim if owner is not None else None
        started = time.monotonic()
        self._reports = {}
        self._publish(Report(self._machine, launch, "gathering"))
        while True:
            self._admit()
            present = [report.machine for report in self._read_others()]
            failure = self.failure_elsewhere()
            if failure is not None or len(present) == len(self.others):
                break
            if time.monotonic() - started > self._timeout_seconds:
                failure = self._missing(present, time.monotonic() - started)
                break
            time.sleep(READ_SECONDS)
        if failure is None:
            self._publish(Report(self._machine, launch, "running"))
        return failure

    def join(self) -> Problem | None:
        """Join the current life of the run. Returns the problem if the first machine does not confirm it."""
        is_announced = False
        work = WorkWatch(self._run)
        while work.silent_seconds() < JOIN_SECONDS:
            if not is_announced or not _path(self._run, self._machine).exists():  # `--overwrite` moves it away with the old run
                with contextlib.suppress(FileNotFoundError):
                    self._publish(Report(self._machine, NOT_STARTED, "waiting"))
                    is_announced = True
            leader = _load(self._run, 0)
            if leader.get("tokens", {}).get(str(self._machine)) == self._token:
                self._life = leader["life"]
                return None
            time.sleep(READ_SECONDS)
        message = f"the first machine did not admit machine {self._machine} to {self._run.path}"
        return Problem("first-machine-missing", message, hint="see the output of its command")

    def environment(self) -> dict[str, str]:
        """Return variables for the launcher, so that agents of different lives or launches never form one group."""
        return {"PET_RDZV_ID": f"{self._life}-{self._launch}"} if self.others else {}

    def end(self, ended: Verdict) -> None:
        self._publish(Report(self._machine, self._launch, "ended", ended))

    def conclude(self, ended: Verdict) -> None:
        """Publish, on the first machine, that there is no other launch."""
        self._publish(Report(self._machine, self._launch, "final", ended))

    def is_poll_due(self) -> bool:
        """Return whether to read the other machines: at most once a second, never on a single machine."""
        if not self.others or time.monotonic() - self._polled_at < READ_SECONDS:
            return False
        self._polled_at = time.monotonic()
        return True

    def failure_elsewhere(self) -> Problem | None:
        """Return the failure of another machine, which ends the ranks here too."""
        for report in self._read_others():
            if report.ended is not None and report.ended.problem is not None:
                return Problem(
                    "machine-failed", f"machine {report.machine}: {report.ended.problem.message}", hint=report.ended.problem.hint
                )
        return None

    def stopped_elsewhere(self) -> ExitReason | None:
        """Return why the ranks of another machine were stopped, or None. Ranks here would wait for them."""
        return next((report.ended.reason for report in self._read_others() if report.ended is not None and report.ended.is_stop), None)

    def _missing(self, present: Sequence[int], seconds: float) -> Problem:
        absent = [machine for machine in self.others if machine not in present]
        names = ", ".join(f"machine {machine}" for machine in absent)
        message = f"{self._count - len(absent)} of {self._count} machines joined within {format_seconds(seconds)}; missing: {names}"
        command = train_command(self._run, "--machine-rank", "N")
        hint = f"start `{command}` on each of them, with the same recipe and as many devices; all must see the run directory"
        return Problem("machines-missing", message, hint=hint)

    def silent_seconds_elsewhere(self) -> float | None:
        """Return the seconds without progress if another machine has detected a hang and waits for the rank_states of this one."""
        return max((report.silent_seconds for report in self._read_others() if report.rank_states), default=None)

    def share(self, rank_states: Sequence[RankState], silent_seconds: float) -> list[RankState]:
        """Publish the rank_states of this machine and wait for those of the others. Returns all known rank_states by rank."""
        self._publish(Report(self._machine, self._launch, "running", rank_states=tuple(rank_states), silent_seconds=silent_seconds))
        deadline = time.monotonic() + SHARE_SECONDS
        while not all(report.rank_states for report in self._read_others()) and time.monotonic() < deadline:
            time.sleep(READ_SECONDS)
        every = [*rank_states, *(standing for report in self._read_others() for standing in report.rank_states)]
        return sorted(every, key=lambda standing: standing.rank)

    def verdict(self, ended: Verdict) -> Verdict:
        """Return the verdict of the first machine for all: its own, or the first failure elsewhere that is not a consequence of another."""
        if ended.problem is None or not self.others:
            return ended
        deadline = time.monotonic() + GATHER_SECONDS
        while any(report.ended is None for report in self._read_others()) and time.monotonic() < deadline:
            time.sleep(READ_SECONDS)
        return combined(ended, [report.ended for report in self._read_others() if report.ended is not None])

    def next_launch(self) -> int | Verdict | None:
        """Wait for the next launch of the first machine and confirm it.

        Returns its number once all machines have confirmed it, or how the run ended; None if the first machine is gone.
        """
        confirmed: int | None = None
        deadline, work = time.monotonic() + DECISION_SECONDS, WorkWatch(self._run)
        while time.monotonic() < deadline or work.silent_seconds() < DECISION_SECONDS:
            is_led = self._is_led()  # before reading its file, to see its last write
            report = self._read(0)
            if report is not None and report.state == "final":
                return report.ended
            if report is not None and report.state == "gathering" and report.launch > self._launch and report.launch != confirmed:
                confirmed = report.launch
                self._publish(Report(self._machine, report.launch, "ready"))
                deadline = time.monotonic() + self._timeout_seconds + GATHER_SECONDS
            if report is not None and report.state == "running" and report.launch == confirmed:
                self._launch, self._reports = report.launch, {}
                return report.launch
            if not is_led:
                return None
            time.sleep(READ_SECONDS)
        return None

    def _is_led(self) -> bool:
        owner = read_owner(self._run.lock)
        return owner is not None and owner.claim == self._life and not is_abandoned(self._run.lock)

    def _is_admitted(self, machine: int, token: object) -> bool:
        """Return whether a file is from the command that joined, not from an earlier one; only the first machine checks."""
        return self._machine != 0 or self._tokens.get(machine) == token

    def _admit(self) -> None:
        """Repeat the token of each waiting machine in the file of this machine."""
        waiting = {machine: str(raw["token"]) for machine in self.others if (raw := _load(self._run, machine)).get("state") == "waiting"}
        if waiting.items() - self._tokens.items():
            self._tokens |= waiting
            self._publish(Report(self._machine, self._launch, "gathering"))

    def _publish(self, report: Report) -> None:
        if self.others:
            content = {
                "life": self._life,
                "token": self._token,
                "tokens": self._tokens,
                "host": socket.gethostname(),
                "launch": report.launch,
                "state": report.state,
                "ended": report.ended.as_dict() if report.ended else None,
                "rank_states": [standing.as_dict() for standing in report.rank_states],
                "silent_seconds": report.silent_seconds,
            }
            write_json(_path(self._run, self._machine), content)

    def _read_others(self) -> list[Report]:
        """Return the reports of machines in this launch, by number. A machine in the next launch has ended this one."""
        for machine in self.others:
            report = self._read(machine)
            if report is not None and report.launch in (self._launch, NOT_STARTED):
                self._reports[machine] = report
        return [self._reports[machine] for machine in sorted(self._reports)]

    def _read(self, machine: int) -> Report | None:
        """Return the last report of a machine in this life, or None."""
        raw = _load(self._run, machine)
        if self._life is None or raw.get("life") != self._life or not self._is_admitted(machine, raw.get("token")):
            return None
        try:
            ended = Verdict.from_dict(raw["ended"]) if raw["ended"] is not None else None
            rank_states = tuple(RankState.from_dict(each) for each in raw["rank_states"])
            return Report(machine, int(raw["launch"]), raw["state"], ended, rank_states, float(raw["silent_seconds"]))
        except (ValueError, KeyError, TypeError):
            return None


def _path(run: RunDir, machine: int) -> Path:
    return run.logs / f"machine-{machine:02d}.json"


def _load(run: RunDir, machine: int) -> dict[str, Any]:
    """Return the content of a machine's file; {} if there is none."""
    try:
        raw: Any = json.loads(_path(run, machine).read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], raw) if isinstance(raw, dict) else {}


def machines_elsewhere(run: RunDir, count: int) -> set[int]:
    """Return the machines of a run other than this one, whose processes are not visible here."""
    owner = read_owner(run.lock)
    hosts = {} if owner is None else {0: owner.host}
    life = _load(run, 0).get("life")
    for machine in range(count):
        if (raw := _load(run, machine)).get("life") == life is not None and "host" in raw:
            hosts[machine] = str(raw["host"])
    return {machine for machine, host in hosts.items() if host != socket.gethostname()}


def combined(ended: Verdict, elsewhere: Sequence[Verdict]) -> Verdict:
    """Return `ended` with the cause of the end on any machine, and the largest step."""
    every = [ended, *elsewhere]
    failure = next((each for each in every if each.problem is not None and each.problem.code not in ECHO_CODES), None)
    cause = failure or next((each for each in every if each.is_stop), ended)
    step = max(each.step for each in every)
    return replace(ended, exit_code=cause.exit_code, reason=cause.reason, step=step, problem=cause.problem)
