"""Machines of a run agree on a launch and on its end: in one process, each with a channel of its own to a
real store of torch."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitReason, FsdpTuneError, usage_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.resizing import announce_end
from fsdp_tune.launch.machines import directories, peers, store
from fsdp_tune.launch.machines import rendezvous as machines
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.supervise import supervisor as supervisors
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import RankState, Verdict
from tests.launch.fake_ranks import FINISHED, PlanOf, ended
from tests.launch.links import Answers, Play, failure_of, problem_of, start, until

ENDED_WELL = ended(ExitReason.FINISHED)
KILLED = ended(ExitReason.LOST_RANK, "rank-killed", 5)
ECHO = ended(ExitReason.LOST_RANK, "lost-rank", 6)
LIMIT_SECONDS = 0.2
pytestmark = pytest.mark.usefixtures("quick_machines")


@pytest.fixture
def play(play_of: Callable[[int], Play]) -> Play:
    return play_of(2)


@pytest.fixture
def two(play: Play) -> tuple[Machines, Machines]:
    return play.machine(0), play.machine(1)


def test_single_machine_neither_announces_nor_waits(run: RunDir) -> None:
    run.logs.mkdir()
    with Machines(run) as alone:
        assert alone.gather(0) is None
        alone.advance(5)
        alone.end(KILLED)
        assert (alone.verdict(KILLED), alone.failure_elsewhere(), alone.share([RankState(0)], 1.0)) == (
            KILLED,
            None,
            [RankState(0)],
        )
        assert alone.environment() == {}
        assert not alone.is_poll_due()
    assert list(run.logs.iterdir()) == []


class Listening(Observer):
    def __init__(self) -> None:
        self.heard: list[tuple[float, str]] = []

    def message(self, text: str) -> None:
        self.heard.append((time.monotonic(), text))


def test_error_is_shown_before_the_others_are_told(
    play: Play, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake of the first machine, started alone, was shown only when the others had been waited for."""
    monkeypatch.setattr(store, "SERVED_SECONDS", 2 * LIMIT_SECONDS)
    seen = Listening()

    def end(machines: Machines) -> None:
        with machines, ExitStack() as stack:
            stack.push(partial(announce_end, seen, machines))
            raise usage_error("no-rows", "the file is empty")

    with pytest.raises(FsdpTuneError):
        end(play.machine(0))
    assert time.monotonic() - seen.heard[0][0] > LIMIT_SECONDS
    assert [text.partition(";")[0] for _, text in seen.heard] == ["the file is empty"]
    with pytest.raises(FsdpTuneError):
        end(Machines(run))
    assert len(seen.heard) == 1


def test_missing_machine_is_named(play: Play) -> None:
    problem = problem_of(play.machine(0, hang_seconds=0.2).gather(0))
    assert problem.code == "machines-missing"
    assert problem.message.startswith("1 of 2 machines joined within ")
    assert problem.message.endswith("; missing: machine 1")


def test_first_machine_waits_for_one_that_comes_later(play: Play) -> None:
    first = play.machine(0)
    gathering = Answers(lambda: first.gather(0))
    time.sleep(0.1)
    second = play.machine(1)
    assert (second.join(), second.next_launch()) == (None, 0)
    assert gathering.all() == [None]
    assert json.loads(play.run.machines_json.read_bytes()) == {"0": "host-0", "1": "host-1"}
    assert abs(second.channel.clock_seconds(0)) < 5.0


def test_first_machine_that_never_comes_is_named(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "JOIN_SECONDS", LIMIT_SECONDS)
    second = play.machine(1)
    play.network.link(1).is_cut.set()
    assert problem_of(second.join()).code == "first-machine-missing"


def test_machine_that_differs_is_named_on_both(play: Play) -> None:
    first, second = play.machine(0), play.machine(1, code="other")
    joining = Answers(second.join)
    verdict = first.gather(0)
    there = problem_of(*joining.all())
    assert there.code == "machines-differ"
    assert (
        there.message
        == "machine 1 (host-1) differs from machine 0 (host-0): fsdp-tune's source other instead of c0de"
    )
    assert there.hint
    assert problem_of(verdict).message == f"machine 1: {there.message}"


