"""What machines tell each other through the run directory, played by two of them in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fsdp_tune.errors import EXIT_CODE_OF_REASON, ExitReason, Problem
from fsdp_tune.launch import machines
from fsdp_tune.launch.hang import Standing
from fsdp_tune.launch.lock import locked
from fsdp_tune.launch.machines import Machines, combined
from fsdp_tune.launch.verdict import Ended
from fsdp_tune.run_dir import RunDir


def ended(reason: ExitReason, code: str | None = None, step: int = 3) -> Ended:
    return Ended(EXIT_CODE_OF_REASON[reason], reason, step, Problem(code, f"{code} happened") if code else None)


KILLED = ended(ExitReason.LOST_RANK, "rank-killed", 5)
ECHO = ended(ExitReason.LOST_RANK, "lost-rank", 6)
FAILED_THERE = ended(ExitReason.LOST_RANK, "machine-failed")
FINISHED = ended(ExitReason.FINISHED)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(machines, "SHARE_SECONDS", 20.0)
    monkeypatch.setattr(machines, "GATHER_SECONDS", 20.0)


@pytest.fixture
def two(run: RunDir) -> Iterator[tuple[Machines, Machines]]:
    """The first machine, which holds the run's lock, and another one."""
    run.logs.mkdir()
    with locked(run):
        first, second = (Machines(run, machine, 2, patience_seconds=0.2) for machine in (0, 1))
        yield first, second


def test_a_machine_alone_tells_nobody_and_waits_for_nobody(run: RunDir) -> None:
    run.logs.mkdir()
    alone = Machines(run, 0, 1, patience_seconds=0.0)
    alone.begin(0)
    alone.end(KILLED)
    assert (alone.verdict(KILLED), alone.trouble(), alone.missing(), alone.share([Standing(0)], 1.0)) == (KILLED, None, None, [Standing(0)])
    assert not alone.is_time_to_look()
    assert list(run.logs.iterdir()) == []


def test_a_machine_that_never_comes_is_named(two: tuple[Machines, Machines]) -> None:
    first, second = two
    first.begin(0)
    missing = first.missing()
    assert missing is not None
    assert missing.code == "machines-missing"
    assert missing.message.startswith("1 of 2 machines came within ")
    assert missing.message.endswith("; missing: machine 1")
    second.begin(0)
    assert first.missing() is None


def test_a_bad_end_elsewhere_ends_the_ranks_here(two: tuple[Machines, Machines]) -> None:
    first, second = two
    first.begin(0)
    second.begin(0)
    assert first.trouble() is None
    second.end(KILLED)
    trouble = first.trouble()
    assert trouble is not None
    assert (trouble.code, trouble.message) == ("machine-failed", "machine 1: rank-killed happened")


def test_a_good_end_elsewhere_is_no_trouble(two: tuple[Machines, Machines]) -> None:
    first, second = two
    first.begin(0)
    second.begin(0)
    second.end(FINISHED)
    assert first.trouble() is None


@pytest.mark.parametrize(
    ("here", "there", "problem"),
    [(ECHO, KILLED, "rank-killed"), (KILLED, ECHO, "rank-killed"), (FAILED_THERE, KILLED, "rank-killed"), (ECHO, ECHO, "lost-rank")],
)
def test_the_verdict_is_the_failure_and_not_its_echo(two: tuple[Machines, Machines], here: Ended, there: Ended, problem: str) -> None:
    first, second = two
    first.begin(0)
    second.begin(0)
    timer = threading.Timer(0.1, second.end, [there])
    timer.start()
    judged = first.verdict(here)
    timer.join()
    assert judged.problem is not None
    assert judged.problem.code == problem
    assert judged.step == max(here.step, there.step)


def test_an_out_of_memory_elsewhere_keeps_its_exit_code() -> None:
    oom = ended(ExitReason.OUT_OF_MEMORY, "device-out-of-memory")
    assert combined(ECHO, [oom]).exit_code == 3


def test_the_others_follow_the_first_into_each_launch_and_to_the_end(two: tuple[Machines, Machines]) -> None:
    first, second = two
    assert second.next_launch(started=False) is None, "nobody waits for ever"
    first.begin(0)
    assert second.next_launch(started=False) == 0
    second.begin(0)
    second.end(KILLED)
    timer = threading.Timer(0.1, first.begin, [1])
    timer.start()
    assert second.next_launch(started=True) == 1
    timer.join()
    second.begin(1)
    first.conclude(FINISHED)
    final = second.next_launch(started=True)
    assert isinstance(final, Ended)
    assert final.reason is ExitReason.FINISHED


def test_words_of_an_earlier_command_are_not_taken_for_this_ones(run: RunDir) -> None:
    run.logs.mkdir()
    with locked(run):
        earlier = Machines(run, 0, 2, patience_seconds=0.2)
        earlier.begin(0)
        earlier.conclude(KILLED)
    with locked(run):
        assert Machines(run, 1, 2, patience_seconds=0.2).next_launch(started=False) is None


def test_a_first_machine_that_is_gone_is_not_waited_for(run: RunDir) -> None:
    run.logs.mkdir()
    with locked(run):
        first, second = (Machines(run, machine, 2, patience_seconds=0.2) for machine in (0, 1))
        first.begin(0)
        second.begin(0)
    second.end(ECHO)
    assert second.next_launch(started=True) is None


def test_a_hang_is_looked_at_by_all_machines_together(two: tuple[Machines, Machines]) -> None:
    first, second = two
    first.begin(0)
    second.begin(0)
    mine, theirs = Standing(0, 5, "training", waits_in="all_reduce"), Standing(1, 5, "backward", state="stopped (SIGSTOP)")
    assert second.asked_to_look() is None
    answers: list[list[Standing]] = []
    asking = threading.Thread(target=lambda: answers.append(first.share([mine], 60.0)))
    asking.start()
    while second.asked_to_look() is None:
        pass
    assert second.asked_to_look() == 60.0
    assert second.share([theirs], 60.0) == [mine, theirs]
    asking.join()
    assert answers == [[mine, theirs]]
