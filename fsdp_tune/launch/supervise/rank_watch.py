"""Watch the ranks of one machine: processes, heartbeats, outcomes, and the first failure; and kill them.

Processes are queried at each poll. Files may be on a shared file system, so a few a second are read in turn,
whatever the number of
ranks. That is enough: a heartbeat has the time since its rank last made progress, and when it matters (a rank
has ended, all ranks seem to hang, a signal was received) every file is read at once.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterable

import psutil

from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.ownership import is_alive
from fsdp_tune.launch.supervise.end_of_launch import GOOD_CODES, KILL_WAIT_SECONDS, Death
from fsdp_tune.launch.supervise.hang_diagnosis import STATES, collect_rank_states
from fsdp_tune.launch.supervise.retried_io import REFUSALS, reason_of
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import disk_refusal
from fsdp_tune.run.rank_files import (
    Heartbeat,
    Outcome,
    RankState,
    is_unreadable,
    read_heartbeat,
    read_outcome,
    unreadable_outcome,
)

UNSEEN_SECONDS = 10.0
"""The agent starts its ranks together. A rank that is not seen this long after another one started and ended
between two polls."""


READS_PER_SECOND = 4.0
"""Heartbeats read per second, over all ranks of this machine."""


SLOWEST_ROUND_SECONDS = 10.0
"""Limit for a round over very many ranks."""


QUIET_SECONDS = 60.0
"""After so long without progress of its ranks a machine reports that to the others; half of
`launch.hang_timeout` if that is less."""


ALL_ROUND_SECONDS = 2.0
"""Least time between two full reads of the heartbeats of this machine, while its ranks are silent."""


STARTUP_SECONDS = 600.0
"""Limit for a rank until its libraries are imported, unless `launch.hang_timeout` is longer. On a busy
machine or a cold file system an import takes minutes, and stands still for many seconds, so a short
`launch.hang_timeout` does not apply to it."""


IMPORTING = "importing"


HELD = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
"""States that no slow start explains."""


ENDED_PHASES = ("finished", "failed")


UNWRITTEN_SECONDS = 5.0
"""After so long without any new heartbeat the watch tries whether they can be written, and again each
`TRIAL_SECONDS`."""


TRIAL_SECONDS = 1.0


UNREAD_SECONDS = 60.0
"""After so long a rank that has ended counts as dead although its outcome, if there is one, cannot be looked
at."""


class HeartbeatTimes:
    """The last heartbeat of one rank, in seconds that this process lived through (`core.clocks`)."""

    def __init__(self, now: float) -> None:
        self.beat: Heartbeat | None = None
        self.progressed_at = self.written_at = now
        """When the rank last made progress and when its file last changed, at the latest when that was
        read."""
        self.refused_at = float("-inf")
        """When its file could last not be looked at. Silence counts from then on."""
        self.refusal: str | None = None

    def read(self, run: RunDir, rank: int, launch: str | None) -> None:
        try:
            beat, self.refusal = read_heartbeat(run, rank, launch), None
            if beat is None and run.rank_heartbeat(rank).is_dir():  # which the rank cannot replace
                raise IsADirectoryError(
                    errno.EISDIR, os.strerror(errno.EISDIR), str(run.rank_heartbeat(rank))
                )
        except REFUSALS as error:
            self.refused_at, self.refusal = LIVED.now(), reason_of(error)
            return
        now = LIVED.now()
        if beat is None:
            return
        if self.beat is None or beat.time != self.beat.time:
            self.written_at = now
        self.beat, self.progressed_at = beat, LIVED.at(beat.progressed_at)


class RankWatch:
    """The ranks of one machine. Call `poll` a few times a second. Times are seconds that this process lived
    through (`core.clocks`)."""

    def __init__(self, run: RunDir, ranks: range, launch: str | None = None) -> None:
        """`launch`: files of ranks of another launch are left out; None: there can be none."""
        now = LIVED.now()
        self._run, self._launch = run, launch
        self._ranks = ranks
        self._signs = {rank: HeartbeatTimes(now) for rank in ranks}
        self._turn, self._read_at = 0, now
        self._all_read_at = float("-inf")
        self._ended: dict[int, float] = {}
        self._outcome_seen: dict[int, float] = {}
        self._first_seen: float | None = None
        self._launcher: psutil.Process | None = None
        self._gone_at: dict[int, float] = {}
        self._unread: dict[int, Outcome] = {}
        """What stands for outcomes that could not be looked at, or are damaged."""
        self._unwritten: dict[int, Death] = {}
        """Ranks that have ended without an outcome while the disk took no files."""
        self._tried_at = self._refused_at = float("-inf")
        self.disk_refusal: str | None = None
        """Why heartbeats cannot be written at present: a full or read-only disk. Silence counts from the end
        of that."""
        self.processes: dict[int, psutil.Process] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.deaths: list[Death] = []
        self.failed_at: float | None = None
        self.expects_deaths = False
        """Set before terminating processes, so that their exits are not reported as failures."""

    @property
    def first_beat(self) -> Heartbeat | None:
        """The last heartbeat of the first rank of this machine."""
        return self._signs[self._ranks.start].beat

    def poll(self, launcher_pid: int) -> None:
        """Find the ranks of a launcher, and read what they have written and which of them have ended since
        the last call."""
        now = LIVED.now()
        if self._launcher is None and psutil.pid_exists(launcher_pid):
            self._launcher = psutil.Process(launcher_pid)
        if len(self.processes) < len(self._ranks):
            self.processes.update(find_ranks(launcher_pid, self._ranks))
            if self.processes and self._first_seen is None:
                self._first_seen = now
        self._read_some(now)
        self._try_disk(now)
        for rank in self._ranks:
            if rank not in self._ended and self._is_gone(rank, now):
                self._note_end(rank, now)
        if self.failed_at is None and (
            self.deaths or any(outcome.exit_code not in GOOD_CODES for outcome in self.outcomes.values())
        ):
            self.failed_at = now
            self.read_all()

    def _note_end(self, rank: int, now: float) -> None:
        """Record that a rank has ended, once its outcome could be looked at, which it writes last."""
        gone_at = self._gone_at.setdefault(rank, now)
        self._read(rank)
        self._read_outcome(rank)
        if rank not in self.outcomes and self._may_have_ended_well(rank) and now - gone_at < UNREAD_SECONDS:
            return
        self._ended[rank] = now
        if not self.expects_deaths and rank not in self.outcomes:
            self.deaths.append(self._unwritten.pop(rank, None) or Death(rank, time.time()))

    def _may_have_ended_well(self, rank: int) -> bool:
        """Return whether the disk may be why there is no outcome. The exit code is then known when all ranks
        have ended."""
        is_new = rank not in self._unread and rank not in self._unwritten and not self.expects_deaths
        if is_new and disk_refusal(self._run) is not None:
            self._unwritten[rank] = Death(rank, time.time())
        return rank in self._unread or rank in self._unwritten

    @property
    def refusal(self) -> str | None:
        """Why files of ranks cannot be looked at; None if all can."""
        of_outcomes = [
            outcome.problem.message for outcome in self._unread.values() if outcome.problem is not None
        ]
        return next(
            iter(
                [*(sign.refusal for sign in self._signs.values() if sign.refusal is not None), *of_outcomes]
            ),
            None,
        )

    @property
    def lacks_outcomes(self) -> bool:
        """Whether an outcome cannot be looked at."""
        return bool(self._unread)

    def known_ends(self) -> dict[int, Outcome]:
        """Return the outcomes, and a failure for each rank whose outcome cannot be looked at."""
        return self._unread | self.outcomes

    @property
    def known_deaths(self) -> list[Death]:
        """The ranks that have ended without an outcome, also if the disk took none."""
        return [
            *self.deaths,
            *(death for rank, death in self._unwritten.items() if rank not in self.outcomes),
        ]

    def _try_disk(self, now: float) -> None:
        """Without heartbeats, learn whether the disk refuses them: ranks that train on a full disk must not
        be taken for silent ones."""
        if now - max(sign.written_at for sign in self._signs.values()) <= UNWRITTEN_SECONDS:
            self.disk_refusal = None
        elif now - self._tried_at >= TRIAL_SECONDS:
            self._tried_at, self.disk_refusal = now, disk_refusal(self._run)
            self._refused_at = now if self.disk_refusal is not None else self._refused_at

    def _read_some(self, now: float) -> None:
        """Read the next few ranks' files, as many as are due since the last call."""
        per_second = max(READS_PER_SECOND, len(self._ranks) / SLOWEST_ROUND_SECONDS)
        due = int((now - self._read_at) * per_second)
        self._read_at += due / per_second
        for _ in range(min(due, len(self._ranks))):
            self._read(self._ranks[self._turn])
            self._turn = (self._turn + 1) % len(self._ranks)

    def _read(self, rank: int) -> None:
        """Read one rank's heartbeat, and its outcome where there may be one."""
        sign = self._signs[rank]
        sign.read(self._run, rank, self._launch)
        if rank in self._ended or sign.beat is None or sign.beat.phase in ENDED_PHASES:
            self._read_outcome(rank)

    def _read_outcome(self, rank: int) -> None:
        if rank in self.outcomes:
            return
        try:
            outcome = read_outcome(self._run, rank, self._launch)
        except REFUSALS as error:
            outcome = unreadable_outcome(self._run, rank, reason_of(error))
        self._unread.pop(rank, None)
        if outcome is None:
            return
        if is_unreadable(outcome):
            self._unread[rank] = outcome
        else:
            self.outcomes[rank] = outcome
            self._outcome_seen[rank] = LIVED.now()

    def read_all(self) -> None:
        """Read the files of every rank of this machine now."""
        self._all_read_at = LIVED.now()
        for rank in self._ranks:
            self._read(rank)
            self._read_outcome(rank)

    def _is_gone(self, rank: int, now: float) -> bool:
        process = self.processes.get(rank)
        return not is_alive(process) if process is not None else self._was_missed(rank, now)

    def _was_missed(self, rank: int, now: float) -> bool:
        sign = self._signs[rank]
        return (
            self._first_seen is not None
            and now - max(self._first_seen, sign.refused_at) > UNSEEN_SECONDS
            and sign.beat is None
        )

    @property
    def beats(self) -> dict[int, Heartbeat]:
        """The last heartbeat of each rank that has written one."""
        return {rank: sign.beat for rank, sign in self._signs.items() if sign.beat is not None}

    @property
    def last_step(self) -> int:
        """The largest step in any heartbeat; 0 before the first."""
        return max((beat.step for beat in self.beats.values()), default=0)

    @property
    def alive(self) -> list[psutil.Process]:
        return [process for process in self.processes.values() if is_alive(process)]

    @property
    def all_ended_at(self) -> float | None:
        """When the last rank ended; None while one runs or has not been seen."""
        return max(self._ended.values()) if len(self._ended) == len(self._ranks) else None

    def lingering(self, seconds: float) -> list[psutil.Process]:
        """Return the ranks that wrote their outcome so long ago and are still alive."""
        now = LIVED.now()
        return [
            self.processes[rank]
            for rank, seen in self._outcome_seen.items()
            if rank in self.processes and now - seen > seconds and is_alive(self.processes[rank])
        ]

    @property
    def is_starting(self) -> bool:
        """Whether a rank of this machine has not imported its libraries yet."""
        return any(
            (sign.beat is None or sign.beat.phase == IMPORTING)
            and rank not in self._ended
            and rank not in self.outcomes
            for rank, sign in self._signs.items()
        )

    def _limit(self, limit_seconds: float) -> float:
        """Return how long the ranks may make no progress: while one starts, `STARTUP_SECONDS` or more, unless
        their launcher is stopped."""
        is_slow = self.is_starting and (self._launcher is None or _status(self._launcher) not in HELD)
        return max(limit_seconds, STARTUP_SECONDS) if is_slow else limit_seconds

    def is_quiet(self, limit_seconds: float) -> bool:
        """Return whether the ranks of this machine have made no progress for a while, as it reports to the
        others."""
        return self.silent_seconds > (
            self._limit(limit_seconds) if self.is_starting else min(limit_seconds / 2, QUIET_SECONDS)
        )

    def hang_seconds(self, limit_seconds: float, *, others_are_quiet: bool) -> float | None:
        """Return the seconds without progress of ranks that hang, which are beyond the limit; None if none
        does.

        A hang stops every rank: a hanging rank stops the others at their next collective, and ranks that wait
        for one that makes progress (such as writing a checkpoint to a slow disk) do not hang. So ranks hang
        when all of this machine are silent and all other machines are quiet. A rank whose process cannot run
        writes no heartbeat and counts alone, whatever the others do.
        """
        if self.failed_at is not None or all(
            rank in self.outcomes or rank in self._ended for rank in self._ranks
        ):
            return None
        if not others_are_quiet or self.silent_seconds <= self._limit(limit_seconds):
            return self._frozen_seconds(limit_seconds)
        if LIVED.now() - self._all_read_at < ALL_ROUND_SECONDS:
            return None
        self.read_all()
        silent_seconds = self.silent_seconds
        return silent_seconds if silent_seconds > self._limit(limit_seconds) else None

    @property
    def silent_seconds(self) -> float:
        """Seconds since any rank of this machine made progress or ended, or could not have reported that."""
        progressed = (max(sign.progressed_at, sign.refused_at) for sign in self._signs.values())
        return LIVED.now() - max(
            [*progressed, *self._ended.values(), *self._outcome_seen.values(), self._refused_at]
        )

    def _frozen_seconds(self, limit_seconds: float) -> float | None:
        """Return the seconds since the last heartbeat of a rank that is stopped or in the kernel, if beyond
        the limit.

        Before the first one a rank in the kernel reads its libraries, and only a stopped one counts. While
        the disk takes no heartbeats none is missed.
        """
        now = LIVED.now()
        for rank, sign in self._signs.items():
            is_there = rank not in self._ended and rank not in self.outcomes
            if is_there and now - max(sign.written_at, sign.refused_at, self._refused_at) > limit_seconds:
                self._read(rank)
                process, states = self.processes.get(rank), HELD if sign.beat is None else STATES
                silent_seconds = now - max(sign.written_at, sign.refused_at, self._refused_at)
                if silent_seconds > limit_seconds and process is not None and _status(process) in states:
                    return silent_seconds
        return None

    def stacks(self) -> tuple[list[RankState], dict[int, str]]:
        """Return the standing and the stacks of every rank of this machine that still runs."""
        self.read_all()
        there = {
            rank: process
            for rank, process in self.processes.items()
            if is_alive(process) and rank not in self.outcomes
        }
        return collect_rank_states(self._run, there, self.beats)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except REFUSALS:
        return None


