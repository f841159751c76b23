"""Watch the ranks of one machine: processes, heartbeats, outcomes, and the first failure.

Processes are queried at each poll. Files may be on a shared file system, so a few a second are read in turn, whatever the number of
ranks. That is enough: a heartbeat has the time since its rank last made progress, and when it matters (a rank has ended, all ranks seem
to hang, a signal was received) every file is read at once.
"""

from __future__ import annotations

import time

import psutil

from fsdp_tune.launch.process_tree import find_ranks, is_alive
from fsdp_tune.launch.supervise.hang import STATES, collect_rank_states
from fsdp_tune.launch.supervise.verdict import GOOD_CODES, Death
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Heartbeat, Outcome, RankState, read_heartbeat, read_outcome

UNSEEN_SECONDS = 10.0
"""The agent starts its ranks together. A rank that is not seen this long after another one started and ended between two polls."""
READS_PER_SECOND = 4.0
"""Heartbeats read per second, over all ranks of this machine."""
SLOWEST_ROUND_SECONDS = 10.0
"""Limit for a round over very many ranks."""
OTHERS_DELAY_SECONDS = 60.0
"""Heartbeats of other machines are read through the shared directory, which may show them late."""
ALL_ROUND_SECONDS = 2.0
OTHERS_ROUND_SECONDS = 5.0
"""Least time between two full reads of the heartbeats of this machine and of the other machines, while ranks are silent."""
ENDED_PHASES = ("finished", "failed")


class HeartbeatTimes:
    """The last heartbeat of one rank, in monotonic seconds of this machine."""

    def __init__(self, now: float, *, is_here: bool) -> None:
        self._is_here = is_here
        self.beat: Heartbeat | None = None
        self.progressed_at = self.written_at = now
        """When the rank last made progress and when its file last changed, at the latest when that was read."""

    def read(self, run: RunDir, rank: int) -> None:
        beat, now = read_heartbeat(run, rank), time.monotonic()
        if beat is None:
            return
        if self.beat is None or beat.time != self.beat.time:
            self.written_at = now
        if self.beat is None or beat.progressed_at != self.beat.progressed_at:
            self.progressed_at = beat.progressed_at if self._is_here else now - beat.silent_seconds
        self.beat = beat


class RankWatch:
    """The ranks of one machine. Call `poll` a few times a second. Times are monotonic seconds."""

    def __init__(self, run: RunDir, ranks: range, world_size: int) -> None:
        now = time.monotonic()
        self._run = run
        self._ranks = ranks
        self._signs = {rank: HeartbeatTimes(now, is_here=True) for rank in ranks}
        self._others: dict[int, HeartbeatTimes] = {
            rank: HeartbeatTimes(float("-inf"), is_here=False) for rank in range(world_size) if rank not in ranks
        }
        self._others_read_at = float("-inf")
        self._turn, self._read_at = 0, now
        self._all_read_at = float("-inf")
        self._ended: dict[int, float] = {}
        self._outcome_seen: dict[int, float] = {}
        self._first_seen: float | None = None
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
        now = time.monotonic()
        if len(self.processes) < len(self._ranks):
            self.processes.update(find_ranks(launcher_pid, self._ranks))
            if self.processes and self._first_seen is None:
                self._first_seen = now
        self._read_some(now)
        for rank in self._ranks:
            if rank not in self._ended and self._is_gone(rank, now):
                self._ended[rank] = now
                self._read(rank)  # after it has ended: it writes its outcome last
                if not self.expects_deaths and rank not in self.outcomes:
                    self.deaths.append(Death(rank, time.time()))
        if self.failed_at is None and (self.deaths or any(outcome.exit_code not in GOOD_CODES for outcome in self.outcomes.values())):
            self.failed_at = now
            self.read_all()

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
        sign.read(self._run, rank)
        if rank in self._ended or sign.beat is None or sign.beat.phase in ENDED_PHASES:
            self._read_outcome(rank)

    def _read_outcome(self, rank: int) -> None:
        if rank not in self.outcomes:
            outcome = read_outcome(self._run, rank)
            if outcome is not None:
                self.outcomes[rank] = outcome
                self._outcome_seen[rank] = time.monotonic()

    def read_all(self) -> None:
        """Read the files of every rank of this machine now."""
        self._all_read_at = time.monotonic()
        for rank in self._ranks:
            self._read(rank)
            self._read_outcome(rank)

    def _is_gone(self, rank: int, now: float) -> bool:
        process = self.processes.get(rank)
        return not is_alive(process) if process is not None else self._was_missed(rank, now)

    def _was_missed(self, rank: int, now: float) -> bool:
        return self._first_seen is not None and now - self._first_seen > UNSEEN_SECONDS and self._signs[rank].beat is None

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
        now = time.monotonic()
        return [
            self.processes[rank]
            for rank, seen in self._outcome_seen.items()
            if rank in self.processes and now - seen > seconds and is_alive(self.processes[rank])
        ]

    def silence(self, limit_seconds: float) -> float | None:
        """Return the seconds without progress if beyond the limit, else None.

        A hang stops every rank: a hanging rank stops the others at their next collective, and ranks that wait for one that makes progress
        (such as writing a checkpoint to a slow disk) do not hang. A rank whose process cannot run writes no heartbeat and counts alone.
        """
        if self.failed_at is not None or all(rank in self.outcomes or rank in self._ended for rank in self._ranks):
            return None
        silent_seconds = self.silent_seconds
        if silent_seconds > limit_seconds / 2:
            self._read_others()
        if silent_seconds <= limit_seconds:
            return self._frozen_seconds(limit_seconds)
        if time.monotonic() - self._all_read_at < ALL_ROUND_SECONDS:
            return None
        self.read_all()
        silent_seconds = self.silent_seconds
        if silent_seconds <= limit_seconds or self._others_moved_within(min(limit_seconds / 2, OTHERS_DELAY_SECONDS)):
            return None
        return silent_seconds

    @property
    def silent_seconds(self) -> float:
        """Seconds since any rank of this machine made progress or ended."""
        progressed = (sign.progressed_at for sign in self._signs.values())
        return time.monotonic() - max([*progressed, *self._ended.values(), *self._outcome_seen.values()])

    def _frozen_seconds(self, limit_seconds: float) -> float | None:
        """Return the seconds since the last heartbeat of a rank that is stopped or in the kernel, if beyond the limit."""
        now = time.monotonic()
        for rank, sign in self._signs.items():
            if rank not in self._ended and rank not in self.outcomes and now - sign.written_at > limit_seconds:
                self._read(rank)
                process = self.processes.get(rank)
                if now - sign.written_at > limit_seconds and process is not None and _status(process) in STATES:
                    return now - sign.written_at
        return None

    def _read_others(self) -> None:
        """Read the heartbeats of other machines from the shared directory; only while all ranks here are silent."""
        now = time.monotonic()
        if now - self._others_read_at >= OTHERS_ROUND_SECONDS:
            self._others_read_at = now
            for rank, sign in self._others.items():
                sign.read(self._run, rank)

    def _others_moved_within(self, seconds: float) -> bool:
        now = time.monotonic()
        return any(now - sign.progressed_at < seconds for sign in self._others.values())

    def stacks(self) -> tuple[list[RankState], dict[int, str]]:
        """Return the standing and the stacks of every rank of this machine that still runs."""
        self.read_all()
        there = {rank: process for rank, process in self.processes.items() if is_alive(process) and rank not in self.outcomes}
        return collect_rank_states(self._run, there, self.beats)


def _status(process: psutil.Process) -> str | None:
    try:
        return process.status()
    except psutil.Error:
        return None
