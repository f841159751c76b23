"""Allowed exit codes and messages of a run's commands after each disturbance."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.draw import (
    AGENT,
    CHILD,
    COMMAND,
    FULL_DISK,
    HARMLESS,
    KILL,
    LOADER,
    LONG_CUT,
    LONG_STOP,
    RANK,
    READ_ONLY_DISK,
    SIGNALS,
    Disturbance,
)
from tests.chaos.processes import Process

NAMING_SECONDS = 10.0
"""From `launch.hang_timeout` until the rank that stands still is named."""
BUSY_SECONDS = 20.0
"""What a busy machine may add to that. `tests/launch` measures the promise itself."""
OK, FAILED, LOST, INTERRUPTED, PREEMPTED = 0, 1, 5, 130, 143
STEPS_TO_STOP = {RANK: 3, AGENT: 10, COMMAND: 10}
"""Steps that a run may still do after a signal to such a process: it passes the signal on, and the ranks
agree on a step."""
STEPS_READ_AHEAD = 3
_REFUSED = {FULL_DISK: r"No space left on device", READ_ONLY_DISK: r"Read-only file system"}


class End(NamedTuple):
    code: int
    pattern: str = ""
    """Regular expression that the output of the command must match."""


@dataclass(frozen=True)
class Situation:
    """The run at the time of the disturbance."""

    step: int = 0
    is_over: bool = False
    """Whether the disturbed process had nothing left to do: its ranks had written their outcomes, or the
    merged model was there."""
    listens: bool = True
    """Whether the disturbed process handled or ignored the signal, as it does once it has started."""
    is_early: bool = False
    """Whether the command had not let the ranks start yet. A launcher that ends before has trained nothing,
    and another one takes its place."""


@dataclass
class Attempt:
    """One start of the commands of a run, to their end."""

    codes: list[int | None]
    """Exit codes by machine, as `Popen` has them; None: it did not end in time."""
    texts: list[str] = field(default_factory=list)
    """What each command printed."""
    problems: list[str] = field(default_factory=list)
    """The errors that they reported."""
    restarts: int = 0
    named_after_seconds: float | None = None
    """From the disturbance until a hang was reported."""
    saved: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were reported as saved."""
    target: Process | None = None
    """Which process was disturbed."""
    situation: Situation | None = None
    """None where nothing was disturbed (yet)."""
    has_jumped: bool = False
    """Whether a clock was set."""
    dismissed: set[int] = field(default_factory=set)
    """Machines whose commands waited for a first machine that had ended, and were ended by SIGTERM."""
    left: list[str] = field(default_factory=list)
    """Processes that have outlived the commands."""

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def judge(
    disturbance: Disturbance | None, attempt: Attempt, *, hang_seconds: float, last_step: int
) -> list[str]:
    """Compare how the commands ended with what the documentation promises for the disturbance."""
    found = [f"{process} has outlived the commands" for process in attempt.left]
    if "Traceback (most recent call last)" in attempt.text:
        found.append("an exception reached the terminal")
    if disturbance is None or attempt.situation is None:
        disturbance = None
    for machine, code in enumerate(attempt.codes):
        allowed = list(_ends(disturbance, attempt, machine, last_step))
        if not any(_fits(end, code, attempt, machine) for end in allowed):
            found.append(
                f"the command of machine {machine} {_ended(code, attempt, machine)}; allowed: "
                f"{_listed(allowed)}"
            )
    if attempt.restarts and (disturbance is None or disturbance.kind in HARMLESS):
        found.append(f"a healthy run was restarted {attempt.restarts} times")
    if disturbance is not None and disturbance.kind == LONG_STOP and "no progress" in attempt.text:
        limit = hang_seconds + NAMING_SECONDS + BUSY_SECONDS
        if attempt.named_after_seconds is None or attempt.named_after_seconds > limit:
            found.append(
                f"the hang was reported after {attempt.named_after_seconds} s, not within {limit:.0f} s"
            )
    return found


def _fits(end: End, code: int | None, attempt: Attempt, machine: int) -> bool:
    """A run that was restarted and then finished must have reported why it was restarted."""
    is_restarted = attempt.restarts > 0 and code == OK
    # the first machine alone decides on a restart
    text = attempt.text if is_restarted else attempt.texts[machine]
    return (end.code == code or (is_restarted and end.code not in (INTERRUPTED, PREEMPTED))) and bool(
        re.search(end.pattern, " ".join(text.split()))
    )


def _ended(code: int | None, attempt: Attempt, machine: int) -> str:
    if code is None:
        return "does not end"
    again = f" after {attempt.restarts} restarts" if attempt.restarts else ""
    return f"ended with {code}{again} ({'; '.join(attempt.problems) or 'no error'})"


def _listed(ends: Iterable[End]) -> str:
    return ", ".join(f"{end.code} with “{end.pattern}”" if end.pattern else str(end.code) for end in ends)


