"""Hang detection from heartbeats, and how often they are read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fsdp_tune.core.clocks import Gap, LivedClock
from fsdp_tune.core.errors import ExitCode, ExitReason
from fsdp_tune.launch.supervise import rank_watch as watches
from fsdp_tune.launch.supervise.rank_watch import RankWatch
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Heartbeat, Outcome, clear

LIMIT_SECONDS = 30.0
PHASES = [
    "starting",
    "importing",
    "loading the model",
    "reading back",
    "training",
    "forward",
    "evaluating",
    "probing a save",
    "saving",
]


class Clock:
    """Stands in for the module `time` of the watch."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Ranks:
    """Ranks that write heartbeats once a second of the clock's time. A stopped one writes none; a silent one
    makes no progress."""

    def __init__(self, run: RunDir, clock: Clock, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.clock, self.count = run, clock, count
        self.phase = "training"
        self.stopped: set[int] = set()
        self.progressed = dict.fromkeys(range(count), clock.now)
        self.processes: dict[int, Any] = {
            rank: SimpleNamespace(pid=rank, status=self._status(rank)) for rank in range(count)
        }
        self.reads = 0
        monkeypatch.setattr(watches, "time", clock)
        monkeypatch.setattr(
            watches, "LIVED", SimpleNamespace(now=clock.monotonic, at=lambda monotonic: monotonic)
        )
        monkeypatch.setattr(
            watches, "find_ranks", lambda pid, wanted: {rank: self.processes[rank] for rank in wanted}
        )
        monkeypatch.setattr(watches, "is_alive", lambda process: True)
        monkeypatch.setattr(watches, "read_heartbeat", lambda _, rank, launch: self._read(rank))
        monkeypatch.setattr(watches, "read_outcome", lambda *_: self._read(-1))
        self.beats: dict[int, Heartbeat] = {}

    def _status(self, rank: int) -> Callable[[], str]:
        return lambda: psutil.STATUS_STOPPED if rank in self.stopped else psutil.STATUS_SLEEPING

    def _read(self, rank: int) -> Heartbeat | None:
        self.reads += 1
        return self.beats.get(rank)

    def beat(self) -> None:
        for rank in set(range(self.count)) - self.stopped:
            silent_seconds = self.clock.now - self.progressed[rank]
            self.beats[rank] = Heartbeat(
                rank, rank, 5, self.phase, self.clock.now, self.progressed[rank], silent_seconds
            )

    def progress(self, *but: int) -> None:
        self.progressed |= dict.fromkeys(set(range(self.count)) - {*but}, self.clock.now)

    def hang_found_after(
        self,
        watch: RankWatch,
        seconds: float,
        moves: Callable[[], None] = lambda: None,
        *,
        others_are_quiet: bool = True,
    ) -> float | None:
        """Look five times a second. Returns after how many seconds a hang was found, or None."""
        began = self.clock.now
        for tick in range(round(5 * seconds)):
            if tick % 5 == 0:
                moves()
                self.beat()
            watch.poll(1)
            if watch.hang_seconds(LIMIT_SECONDS, others_are_quiet=others_are_quiet) is not None:
                return self.clock.now - began
            self.clock.now += 0.2
        return None


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ranks_of(run: RunDir, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Ranks]:
    return lambda count: Ranks(run, clock, count, monkeypatch)


@pytest.mark.parametrize(("phase", "count"), [*((phase, 2) for phase in PHASES), ("training", 64)])
def test_stopped_rank_is_a_hang_in_any_phase(
    phase: str, count: int, ranks_of: Callable[[int], Ranks]
) -> None:
    ranks = ranks_of(count)
    watch = RankWatch(ranks.run, range(count))
    ranks.phase = phase
    assert ranks.hang_found_after(watch, 15, moves=ranks.progress) is None
    ranks.stopped.add(count - 1)
    found = ranks.hang_found_after(watch, 60)
    assert found is not None
    assert LIMIT_SECONDS <= found + 1 <= LIMIT_SECONDS + 3


def test_stopped_rank_is_a_hang_while_the_others_still_make_progress(
    ranks_of: Callable[[int], Ranks],
) -> None:
    ranks = ranks_of(8)
    watch = RankWatch(ranks.run, range(8))
    ranks.hang_found_after(watch, 10, moves=ranks.progress)
    ranks.stopped.add(3)
    found = ranks.hang_found_after(watch, 60, moves=ranks.progress)
    assert found is not None
    assert LIMIT_SECONDS - 2 <= found <= LIMIT_SECONDS + 3


def starting(ranks: Ranks, status: str) -> RankWatch:
    """A watch of ranks that have written no heartbeat yet."""
    ranks.processes = {rank: SimpleNamespace(pid=rank, status=lambda: status) for rank in ranks.processes}
    ranks.stopped |= set(ranks.processes)
    return RankWatch(ranks.run, range(ranks.count))


@pytest.mark.parametrize("status", [psutil.STATUS_RUNNING, psutil.STATUS_SLEEPING, psutil.STATUS_DISK_SLEEP])
def test_start_that_is_slow_is_no_hang_however_short_the_timeout(
    status: str, ranks_of: Callable[[int], Ranks]
) -> None:
    ranks = ranks_of(2)
    watch = starting(ranks, status)
    assert ranks.hang_found_after(watch, 10 * LIMIT_SECONDS) is None
    assert not watch.is_quiet(LIMIT_SECONDS), "other machines do not take this one for silent either"
    ranks.phase, ranks.stopped = "importing", {1}
    assert ranks.hang_found_after(watch, 5 * LIMIT_SECONDS) is None, (
        "one imports, without reading anything; the other has not begun"
    )
    ranks.phase, ranks.stopped = "training", set()
    ranks.progress()
    found = ranks.hang_found_after(watch, 60)
    assert found is not None, "from then on the timeout holds"
    assert LIMIT_SECONDS - 1 <= found <= LIMIT_SECONDS + 3


def test_start_that_never_ends_is_a_hang(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "STARTUP_SECONDS", 5 * LIMIT_SECONDS)
    ranks = ranks_of(2)
    found = ranks.hang_found_after(starting(ranks, psutil.STATUS_SLEEPING), 10 * LIMIT_SECONDS)
    assert found is not None
    assert 0 <= found - 5 * LIMIT_SECONDS <= 3


def test_process_that_is_stopped_before_its_first_heartbeat_is_a_hang(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(2)
    found = ranks.hang_found_after(starting(ranks, psutil.STATUS_STOPPED), 60)
    assert found is not None
    assert 0 <= found - LIMIT_SECONDS <= 3
    monkeypatch.setattr(psutil.Process, "status", lambda _: psutil.STATUS_STOPPED)  # the launcher's
    found = ranks.hang_found_after(starting(ranks, psutil.STATUS_SLEEPING), 60)
    assert found is not None
    assert 0 <= found - LIMIT_SECONDS <= 3


def test_job_that_was_suspended_as_a_whole_does_not_hang(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, lived = ranks_of(2), LivedClock()
    monkeypatch.setattr(watches, "LIVED", SimpleNamespace(now=lambda: lived.at(ranks.clock.now), at=lived.at))
    watch = RankWatch(ranks.run, range(2))
    assert ranks.hang_found_after(watch, 10, moves=ranks.progress) is None
    lived.gaps.append(Gap(ranks.clock.now, ranks.clock.now + 10_000))
    ranks.clock.now += 10_000
    assert ranks.hang_found_after(watch, LIMIT_SECONDS - 5) is None
    found = ranks.hang_found_after(watch, LIMIT_SECONDS)
    assert found is not None, "what hangs after it is found as ever"
    assert found <= 5 + 3


@pytest.mark.parametrize("status", [psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP])
def test_disk_that_refuses_heartbeats_is_no_hang_until_it_takes_them(
    status: str, ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, refusal = ranks_of(2), ["logs cannot be written (No space left on device)"]
    watch = RankWatch(ranks.run, range(2))
    assert ranks.hang_found_after(watch, 10, moves=ranks.progress) is None
    assert watch.disk_refusal is None
    monkeypatch.setattr(watches, "disk_refusal", lambda _: refusal[0] if refusal else None)
    ranks.stopped |= {0, 1}
    ranks.processes = {rank: SimpleNamespace(pid=rank, status=lambda: status) for rank in ranks.processes}
    watch.processes.update(ranks.processes)
    assert ranks.hang_found_after(watch, 10 * LIMIT_SECONDS) is None
    assert watch.disk_refusal == refusal[0]
    assert not watch.is_quiet(LIMIT_SECONDS), (
        "machines that wait for this one do not take it for silent either"
    )
    refusal.clear()
    found = ranks.hang_found_after(watch, 60)
    assert found is not None
    assert LIMIT_SECONDS - 2 <= found <= LIMIT_SECONDS + 2


def refused(*_: object) -> None:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/run/logs")


def test_heartbeats_that_cannot_be_looked_at_are_no_hang_until_they_can(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(2)
    watch = RankWatch(ranks.run, range(2))
    assert ranks.hang_found_after(watch, 10, moves=ranks.progress) is None
    with monkeypatch.context() as patched:
        patched.setattr(watches, "read_heartbeat", refused)
        assert ranks.hang_found_after(watch, 10 * LIMIT_SECONDS) is None
        assert watch.refusal == "/run/logs: Permission denied"
        assert not watch.is_quiet(LIMIT_SECONDS), (
            "machines that wait for this one do not take it for silent either"
        )
    found = ranks.hang_found_after(watch, 60)
    assert found is not None
    assert watch.refusal is None
    assert LIMIT_SECONDS - 2 <= found <= LIMIT_SECONDS + 2


def test_heartbeat_that_a_directory_has_replaced_is_no_hang(run: RunDir) -> None:
    """The rank cannot replace it."""
    run.rank_heartbeat(0).mkdir(parents=True)
    watch = RankWatch(run, range(1))
    watch.read_all()
    assert watch.refusal == f"{run.rank_heartbeat(0)}: Is a directory"


def test_rank_that_has_ended_is_judged_once_its_outcome_can_be_looked_at(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, outcomes = ranks_of(2), list[Outcome]()
    watch = RankWatch(ranks.run, range(2))
    ranks.hang_found_after(watch, 2, moves=ranks.progress)
    monkeypatch.setattr(watches, "is_alive", lambda process: process.pid != 1)
    monkeypatch.setattr(watches, "read_outcome", lambda *_: outcomes[0] if outcomes else refused())
    ranks.hang_found_after(watch, 10, moves=ranks.progress)
    assert (watch.failed_at, watch.deaths) == (None, [])
    outcomes.append(Outcome(ExitCode.PREEMPTED, ExitReason.PREEMPTED, rank=1))
    ranks.hang_found_after(watch, 2, moves=ranks.progress)
    assert (watch.failed_at, watch.deaths) == (None, [])
    assert 1 in watch.outcomes


def test_rank_whose_outcome_can_never_be_looked_at_is_dead_after_a_minute(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(2)
    watch = RankWatch(ranks.run, range(2))
    ranks.hang_found_after(watch, 2, moves=ranks.progress)
    monkeypatch.setattr(watches, "is_alive", lambda process: process.pid != 1)
    monkeypatch.setattr(watches, "read_outcome", refused)
    ranks.hang_found_after(watch, watches.UNREAD_SECONDS - 1, moves=ranks.progress)
    assert watch.failed_at is None
    ranks.hang_found_after(watch, 2, moves=ranks.progress)
    assert [death.rank for death in watch.deaths] == [1]
    problem = watch.known_ends()[1].problem
    assert problem is not None
    assert problem.message == "rank 1 left an outcome that cannot be read: /run/logs: Permission denied"


def test_progress_of_one_rank_prevents_a_hang_report(ranks_of: Callable[[int], Ranks]) -> None:
    ranks = ranks_of(8)
    watch = RankWatch(ranks.run, range(8))
    ranks.phase = "saving"
    assert ranks.hang_found_after(watch, 100, moves=lambda: ranks.progress(*range(1, 8))) is None


def test_progress_on_another_machine_prevents_a_hang_report(ranks_of: Callable[[int], Ranks]) -> None:
    ranks = ranks_of(2)
    watch = RankWatch(ranks.run, range(2))
    assert ranks.hang_found_after(watch, 200, others_are_quiet=False) is None
    assert watch.is_quiet(LIMIT_SECONDS)
    found = ranks.hang_found_after(watch, 5)
    assert found is not None
    assert found <= watches.ALL_ROUND_SECONDS
    ranks.stopped.add(1)
    found = ranks.hang_found_after(watch, 60, moves=ranks.progress, others_are_quiet=False)
    assert found is not None, "a process that cannot run makes no progress, whatever others do"


@pytest.mark.parametrize("stopped", [{1}, {0, 1}])
def test_stopped_rank_is_a_hang_beside_waiting_ones_while_other_machines_make_progress(
    stopped: set[int], ranks_of: Callable[[int], Ranks]
) -> None:
    ranks = ranks_of(2)
    watch = RankWatch(ranks.run, range(2))
    assert ranks.hang_found_after(watch, 10, moves=ranks.progress, others_are_quiet=False) is None
    ranks.stopped |= stopped
    found = ranks.hang_found_after(watch, 60, others_are_quiet=False)
    assert found is not None
    assert LIMIT_SECONDS - 2 <= found <= LIMIT_SECONDS + 3


def test_machine_is_quiet_after_half_of_the_limit_or_a_minute(ranks_of: Callable[[int], Ranks]) -> None:
    ranks = ranks_of(2)
    watch = RankWatch(ranks.run, range(2))
    quiet: dict[float, float] = {}
    for second in range(90):
        ranks.beat()
        watch.read_all()
        for limit in (LIMIT_SECONDS, 1800.0):
            if watch.is_quiet(limit):
                quiet.setdefault(limit, second)
        ranks.clock.now += 1
    assert quiet == {LIMIT_SECONDS: LIMIT_SECONDS / 2 + 1, 1800.0: watches.QUIET_SECONDS + 1}
    ranks.progress()
    ranks.beat()
    watch.read_all()
    assert not watch.is_quiet(LIMIT_SECONDS)


@pytest.mark.parametrize(("count", "most_a_second"), [(2, 4), (8, 4), (64, 7)])
def test_file_reads_per_second_do_not_grow_with_ranks(
    count: int, most_a_second: float, ranks_of: Callable[[int], Ranks]
) -> None:
    ranks = ranks_of(count)
    watch = RankWatch(ranks.run, range(count))
    ranks.hang_found_after(watch, 2, moves=ranks.progress)
    ranks.reads = 0
    ranks.hang_found_after(watch, 15, moves=ranks.progress)
    assert count <= ranks.reads <= 15 * most_a_second, "each rank is read, and no more than that"
    assert watch.last_step == 5


def test_files_of_another_launch_are_left_out(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was counted as lost is back, and its ranks of the earlier launch still write."""
    run.logs.mkdir(parents=True)
    watch = RankWatch(run, range(2), "life-2")
    for rank, launch in [(0, "life-2"), (1, "life-1"), (2, "life-1"), (3, "life-2")]:
        Heartbeat(rank, 1, 5, "training", 1.0, 2.0, 0.5, launch=launch).write(run.rank_heartbeat(rank))
        Outcome(ExitCode.FAILED, ExitReason.FAILED, rank=rank, launch=launch).write(run.rank_outcome(rank))
    monkeypatch.setattr(watch, "processes", {})
    watch.read_all()
    assert set(watch.beats) == set(watch.outcomes) == {0}
    manual = RankWatch(run, range(2))
    manual.read_all()
    assert set(manual.beats) == set(manual.outcomes) == {0, 1}, "one machine: no id is compared"


def test_launch_clears_unfinished_heartbeats_of_its_ranks_alone(run: RunDir) -> None:
    run.logs.mkdir(parents=True)
    own, other = (run.logs / f"rank-{rank:04d}.heartbeat.0123abcd.tmp" for rank in (1, 2))
    of_a_user = run.logs / "rank-foo.heartbeat.x.tmp"
    for stage in (own, other, of_a_user):
        stage.touch()
    clear(run, range(2), with_verdict=False)
    assert not own.exists()
    assert other.exists(), "a rank of another machine may be writing it"
    assert of_a_user.exists()
