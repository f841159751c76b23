"""The ranks of one machine as the supervisor sees them: processes, signs of life, outcomes, and the first failure."""

from __future__ import annotations

import time

import psutil

from fsdp_tune.errors import Problem
from fsdp_tune.launch.processes import find_ranks, is_alive
from fsdp_tune.launch.ranks import Heartbeat, Outcome, read_heartbeat, read_outcome
from fsdp_tune.launch.verdict import GOOD_CODES, Death
from fsdp_tune.run_dir import RunDir
from fsdp_tune.units import format_seconds


class RankWatch:
    """`look` is called a few times a second; everything else reads what the last look found. Times are monotonic seconds."""

    def __init__(self, run: RunDir, ranks: range) -> None:
        self._run = run
        self._ranks = ranks
        self._beats: dict[int, Heartbeat] = {}
        self._changed: dict[int, float] = dict.fromkeys(ranks, time.monotonic())
        self._ended: dict[int, float] = {}
        self._outcome_seen: dict[int, float] = {}
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
        for rank in self._ranks:
            beat = read_heartbeat(self._run, rank)
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank], self._changed[rank] = beat, now
            process = self.processes.get(rank)
            is_gone = process is not None and not is_alive(process)
            self.read_outcome(rank)  # after asking whether it is gone: an outcome is the last act
            if is_gone and rank not in self._ended:
                self._ended[rank] = now
                if not self.expects_deaths and rank not in self.outcomes:
                    self.deaths.append(Death(rank, time.time()))
        if self.failed_at is None and (self.deaths or any(outcome.exit_code not in GOOD_CODES for outcome in self.outcomes.values())):
            self.failed_at = now

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

    def stuck(self, limit_seconds: float) -> Problem | None:
        """The rank that has been silent longest, beyond the limit. By our own clock: wall clocks jump, and differ."""
        now = time.monotonic()
        waiting = [rank for rank in self._ranks if rank not in self.outcomes and rank not in self._ended]
        silent = {rank: now - self._changed[rank] for rank in waiting if now - self._changed[rank] > limit_seconds}
        if not silent or self.failed_at is not None:
            return None
        rank = max(silent, key=lambda each: silent[each])
        beat = self._beats.get(rank)
        doing = f"its last sign of life was `{beat.phase}` at step {beat.step}" if beat else "it has given no sign of life at all"
        others = f" ({len(silent)} ranks are silent)" if len(silent) > 1 else ""
        message = f"rank {rank} has been silent for {format_seconds(silent[rank])}: {doing}{others}"
        return Problem("hang", message, hint=f"`launch.hang_timeout` allows more; the log is {self._run.rank_log(rank)}")