def _ends(disturbance: Disturbance | None, attempt: Attempt, machine: int, last_step: int) -> Iterator[End]:
    """Yield every end that is promised for the command of one machine."""
    if attempt.has_jumped and len(attempt.codes) > 1:  # compared while they prepare
        yield End(FAILED, r"differs from machine 0 .*: a clock that is")
    if machine in attempt.dismissed and (
        attempt.codes[0] != OK or _may_miss_the_end(disturbance, attempt, last_step)
    ):
        yield End(PREEMPTED)
    if disturbance is None or disturbance.kind in HARMLESS:
        yield End(OK)
        return
    assert attempt.situation is not None
    if disturbance.kind in _REFUSED:
        yield End(OK)
        yield End(FAILED, _REFUSED[disturbance.kind])
        if disturbance.machine != machine:  # a rank that cannot write its outcome is only missing there
            yield End(FAILED, r"rank \d+ ended before it could report")
            # its command may end before its rank does, and the rank is lost for the others
            yield End(LOST, rf"machine {disturbance.machine}: .*{_REFUSED[disturbance.kind]}")
        # the rank's log and the launcher's are there too; the other command repeats the verdict
        if disturbance.kind == READ_ONLY_DISK:
            yield End(FAILED, r"rank \d+ ended with exit code 1 before it could report")
        return
    # longer than `launch.hang_timeout`; before the first step and after the last, it may not be noticed
    if disturbance.kind == LONG_CUT:
        yield from _without_the_other(machine)
        if attempt.situation.step == 0 or last_step - attempt.situation.step <= STEPS_READ_AHEAD:
            yield End(OK)
        return
    assert attempt.target is not None
    late = attempt.situation.is_over
    if attempt.situation.is_early and attempt.target.role in (RANK, AGENT) and disturbance.kind != LONG_STOP:
        yield End(OK)
    steps_left = last_step - attempt.situation.step
    if disturbance.kind == KILL:
        yield from _of_a_kill(attempt.target, machine, late=late, steps_left=steps_left)
    elif disturbance.kind == LONG_STOP:
        yield from _of_a_stop(disturbance.phase, attempt.target, machine, late=late, steps_left=steps_left)
    else:
        yield from _of_a_signal(
            disturbance,
            attempt,
            machine,
            late=late or steps_left <= STEPS_TO_STOP.get(attempt.target.role, 0),
        )


def _may_miss_the_end(disturbance: Disturbance | None, attempt: Attempt, last_step: int) -> bool:
    """Whether the link was cut after the last step, or the process that serves the machines may have stood
    still: the first machine tells the others its end for `launch.machines.store.SERVED_SECONDS`, not
    longer."""
    if disturbance is None or attempt.situation is None:
        return False
    if disturbance.kind == LONG_CUT:
        return attempt.situation.step >= last_step
    return (
        disturbance.kind == LONG_STOP
        and attempt.target is not None
        and attempt.target.role == CHILD
        and attempt.target.machine == 0
    )


def _of_a_kill(target: Process, machine: int, *, late: bool, steps_left: int) -> Iterator[End]:
    match target.role:
        case "rank":
            yield End(LOST, rf"rank {target.rank} was killed by SIGKILL")
        case "loader":
            yield End(
                FAILED,
                r"a process of the data loader is gone .* (is killed by signal: Killed|exited unexpectedly)",
            )
            late = late or steps_left <= STEPS_READ_AHEAD
        case "agent":
            yield End(LOST, r"the launcher was killed by SIGKILL")
        case "child":
            yield from _of_a_killed_child("SIGKILL")
        case _ if target.machine == machine:
            yield End(-signal.SIGKILL)
            return
        case _:
            yield from _without_the_other(machine)
    if late:
        yield End(OK)


def _of_a_killed_child(name: str) -> Iterator[End]:
    """It may have answered before. Where only a comparison is lost, a notice says so."""
    yield End(OK)
    yield End(FAILED, rf"was killed by {name}")


def _without_the_other(machine: int) -> Iterator[End]:
    """Of a command whose run has lost the command of the other machine."""
    yield End(LOST, r"error: ")
    yield End(FAILED, r"missing: machine 1|machine 1: " if machine == 0 else r"the first machine")


def _of_a_stop(phase: str, target: Process, machine: int, *, late: bool, steps_left: int) -> Iterator[End]:
    if target.role in (RANK, LOADER):
        yield End(LOST, rf"no progress for [^:]*: rank {target.rank} \(")
        if late or (target.role == LOADER and steps_left <= STEPS_READ_AHEAD):
            yield End(OK)
        return
    yield End(OK)
    if target.role == AGENT:  # ranks need it until they have found each other
        yield End(LOST, r"no progress for [^:]*: rank .*its launcher is stopped \(SIGSTOP\)")
    if target.role == COMMAND and target.machine != 0 and phase == "preparing":
        yield from _without_the_other(machine)


def _of_a_signal(disturbance: Disturbance, attempt: Attempt, machine: int, *, late: bool) -> Iterator[End]:
    target, situation = attempt.target, attempt.situation
    assert target is not None
    assert situation is not None
    number = signal.Signals[disturbance.kind]
    stopped = End(INTERRUPTED if number == signal.SIGINT else PREEMPTED)
    if target.role == LOADER:  # such processes ignore signals, since a launcher may send them to all
        yield End(OK)
    elif target.role == CHILD:
        yield from _of_a_killed_child(disturbance.kind)
    elif target.role == COMMAND and target.machine == machine:
        yield stopped
        if not situation.listens:
            yield End(-number)
    elif (
        disturbance.phase == "merging" and target.role == COMMAND
    ):  # the other machine has nothing to do with it
        yield End(OK)
    else:
        yield stopped
        if not situation.listens or attempt.situation.step == 0:
            yield End(LOST, rf"was killed by {disturbance.kind}")
            yield End(FAILED, rf"{disturbance.kind}|KeyboardInterrupt")
        if target.role == COMMAND and disturbance.phase == "preparing":
            yield from _without_the_other(machine)
    if late and disturbance.kind in SIGNALS:
        yield End(OK)