def test_two_commands_with_one_number_are_refused(play: Play) -> None:
    first = play.machine(0)
    both = [play.machine(1), play.machine(1)]
    joining = [Answers(each.join) for each in both]
    until(lambda: any(each.channel.last.twin for each in both))
    first.advance(1)
    first.gather(0)
    codes = [
        found.problem.code
        for each in joining
        for found in each.found
        if isinstance(found, Verdict) and found.problem
    ]
    assert "machine-twice" in codes


def test_machine_that_does_not_see_the_run_directory_is_named(play: Play, tmp_path: Path) -> None:
    first = play.machine(0)
    elsewhere = RunDir(tmp_path / "elsewhere")
    joining = Answers(play.machine(1, run=elsewhere).join)
    assert first.gather(0) is not None
    problem = problem_of(*joining.all())
    assert problem.code == "run-directory-not-shared"
    assert problem.message.endswith(f"{elsewhere.recipe_json} is not there")


def test_machine_waits_for_files_that_appear_late(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, "VISIBLE_SECONDS", 20.0)
    late = RunDir(tmp_path / "late")
    late.path.mkdir()
    (late.path / "launch.json").write_text("{}")
    (late.path / "recipe.json").write_text("an older one")
    second = play.machine(1, run=late)
    following = Answers(second.join, second.next_launch)
    gathering = Answers(lambda: play.machine(0).gather(0))
    time.sleep(0.1)
    assert following.found == []
    late.recipe_json.write_text("{}")
    assert (following.all(), gathering.all()) == ([None, 0], [None])


def test_failure_of_first_machine_before_the_launch_ends_the_others(play: Play) -> None:
    second = play.machine(1)
    joining = Answers(second.join)
    first = play.machine(0)
    until(lambda: second.read(0) is not None)
    with pytest.raises(Exception, match="no such file"), first:
        raise usage_error("file-not-found", "no such file", hint="look")
    (there,) = joining.all()
    assert isinstance(there, Verdict)
    assert (there.exit_code, there.problem and there.problem.message) == (2, "machine 0: no such file")


def test_finished_run_ends_the_others(play: Play) -> None:
    second = play.machine(1)
    joining = Answers(second.join)
    play.machine(0).conclude(ENDED_WELL)
    (there,) = joining.all()
    assert isinstance(there, Verdict)
    assert (there.exit_code, there.problem) == (0, None)


