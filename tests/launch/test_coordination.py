"""Coordination of machines through the run directory, with two of them in one process."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from fsdp_tune.core import ownership
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitReason, Problem
from fsdp_tune.launch import coordination as machines
from fsdp_tune.launch.coordination import Machines, combined
from fsdp_tune.launch.supervise.attempts import _final
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run.directory import RunDir, locked
from fsdp_tune.run.launch_files import RankState, Verdict
from tests.launch.conftest import PlanOf


def ended(reason: ExitReason, code: str | None = None, step: int = 3) -> Verdict:
    return Verdict(EXIT_CODE_OF_REASON[reason], reason, step, Problem(code, f"{code} happened") if code else None)


KILLED = ended(ExitReason.LOST_RANK, "rank-killed", 5)
ECHO = ended(ExitReason.LOST_RANK, "lost-rank", 6)
FAILED_THERE = ended(ExitReason.LOST_RANK, "machine-failed")
FINISHED = ended(ExitReason.FINISHED)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "READ_SECONDS", 0.01)
    monkeypatch.setattr(machines, "SHARE_SECONDS", 20.0)
    monkeypatch.setattr(machines, "GATHER_SECONDS", 20.0)


def pair(run: RunDir, *, timeout_seconds: float = 20.0) -> tuple[Machines, Machines]:
    first, second = (Machines(run, machine, 2, timeout_seconds=timeout_seconds) for machine in (0, 1))
    return first, second


@pytest.fixture
def two(run: RunDir) -> Iterator[tuple[Machines, Machines]]:
    """The first machine, which owns the run, and another one."""
    run.logs.mkdir()
    with locked(run):
        yield pair(run)


def start(first: Machines, second: Machines, launch: int = 0) -> None:
    """Both agree on a launch; the second joins first if it has not."""
    answers: list[object] = []

    def follow() -> None:
        answers.append(second.join() if launch == 0 else None)
        answers.append(second.next_launch())

    following = threading.Thread(target=follow)
    following.start()
    assert first.gather(launch) is None
    following.join()
    assert answers == [None, launch]


def test_single_machine_neither_announces_nor_waits(run: RunDir) -> None:
    run.logs.mkdir()
    alone = Machines(run, 0, 1, timeout_seconds=0.0)
    assert alone.gather(0) is None
    alone.end(KILLED)
    assert (alone.verdict(KILLED), alone.failure_elsewhere(), alone.share([RankState(0)], 1.0)) == (KILLED, None, [RankState(0)])
    assert alone.environment() == {}
    assert not alone.is_poll_due()
    assert list(run.logs.iterdir()) == []


def test_missing_machine_is_named(run: RunDir) -> None:
    run.logs.mkdir()
    with locked(run):
        missing = pair(run, timeout_seconds=0.2)[0].gather(0)
    assert missing is not None
    assert missing.code == "machines-missing"
    assert missing.message.startswith("1 of 2 machines joined within ")
    assert missing.message.endswith("; missing: machine 1")


def test_failure_on_another_machine_stops_local_ranks(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    assert first.failure_elsewhere() is None
    second.end(KILLED)
    failure = first.failure_elsewhere()
    assert failure is not None
    assert (failure.code, failure.message) == ("machine-failed", "machine 1: rank-killed happened")


def test_success_on_another_machine_is_not_a_failure(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    second.end(FINISHED)
    assert first.failure_elsewhere() is None


@pytest.mark.parametrize(
    ("here", "there", "problem"),
    [(ECHO, KILLED, "rank-killed"), (KILLED, ECHO, "rank-killed"), (FAILED_THERE, KILLED, "rank-killed"), (ECHO, ECHO, "lost-rank")],
)
def test_verdict_is_the_original_failure(two: tuple[Machines, Machines], here: Verdict, there: Verdict, problem: str) -> None:
    first, second = two
    start(first, second)
    timer = threading.Timer(0.1, second.end, [there])
    timer.start()
    judged = first.verdict(here)
    timer.join()
    assert judged.problem is not None
    assert judged.problem.code == problem
    assert judged.step == max(here.step, there.step)


@pytest.mark.parametrize("reason", [ExitReason.PREEMPTED, ExitReason.INTERRUPTED])
def test_ranks_that_wait_for_those_of_a_stopped_machine_are_stopped_too(
    reason: ExitReason, two: tuple[Machines, Machines], plan_of: PlanOf
) -> None:
    first, second = two
    start(first, second)
    second.end(ended(reason, step=0))
    supervisor = Supervisor(plan_of({"0": [["beat", "importing", 0], ["sleep", 60]]}), hang_timeout_seconds=60.0, machines=first)
    *_, last = supervisor.events()
    assert isinstance(last, Verdict)
    assert (last.reason, last.problem) == (reason, None)


@pytest.mark.parametrize("number", [0, 1])
def test_rank_that_lost_the_ranks_of_a_stopped_machine_is_stopped_too(number: int, run: RunDir) -> None:
    """It lost its connection to them before it could agree on a step with them."""
    stopped = ended(ExitReason.PREEMPTED, step=0)
    judged = combined(ECHO, [stopped]) if number == 0 else _final(ECHO, stopped, run)
    assert (judged.exit_code, judged.reason, judged.problem) == (143, ExitReason.PREEMPTED, None)


def test_remote_out_of_memory_keeps_its_exit_code() -> None:
    oom = ended(ExitReason.OUT_OF_MEMORY, "device-out-of-memory")
    assert combined(ECHO, [oom]).exit_code == 3


def test_machines_follow_first_machine_through_restarts(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    second.end(KILLED)
    start(first, second, 1)
    first.conclude(FINISHED)
    final = second.next_launch()
    assert isinstance(final, Verdict)
    assert final.reason is ExitReason.FINISHED


def test_launches_have_distinct_rendezvous_ids(run: RunDir) -> None:
    run.logs.mkdir()
    names: set[str] = set()
    for launches in (2, 1):
        with locked(run):
            first, second = pair(run)
            for launch in range(launches):
                start(first, second, launch)
                assert first.environment() == second.environment()
                names.add(first.environment()["PET_RDZV_ID"])
    assert len(names) == 3


def killed_life(run: RunDir, monkeypatch: pytest.MonkeyPatch, *, owner_is_foreign: bool) -> None:
    """Leave the files of a run whose commands were killed in their first launch."""
    run.logs.mkdir()
    with ExitStack() as stack:
        stack.enter_context(locked(run))
        start(*pair(run))
        record = json.loads(run.lock.read_bytes()) | (
            {"host": "first-machine", "kernel": "another"} if owner_is_foreign else {"pid": 2**22 + 1}
        )
    run.lock.write_text(json.dumps(record))
    monkeypatch.setattr(machines, "JOIN_SECONDS", 0.3)


@pytest.mark.parametrize("owner_is_foreign", [True, False], ids=["first machine elsewhere", "first machine here"])
def test_machine_does_not_join_launch_of_killed_commands(run: RunDir, monkeypatch: pytest.MonkeyPatch, owner_is_foreign: bool) -> None:
    killed_life(run, monkeypatch, owner_is_foreign=owner_is_foreign)
    problem = pair(run)[1].join()
    assert problem is not None
    assert problem.code == "first-machine-missing"


def test_first_machine_ignores_file_of_killed_command(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_life(run, monkeypatch, owner_is_foreign=False)
    with locked(run):
        missing = pair(run, timeout_seconds=0.2)[0].gather(0)
        assert missing is not None
        assert missing.code == "machines-missing"


def test_both_killed_machines_start_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_life(run, monkeypatch, owner_is_foreign=True)
    monkeypatch.setattr(machines, "JOIN_SECONDS", 20.0)
    monkeypatch.setattr(ownership, "FOREIGN_SILENCE_SECONDS", 0.0)
    answers: list[object] = []
    second = Machines(run, 1, 2, timeout_seconds=20.0)
    following = threading.Thread(target=lambda: answers.extend([second.join(), second.next_launch()]))
    following.start()
    time.sleep(0.1)  # the other machine's command is the quicker one, and meets the files of the killed ones
    with locked(run):
        assert Machines(run, 0, 2, timeout_seconds=20.0).gather(0) is None
        following.join()
    assert answers == [None, 0]


def test_machine_whose_command_was_killed_joins_the_next_launch(two: tuple[Machines, Machines], run: RunDir) -> None:
    first, second = two
    start(first, second)
    again = Machines(run, 1, 2, timeout_seconds=20.0)  # the file of its earlier command is still there
    answers: list[object] = []
    following = threading.Thread(target=lambda: answers.extend([again.join(), again.next_launch()]))
    following.start()
    assert first.gather(1) is None
    following.join()
    assert answers == [None, 1]


def test_machine_joins_when_first_moves_old_run_aside(two: tuple[Machines, Machines], run: RunDir) -> None:
    first, second = two
    answers: list[object] = []
    following = threading.Thread(target=lambda: answers.extend([second.join(), second.next_launch()]))
    following.start()
    while not (file := run.logs / "machine-01.json").exists():
        time.sleep(0.01)
    file.unlink()
    assert first.gather(0) is None
    following.join()
    assert answers == [None, 0]


def test_failed_machine_is_not_waited_for_before_launch(two: tuple[Machines, Machines]) -> None:
    first, second = two
    joining = threading.Thread(target=lambda: second.join() or second.end(ended(ExitReason.FAILED, "machines-differ")))
    joining.start()
    failure = first.gather(0)
    joining.join()
    assert failure is not None
    assert failure.message == "machine 1: machines-differ happened"


def test_dead_first_machine_is_not_waited_for(run: RunDir) -> None:
    run.logs.mkdir()
    with locked(run):
        first, second = pair(run)
        start(first, second)
    second.end(ECHO)
    assert second.next_launch() is None


def test_hang_report_covers_all_machines(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    mine, theirs = RankState(0, 5, "training", waits_in="all_reduce"), RankState(1, 5, "backward", state="stopped (SIGSTOP)")
    assert second.silent_seconds_elsewhere() is None
    answers: list[list[RankState]] = []
    asking = threading.Thread(target=lambda: answers.append(first.share([mine], 60.0)))
    asking.start()
    while second.silent_seconds_elsewhere() is None:
        pass
    assert second.silent_seconds_elsewhere() == 60.0
    assert second.share([theirs], 60.0) == [mine, theirs]
    asking.join()
    assert answers == [[mine, theirs]]