def find_ranks(launcher_pid: int, ranks: range) -> dict[int, psutil.Process]:
    """Return global rank → process for the launcher's children, which have RANK from torchrun's agent."""
    found: dict[int, psutil.Process] = {}
    try:
        children = psutil.Process(launcher_pid).children()
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            rank = int(child.environ().get("RANK", "-1"))
        except (psutil.Error, ValueError):  # just gone, or not yet past exec
            continue
        if rank in ranks:
            found[rank] = child
    return found


def kill_for_good(processes: Iterable[psutil.Process]) -> list[int]:
    """Send SIGKILL to each process, its descendants and its process group. Returns the pids that did not die.

    A process in uninterruptible sleep (D state: a dead file server, a wedged driver) outlives SIGKILL.
    """
    everyone: set[psutil.Process] = set()
    for process in processes:
        everyone.add(process)
        try:
            everyone.update(process.children(recursive=True))
        except REFUSALS:  # gone, or it cannot be looked at
            continue
    for process in everyone:
        _kill(process)
    deadline = time.monotonic() + KILL_WAIT_SECONDS
    while (alive := [process for process in everyone if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
        for process in alive:  # the first time may have been refused
            _kill(process)
    return sorted(process.pid for process in alive)


def _kill(process: psutil.Process) -> None:
    try:
        if process.is_running() and os.getpgid(process.pid) == process.pid:  # each rank leads its own session
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    except REFUSALS:
        pass