def test_stop_of_another_machine_before_the_launch_ends_the_first(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    until(lambda: second.read(0) is not None)
    second.publish(life=first.report.life)
    with pytest.raises(StoppedBySignal), second:
        raise StoppedBySignal(15)
    verdict = first.gather(0)
    assert verdict is not None
    assert (verdict.exit_code, verdict.reason, verdict.problem) == (143, ExitReason.PREEMPTED, None)


def work(machine: Machines, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        machine.advance(1000)
        time.sleep(0.02)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOIN_SECONDS", "DECISION_SECONDS"):
        monkeypatch.setattr(machines, name, LIMIT_SECONDS)


@pytest.mark.usefixtures("impatient")
def test_waits_continue_while_first_machine_works(two: tuple[Machines, Machines]) -> None:
    first, second = two
    following = Answers(second.join, second.next_launch)
    work(first, 3 * LIMIT_SECONDS)
    assert first.gather(0) is None
    assert following.all() == [None, 0]
    second.end(KILLED)
    deciding = Answers(second.next_launch)
    work(first, 3 * LIMIT_SECONDS)
    assert first.gather(1) is None
    assert deciding.all() == [1]


@pytest.mark.usefixtures("impatient")
def test_first_machine_that_does_nothing_is_not_waited_for(two: tuple[Machines, Machines]) -> None:
    assert problem_of(two[1].join()).code == "first-machine-missing"


def test_failure_and_stop_reach_machines_that_do_not_read_each_other(play_of: Callable[[int], Play]) -> None:
    played = play_of(3)
    first, second, third = (played.machine(number) for number in range(3))
    start(first, second, third)
    assert first.failure_elsewhere() is None
    second.end(KILLED)
    for each in (first, third):
        failure = failure_of(each)
        assert (failure.code, failure.message) == ("machine-failed", "machine 1: rank-killed happened")
    assert second.failure_elsewhere() is None  # its own
    for each in (first, third):
        each.end(ECHO)
    start(first, second, third, launch=1)
    second.end(ended(ExitReason.PREEMPTED))
    until(first.stopped_elsewhere)
    until(third.stopped_elsewhere)
    assert third.stopped_elsewhere() is ExitReason.PREEMPTED


def test_verdict_is_the_original_failure(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    timer = threading.Timer(0.1, second.end, [KILLED])
    timer.start()
    judged = first.verdict(ECHO)
    timer.join()
    assert problem_of(judged).code == "rank-killed"
    assert judged.step == max(ECHO.step, KILLED.step)


def test_ranks_that_wait_for_those_of_a_stopped_machine_are_stopped_too(
    two: tuple[Machines, Machines], plan_of: PlanOf
) -> None:
    first, second = two
    start(first, second)
    second.end(ended(ExitReason.INTERRUPTED, step=0))
    supervisor = Supervisor(
        plan_of({"0": [["beat", "importing", 0], ["sleep", 60]]}), hang_timeout_seconds=60.0, machines=first
    )
    *_, last = supervisor.events()
    assert isinstance(last, Verdict)
    assert (last.reason, last.problem) == (ExitReason.INTERRUPTED, None)


AGENT_AT_BARRIER = """
import os, subprocess, sys, time
subprocess.run([sys.executable, "-m", "tests.launch.fake_worker", sys.argv[1]], env={**os.environ, "RANK": sys.argv[2]})
time.sleep(600)
"""  # noqa: E501


@pytest.mark.usefixtures("quick_supervisor")
def test_agent_does_not_wait_at_its_barrier_for_a_machine_that_has_left(
    two: tuple[Machines, Machines], plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "LINGER_SECONDS", 0.2)
    there, here = two
    start(there, here)
    plan = plan_of({"1": [["outcome", FINISHED | {"launch": here.launch_id}]]})
    argv = (sys.executable, "-c", AGENT_AT_BARRIER, str(plan.run.path), "1")
    plan = replace(plan, argv=argv, world_size=2, ranks=range(1, 2))
    there.end(ENDED_WELL)
    began = time.monotonic()
    *_, last = Supervisor(plan, hang_timeout_seconds=60.0, machines=here).events()
    assert isinstance(last, Verdict)
    assert (last.reason, last.problem) == (ExitReason.FINISHED, None)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("machine", [0, 1])
@pytest.mark.parametrize("is_told", [True, False], ids=["stopped", "killed"])
def test_machine_that_has_left_a_launch_is_noticed(
    machine: int, is_told: bool, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = play.machine(0, replacement_seconds=60.0), play.machine(1, replacement_seconds=60.0)
    start(*both)
    here, there = both[machine], both[1 - machine]
    assert not here.has_one_left()
    if is_told:
        there.end(ENDED_WELL)
    else:
        monkeypatch.setattr(peers, "UNHEARD_SECONDS", LIMIT_SECONDS)
        play.network.link(1).is_cut.set()
    until(here.has_one_left)


def test_machines_follow_first_machine_through_restarts(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    second.end(KILLED)
    start(first, second, launch=1)
    first.conclude(ENDED_WELL)
    final = second.next_launch()
    assert isinstance(final, Verdict)
    assert final.reason is ExitReason.FINISHED


def test_launches_have_distinct_rendezvous_ids(play_of: Callable[[int], Play]) -> None:
    names: set[str] = set()
    for launches in (2, 1):
        played = play_of(2)
        first, second = played.machine(0), played.machine(1)
        for launch in range(launches):
            start(first, second, launch=launch)
            assert first.environment() == second.environment()
            names.add(first.environment()["PET_RDZV_ID"])
    assert len(names) == 3


def test_hang_report_covers_all_machines(play_of: Callable[[int], Play]) -> None:
    played = play_of(3)
    every = [played.machine(number) for number in range(3)]
    start(*every)
    states = [
        RankState(0, 5, "training", waits_in="all_reduce"),
        RankState(1, 5, "backward", state="stopped (SIGSTOP)"),
        RankState(2, 5, "backward"),
    ]
    assert every[1].silent_seconds_elsewhere() is None
    found = [Answers(lambda: every[2].share([states[2]], 60.0))]
    for number in (0, 1):
        until(every[number].silent_seconds_elsewhere)
        assert every[number].silent_seconds_elsewhere() == 60.0
        found.append(Answers(lambda number=number: every[number].share([states[number]], 60.0)))  # type: ignore[misc]
    assert [each.all() for each in found] == [[states]] * 3


def test_machine_that_is_unheard_of_does_not_hide_a_hang(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the link is cut, neither learns whether the ranks of the other make progress, and both wait for
    them."""
    monkeypatch.setattr(peers, "UNHEARD_SECONDS", 3 * LIMIT_SECONDS)
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    for machine in (first, second):
        machine.failure_elsewhere()
        assert not machine.share_quiet(is_quiet=True), "the other has not reported that it is quiet"
    play.network.link(1).is_cut.set()
    until(lambda: first.share_quiet(is_quiet=True))
    until(lambda: second.share_quiet(is_quiet=True))


def test_command_that_hangs_itself_does_not_hide_a_hang(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its channel is a process of its own, and still answers."""
    monkeypatch.setattr(peers, "ATTESTED_SECONDS", 3 * LIMIT_SECONDS)
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    began = time.monotonic()
    while time.monotonic() < began + 6 * LIMIT_SECONDS:
        first.failure_elsewhere()
        second.failure_elsewhere()
        second.share_quiet(is_quiet=False)
        assert not first.share_quiet(is_quiet=True), "the second machine attests progress"
        time.sleep(0.05)
    until(lambda: first.share_quiet(is_quiet=True))  # the second command does nothing any more


def test_next_launch_starts_without_silence(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    for machine in (first, second):
        machine.share_quiet(is_quiet=True)
    until(
        lambda: (
            [machine.failure_elsewhere() or machine.share_quiet(is_quiet=True) for machine in (first, second)]
            == [True, True]
        )
    )
    for machine in (first, second):
        machine.end(KILLED)
    start(first, second, launch=1)
    for machine in (first, second):
        machine.failure_elsewhere()
        assert not machine.report.is_quiet
        assert not machine.share_quiet(is_quiet=True)


def test_machines_are_quiet_only_together(play_of: Callable[[int], Play]) -> None:
    """One that makes progress, such as a save to a slow disk, keeps all others from reporting a hang."""
    played = play_of(3)
    every = [played.machine(number) for number in range(3)]
    start(*every)

    def shared(quiet: Sequence[bool]) -> list[bool]:
        """What each machine learns of the others."""
        for machine in every:
            machine.failure_elsewhere()  # reads them
        return [
            machine.share_quiet(is_quiet=is_quiet) for machine, is_quiet in zip(every, quiet, strict=True)
        ]

    until(lambda: shared([True, True, True]) == [True, True, True])
    for working in range(3):
        quiet = [number != working for number in range(3)]
        until(
            lambda quiet=quiet: (
                not any(seen for seen, is_quiet in zip(shared(quiet), quiet, strict=True) if is_quiet)
            )
        )  # type: ignore[misc]
    until(lambda: shared([True, True, True]) == [True, True, True])
    until(lambda: not any(shared([True, True, False])[:2]))
    every[2].end(ENDED_WELL)
    until(lambda: shared([True, True, False])[:2] == [True, True])
