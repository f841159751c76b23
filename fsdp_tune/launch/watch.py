"""The ranks of one machine as the supervisor sees them: processes, signs of life, outcomes, and the first failure."""

from __future__ import annotations

import time

import psutil

from fsdp_tune.launch.hang import Standing, look_at
from fsdp_tune.launch.processes import find_ranks, is_alive
from fsdp_tune.launch.ranks import Heartbeat, Outcome, read_heartbeat, read_outcome
from fsdp_tune.launch.verdict import GOOD_CODES, Death
from fsdp_tune.run_dir import RunDir

UNSEEN_SECONDS = 10.0
"""The agent starts its ranks together. One that was never seen so long after another began and ended between two looks."""
OTHERS_LOOK_SECONDS = 60.0
"""Ranks of other machines are looked at through the shared directory, which may show their files late."""


class RankWatch:
    """`look` is called a few times a second; everything else reads what the last look found. Times are monotonic seconds."""

    def __init__(self, run: RunDir, ranks: range, world_size: int) -> None:
        self._run = run
        self._ranks = ranks
        self._elsewhere = [rank for rank in range(world_size) if rank not in ranks]
        self._others: dict[int, tuple[object, float]] = {}
        self._beats: dict[int, Heartbeat] = {}
        self._changed: dict[int, float] = dict.fromkeys(ranks, time.monotonic())
        self._ended: dict[int, float] = {}
        self._outcome_seen: dict[int, float] = {}
        self._first_seen: float | None = None
        self.processes: dict[int, psutil.Process] = {}
        self.outcomes: dict[int, Outcome] = {}
        self.deaths: list[Death] = []
        self.failed_at: float | None = None
        self.expects_deaths = False
        """Set by who kills: what ends from then on is no news."""

    def look(self, launcher_pid: int) -> None:
        now = time.monotonic()
        if len(self.processes) < len(self._ranks):
            self.processes.update(find_ranks(launcher_pid, self._ranks))
            if self.processes and self._first_seen is None:
                self._first_seen = now
        for rank in self._ranks:
            beat = read_heartbeat(self._run, rank)
            if beat is not None:
                if rank not in self._beats or beat.progress != self._beats[rank].progress:
                    self._changed[rank] = now
                self._beats[rank] = beat
            process = self.processes.get(rank)
            is_gone = not is_alive(process) if process is not None else self._was_missed(rank, now)
            self.read_outcome(rank)  # after asking whether it is gone: an outcome is the last act
            if is_gone and rank not in self._ended:
                self._ended[rank] = now
                if not self.expects_deaths and rank not in self.outcomes:
                    self.deaths.append(Death(rank, time.time()))
        if self.failed_at is None and (self.deaths or any(outcome.exit_code not in GOOD_CODES for outcome in self.outcomes.values())):
            self.failed_at = now

    def _was_missed(self, rank: int, now: float) -> bool:
        return self._first_seen is not None and now - self._first_seen > UNSEEN_SECONDS and rank not in self._beats

    def read_outcome(self, rank: int) -> None:
        if rank not in self.outcomes:
            outcome = read_outcome(self._run, rank)
            if outcome is not None:
                self.outcomes[rank] = outcome
                self._outcome_seen[rank] = time.monotonic()

    def read_outcomes(self) -> None:
        for rank in self._ranks:
            self.read_outcome(rank)

    @property
    def last_step(self) -> int:
        """The largest step in any sign of life; 0 before the first."""
        return max((beat.step for beat in self._beats.values()), default=0)

    @property
    def alive(self) -> list[psutil.Process]:
        return [process for process in self.processes.values() if is_alive(process)]

    @property
    def all_ended_at(self) -> float | None:
        """When the last rank ended; None while one runs or has not been seen."""
        return max(self._ended.values()) if len(self._ended) == len(self._ranks) else None

    def lingering(self, seconds: float) -> list[psutil.Process]:
        """Ranks that wrote their outcome so long ago and still live."""
        now = time.monotonic()
        return [
            self.processes[rank]
            for rank, seen in self._outcome_seen.items()
            if rank in self.processes and now - seen > seconds and is_alive(self.processes[rank])
        ]

    def silence(self, limit_seconds: float) -> float | None:
        """Seconds since ANY rank got on, once that is beyond the limit. By our own clock: wall clocks jump, and differ.

        One rank that stands still stops them all at their next collective, and while one gets on (it writes a
        checkpoint to a slow disk, say) those that wait for it do not hang.
        """
        if self.failed_at is not None:
            return None
        if all(rank in self.outcomes or rank in self._ended for rank in self._ranks):
            return None
        silent_seconds = self.silent_seconds
        if silent_seconds > limit_seconds / 2:
            self._look_at_others()
        if silent_seconds <= limit_seconds or self._others_moved_within(min(limit_seconds / 2, OTHERS_LOOK_SECONDS)):
            return None
        return silent_seconds

    @property
    def silent_seconds(self) -> float:
        """Since any rank of this machine got on, or ended."""
        return time.monotonic() - max([*self._changed.values(), *self._ended.values(), *self._outcome_seen.values()])

    def _look_at_others(self) -> None:
        """Ranks of other machines, by the files that they share; asked only when all of ours are silent."""
        for rank in self._elsewhere:
            beat = read_heartbeat(self._run, rank)
            if beat is not None and beat.progress != self._others.get(rank, (None, 0.0))[0]:
                self._others[rank] = (beat.progress, time.monotonic())

    def _others_moved_within(self, seconds: float) -> bool:
        now = time.monotonic()
        return any(now - changed < seconds for _, changed in self._others.values())

    def stacks(self) -> tuple[list[Standing], dict[int, str]]:
        """Where every rank of this machine stands that is still there."""
        there = {rank: process for rank, process in self.processes.items() if is_alive(process) and rank not in self.outcomes}
        return look_at(self._run, there, self._beats)
