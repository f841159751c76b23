"""The machines of a run in one process, each with a channel of its own to a real store of torch."""

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

from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitReason, FsdpTuneError, Problem, usage_error
from fsdp_tune.core.processes import StoppedBySignal
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.resizing import announce_end
from fsdp_tune.launch.machines import launches as machines
from fsdp_tune.launch.machines import machine as one_machine
from fsdp_tune.launch.machines import store
from fsdp_tune.launch.machines.channel import CountedBar
from fsdp_tune.launch.machines.launches import Machines
from fsdp_tune.launch.machines.machine import Identity, combined, difference, identity_of
from fsdp_tune.launch.supervise import supervisor as supervisors
from fsdp_tune.launch.supervise.attempts import _final
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir, latest_checkpoint
from fsdp_tune.run.launch_files import RankState, Verdict
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from tests.launch.conftest import PlanOf
from tests.launch.links import Answers, Play, identity, start, until
from tests.launch.test_accelerate import resolved


def ended(reason: ExitReason, code: str | None = None, step: int = 3) -> Verdict:
    return Verdict(EXIT_CODE_OF_REASON[reason], reason, step, Problem(code, f"{code} happened") if code else None)


KILLED = ended(ExitReason.LOST_RANK, "rank-killed", 5)
ECHO = ended(ExitReason.LOST_RANK, "lost-rank", 6)
FAILED_THERE = ended(ExitReason.LOST_RANK, "machine-failed")
FINISHED = ended(ExitReason.FINISHED)
LIMIT_SECONDS = 0.5
pytestmark = pytest.mark.usefixtures("quick_machines")


@pytest.fixture
def play(play_of: Callable[[int], Play]) -> Play:
    return play_of(2)


@pytest.fixture
def two(play: Play) -> tuple[Machines, Machines]:
    return play.machine(0), play.machine(1)


# ---- Finding each other.


def test_single_machine_neither_announces_nor_waits(run: RunDir) -> None:
    run.logs.mkdir()
    with Machines(run) as alone:
        assert alone.gather(0) is None
        alone.advance(5)
        alone.end(KILLED)
        assert (alone.verdict(KILLED), alone.failure_elsewhere(), alone.share([RankState(0)], 1.0)) == (KILLED, None, [RankState(0)])
        assert alone.environment() == {}
        assert not alone.is_poll_due()
    assert list(run.logs.iterdir()) == []


class Listening(Observer):
    def __init__(self) -> None:
        self.heard: list[tuple[float, str]] = []

    def message(self, text: str) -> None:
        self.heard.append((time.monotonic(), text))


def test_error_is_shown_before_the_others_are_told(play: Play, run: RunDir) -> None:
    """A mistake of the first machine, started alone, was shown only when the others had been waited for."""
    seen = Listening()

    def end(machines: Machines) -> None:
        with machines, ExitStack() as stack:
            stack.push(partial(announce_end, seen, machines))
            raise usage_error("no-rows", "the file is empty")

    with pytest.raises(FsdpTuneError):
        end(play.machine(0))
    assert time.monotonic() - seen.heard[0][0] > 0.5
    assert [text.partition(";")[0] for _, text in seen.heard] == ["the file is empty"]
    with pytest.raises(FsdpTuneError):
        end(Machines(run))
    assert len(seen.heard) == 1


def test_missing_machine_is_named(play: Play) -> None:
    missing = play.machine(0, hang_seconds=0.2).gather(0)
    assert missing is not None
    assert missing.problem is not None
    assert missing.problem.code == "machines-missing"
    assert missing.problem.message.startswith("1 of 2 machines joined within ")
    assert missing.problem.message.endswith("; missing: machine 1")


@pytest.mark.parametrize("first_comes_first", [True, False])
def test_order_of_start_does_not_matter(play: Play, first_comes_first: bool) -> None:
    if first_comes_first:
        first = play.machine(0)
        gathering = Answers(lambda: first.gather(0))
        time.sleep(0.2)
        second = play.machine(1)
        assert (second.join(), second.next_launch()) == (None, 0)
        assert gathering.all() == [None]
    else:
        second = play.machine(1)
        following = Answers(second.join, second.next_launch)
        time.sleep(0.2)
        assert play.machine(0).gather(0) is None
        assert following.all() == [None, 0]
    assert json.loads(play.run.machines_json.read_bytes()) == {"0": "host-0", "1": "host-1"}


def test_first_machine_that_never_comes_is_named(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "JOIN_SECONDS", LIMIT_SECONDS)
    second = play.machine(1)
    play.network.link(1).is_cut.set()
    missing = second.join()
    assert missing is not None
    assert missing.problem is not None
    assert missing.problem.code == "first-machine-missing"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch 2.12.0 instead of 2.13.0"),
        ({"versions": {"torch": "2.13.0", "triton": "3.7"}}, "triton 3.7 instead of (not installed)"),
        ({"code": "other"}, "fsdp-tune's source other instead of c0de"),
        ({"recipe": {"data.max_length": "b"}}, "another value of `data.max_length`"),
        ({"devices": ["H100"]}, "visible devices: 1 instead of 0"),
        ({"variables": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE 1 instead of (unset)"),
        ({"ports": ["InfiniBand 400 Gb/sec"]}, "active InfiniBand ports: 1 × InfiniBand 400 Gb/sec instead of none"),
    ],
)
def test_machine_that_differs_is_named_on_both(play: Play, changes: dict[str, object], said: str) -> None:
    first, second = play.machine(0), play.machine(1, **changes)
    joining = Answers(second.join)
    verdict = first.gather(0)
    (there,) = joining.all()
    assert isinstance(there, Verdict)
    assert there.problem is not None
    assert there.problem.code == "machines-differ"
    assert there.problem.message == f"machine 1 (host-1) differs from machine 0 (host-0): {said}"
    assert there.problem.hint
    assert verdict is not None
    assert verdict.problem is not None
    assert verdict.problem.message == f"machine 1: {there.problem.message}"


def test_ports_may_differ_where_the_user_chooses_the_transport(play: Play) -> None:
    variables = {"NCCL_IB_DISABLE": "1"}
    start(play.machine(0, variables=variables), play.machine(1, variables=variables, ports=["InfiniBand 400 Gb/sec"]))


def test_clocks_that_differ_by_more_than_a_minute_are_refused(play: Play) -> None:
    mine, first = identity("b"), identity("a")
    assert difference(1, mine, first, -59.0) is None
    differs = difference(1, mine, first, 3600.0)
    assert differs is not None
    assert differs.message == "machine 1 (b) differs from machine 0 (a): a clock that is 1h00m00s behind the other"
    first_machine, second = play.machine(0), play.machine(1)
    start(first_machine, second)
    assert abs(second._channel.clock_seconds(0)) < 5.0


def test_every_difference_is_counted() -> None:
    mine = identity("b", code="x", versions={"torch": "1", "numpy": "2"}, recipe={"a": "1", "b": "2"})
    differs = difference(1, mine, identity("a"), 0.0)
    assert differs is not None
    assert differs.message.endswith("(and 1 more differences)")


def test_two_commands_with_one_number_are_refused(play: Play) -> None:
    first = play.machine(0)
    both = [play.machine(1), play.machine(1)]
    joining = [Answers(each.join) for each in both]
    until(lambda: any(each._channel.last.twin for each in both))
    first.advance(1)
    first.gather(0)
    codes = [found.problem.code for each in joining for found in each.found if isinstance(found, Verdict) and found.problem]
    assert "machine-twice" in codes


def test_machine_that_does_not_see_the_run_directory_is_named(play: Play, tmp_path: Path) -> None:
    first = play.machine(0)
    elsewhere = RunDir(tmp_path / "elsewhere")
    joining = Answers(play.machine(1, run=elsewhere).join)
    verdict = first.gather(0)
    (there,) = joining.all()
    assert isinstance(there, Verdict)
    assert there.problem is not None
    assert there.problem.code == "run-directory-not-shared"
    assert there.problem.message.endswith(f"{elsewhere.recipe_json} is not there")
    assert verdict is not None


def test_machine_waits_for_files_that_appear_late(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_machine, "VISIBLE_SECONDS", 20.0)
    late = RunDir(tmp_path / "late")
    late.path.mkdir()
    (late.path / "launch.json").write_text("{}")
    (late.path / "recipe.json").write_text("an older one")
    second = play.machine(1, run=late)
    following = Answers(second.join, second.next_launch)
    gathering = Answers(lambda: play.machine(0).gather(0))
    time.sleep(0.3)
    assert following.found == []
    late.recipe_json.write_text("{}")
    assert (following.all(), gathering.all()) == ([None, 0], [None])


def test_failure_of_first_machine_before_the_launch_ends_the_others(play: Play) -> None:
    second = play.machine(1)
    joining = Answers(second.join)
    first = play.machine(0)
    until(lambda: second._read(0) is not None)
    with pytest.raises(Exception, match="no such file"), first:
        raise usage_error("file-not-found", "no such file", hint="look")
    (there,) = joining.all()
    assert isinstance(there, Verdict)
    assert (there.exit_code, there.problem and there.problem.message) == (2, "machine 0: no such file")


def test_finished_run_ends_the_others(play: Play) -> None:
    second = play.machine(1)
    joining = Answers(second.join)
    play.machine(0).conclude(FINISHED)
    (there,) = joining.all()
    assert isinstance(there, Verdict)
    assert (there.exit_code, there.problem) == (0, None)


def test_stop_of_another_machine_before_the_launch_ends_the_first(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    until(lambda: second._read(0) is not None)
    second._publish(life=first._report.life)
    with pytest.raises(StoppedBySignal), second:
        raise StoppedBySignal(15)
    verdict = first.gather(0)
    assert verdict is not None
    assert (verdict.exit_code, verdict.reason, verdict.problem) == (143, ExitReason.PREEMPTED, None)


# ---- During a launch.


def test_failure_on_another_machine_stops_local_ranks(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    assert first.failure_elsewhere() is None
    second.end(KILLED)
    until(first.failure_elsewhere)
    failure = first.failure_elsewhere()
    assert failure is not None
    assert (failure.code, failure.message) == ("machine-failed", "machine 1: rank-killed happened")


def test_success_on_another_machine_is_not_a_failure(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    second.end(FINISHED)
    until(lambda: first._read_others()[1].verdict)
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


AGENT_AT_BARRIER = """
import os, subprocess, sys, time
subprocess.run([sys.executable, "-m", "tests.launch.fake_worker", sys.argv[1]], env={**os.environ, "RANK": sys.argv[2]})
time.sleep(600)
"""


@pytest.mark.parametrize("machine", [0, 1])
@pytest.mark.parametrize("is_told", [True, False], ids=["stopped", "killed"])
def test_agent_does_not_wait_at_its_barrier_for_a_machine_that_has_left(
    machine: int, is_told: bool, play: Play, plan_of: PlanOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisors, "LINGER_SECONDS", 0.2)
    both = play.machine(0, replacement_seconds=60.0), play.machine(1, replacement_seconds=60.0)
    start(*both)
    here, there = both[machine], both[1 - machine]
    finished = {"exit_code": 0, "exit_reason": "finished", "launch": here.launch_id}
    plan = plan_of({str(machine): [["outcome", finished]]})
    argv = (sys.executable, "-c", AGENT_AT_BARRIER, str(plan.run.path), str(machine))
    plan = replace(plan, argv=argv, world_size=2, ranks=range(machine, machine + 1))
    assert not here.has_one_left()
    if is_told:
        there.end(FINISHED)
    else:
        monkeypatch.setattr(machines, "UNHEARD_SECONDS", 0.3)
        play.network.link(1).is_cut.set()
    began = time.monotonic()
    *_, last = Supervisor(plan, hang_timeout_seconds=60.0, machines=here).events()
    assert isinstance(last, Verdict)
    assert (last.reason, last.problem) == (ExitReason.FINISHED, None)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("number", [0, 1])
def test_rank_that_lost_the_ranks_of_a_stopped_machine_is_stopped_too(number: int) -> None:
    """It lost its connection to them before it could agree on a step with them."""
    stopped = ended(ExitReason.PREEMPTED, step=0)
    judged = combined(ECHO, [stopped]) if number == 0 else _final(ECHO, stopped, None)
    assert (judged.exit_code, judged.reason, judged.problem) == (143, ExitReason.PREEMPTED, None)


def test_remote_out_of_memory_keeps_its_exit_code() -> None:
    oom = ended(ExitReason.OUT_OF_MEMORY, "device-out-of-memory")
    assert combined(ECHO, [oom]).exit_code == 3


def test_machines_follow_first_machine_through_restarts(two: tuple[Machines, Machines]) -> None:
    first, second = two
    start(first, second)
    second.end(KILLED)
    start(first, second, launch=1)
    first.conclude(FINISHED)
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


def test_failure_reaches_machines_that_do_not_read_each_other(play_of: Callable[[int], Play]) -> None:
    played = play_of(3)
    first, second, third = (played.machine(number) for number in range(3))
    start(first, second, third)
    second.end(KILLED)
    until(first.failure_elsewhere)
    until(third.failure_elsewhere)
    failure = third.failure_elsewhere()
    assert failure is not None
    assert failure.message == "machine 1: rank-killed happened"
    assert second.failure_elsewhere() is None  # its own


def test_stop_reaches_machines_that_do_not_read_each_other(play_of: Callable[[int], Play]) -> None:
    played = play_of(3)
    first, second, third = (played.machine(number) for number in range(3))
    start(first, second, third)
    second.end(ended(ExitReason.PREEMPTED))
    until(first.stopped_elsewhere)
    until(third.stopped_elsewhere)
    assert third.stopped_elsewhere() is ExitReason.PREEMPTED


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
    """Where the link is cut, neither learns whether the ranks of the other make progress, and both wait for them."""
    monkeypatch.setattr(machines, "UNHEARD_SECONDS", 3 * LIMIT_SECONDS)
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
    monkeypatch.setattr(machines, "ATTESTED_SECONDS", 3 * LIMIT_SECONDS)
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
    until(lambda: [machine.failure_elsewhere() or machine.share_quiet(is_quiet=True) for machine in (first, second)] == [True, True])
    for machine in (first, second):
        machine.end(KILLED)
    start(first, second, launch=1)
    for machine in (first, second):
        machine.failure_elsewhere()
        assert not machine._report.is_quiet
        assert not machine.share_quiet(is_quiet=True)


# ---- Lost connections and lost machines.


def test_machines_are_quiet_only_together(play_of: Callable[[int], Play]) -> None:
    """One that makes progress, such as a save to a slow disk, keeps all others from reporting a hang."""
    played = play_of(3)
    every = [played.machine(number) for number in range(3)]
    start(*every)

    def shared(quiet: Sequence[bool]) -> list[bool]:
        """What each machine learns of the others."""
        for machine in every:
            machine.failure_elsewhere()  # reads them
        return [machine.share_quiet(is_quiet=is_quiet) for machine, is_quiet in zip(every, quiet, strict=True)]

    until(lambda: shared([True, True, True]) == [True, True, True])
    for working in range(3):
        quiet = [number != working for number in range(3)]
        until(lambda quiet=quiet: not any(seen for seen, is_quiet in zip(shared(quiet), quiet, strict=True) if is_quiet))  # type: ignore[misc]
    until(lambda: shared([True, True, True]) == [True, True, True])
    until(lambda: not any(shared([True, True, False])[:2]))
    every[2].end(FINISHED)
    until(lambda: shared([True, True, False])[:2] == [True, True])


def test_short_cut_of_the_link_costs_nothing(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    play.network.link(1).is_cut.set()
    until(lambda: second._channel.last.fault)
    first.end(KILLED)
    assert (first.failure_elsewhere(), second.failure_elsewhere()) == (None, None)
    play.network.link(1).is_cut.clear()
    until(second.failure_elsewhere)


def test_long_cut_of_the_link_is_a_lost_machine_on_both(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    monkeypatch.setattr(machines, "LOST_SECONDS", 0.3)
    play.network.link(1).is_cut.set()
    until(first.failure_elsewhere)
    until(second.failure_elsewhere)
    lost = [each.failure_elsewhere() for each in (first, second)]
    assert [each and each.code for each in lost] == ["machine-lost"] * 2
    assert lost[0] is not None
    assert lost[0].message.startswith("machine 1 (host-1) is lost: nothing has come from it for ")


def test_machine_that_died_with_its_ranks_is_named_instead_of_a_lost_connection(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    monkeypatch.setattr(machines, "UNHEARD_SECONDS", 0.2)
    play.network.link(1).is_cut.set()
    judged = first.verdict(ECHO)
    assert judged.problem is not None
    assert (judged.problem.code, judged.exit_code) == ("machine-lost", 5)


def test_command_that_was_started_again_joins_the_next_launch(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    second.close()
    again = play.machine(1)
    until(first.failure_elsewhere)
    lost = first.failure_elsewhere()
    assert lost is not None
    assert lost.message == "machine 1 (host-1) is lost: its command was started again"
    following = Answers(again.join, again.next_launch)
    assert first.gather(1) is None
    assert following.all() == [None, 1]


def test_first_machine_that_ended_without_a_word_is_lost(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "REFUSED_SECONDS", 0.2)
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    second.end(ECHO)
    link = play.network.link(1)
    monkeypatch.setattr(play.network, "port", 1)  # nothing listens there
    link.is_cut.set()
    until(lambda: second._channel.last.fault)
    link.is_cut.clear()
    assert second.next_launch() is None
    ending = _final(ECHO, None, second.lost_first())
    assert ending.problem is not None
    assert (ending.exit_code, ending.problem.code) == (5, "machine-lost")


def test_first_machine_that_was_started_again_is_another_life(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    second.end(ECHO)
    first.close()
    play.machine(0)
    assert second.next_launch() is None
    lost = second.lost_first()
    assert lost is not None
    assert "its command was started again" in lost.message


def test_end_of_another_machine_is_not_its_loss(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    second.end(FINISHED)
    until(lambda: first._read_others()[1].verdict)
    monkeypatch.setattr(machines, "LOST_SECONDS", 0.1)
    play.network.link(1).is_cut.set()
    time.sleep(0.3)
    assert first.failure_elsewhere() is None
    first.conclude(FINISHED)
    play.network.link(1).is_cut.clear()
    until(lambda: (first_there := second._read(0)) is not None and first_there.state == "final")
    play.network.link(1).is_cut.set()
    time.sleep(0.3)
    assert second.failure_elsewhere() is None


def test_exchange_that_ends_is_started_again_with_the_present_document(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    play.network.link(1).finish()
    second.end(KILLED)
    until(first.failure_elsewhere)
    assert len(play.network.links[1]) > 1


def test_close_waits_until_the_last_document_is_read(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    first.conclude(FINISHED)
    first.close()
    report = second._read(0)
    assert report is not None
    assert report.state == "final"


# ---- What a store may contain.


@pytest.mark.parametrize(
    "value", ["", "[1]", "{", "[" * 100_000, '{"token": 1}', '{"token": "a", "version": "x", "seen": 1, "time": 1}', "null"]
)
def test_values_that_this_program_has_not_written_are_ignored(play: Play, value: str) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    play.network.link(1).is_cut.set()
    stranger = store.connect_to("127.0.0.1", play.network.port)
    for key in ("beat/1", "document/1"):
        stranger.set(key, value)
    time.sleep(0.1)
    assert first.failure_elsewhere() is None
    play.network.link(1).is_cut.clear()
    second.end(KILLED)
    until(first.failure_elsewhere)


def test_document_of_another_shape_is_ignored(play: Play) -> None:
    first = play.machine(0)
    stranger = play.network.channel(1)
    for number, document in enumerate(
        ({"token": "x", "launch": "many"}, {"token": "x", "ended": {"exit_code": 99}, "life": first._report.life})
    ):
        stranger.publish(document)
        until(lambda: first._channel.document(1) == document)  # noqa: B023
        assert first.failure_elsewhere() is None, number


def test_document_that_is_too_large_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LARGEST_BYTES", 10)
    assert store._object(b'{"a": 1}') == {"a": 1}
    assert store._object(b'{"a": 1, "b": 2}') == {}


def test_identity_has_no_value_of_the_recipe_and_no_secret(tmp_path: Path) -> None:
    recipe = resolved(tmp_path, "data.max_length=77")
    environment = {"NCCL_SECRET_THING": "value-of-it", "NCCL_NET_PLUGIN": "/my/plugin.so", "NCCL_IB_TIMEOUT": "22", "HF_TOKEN": "hf_x"}
    found = identity_of(recipe, environment)
    text = json.dumps(found.as_dict())
    assert "77" not in found.recipe.values()
    assert "/my/plugin.so" not in text
    assert "hf_x" not in text
    assert found.variables["NCCL_IB_TIMEOUT"] == "22"
    assert Identity.from_dict(json.loads(text)) == found


# ---- Waiting for a first machine that works.


@pytest.mark.parametrize("works", [True, False])
def test_waits_continue_while_first_machine_works(play: Play, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    for name in ("JOIN_SECONDS", "DECISION_SECONDS"):
        monkeypatch.setattr(machines, name, LIMIT_SECONDS)
    first, second = play.machine(0), play.machine(1)

    def busy() -> None:
        until_then = time.monotonic() + 3 * LIMIT_SECONDS
        while time.monotonic() < until_then:
            if works:
                first.advance(1000)
            time.sleep(0.02)

    following = Answers(second.join)
    busy()
    if not works:
        (missing,) = following.all()
        assert isinstance(missing, Verdict)
        assert missing.problem is not None
        assert missing.problem.code == "first-machine-missing"
        return
    launching = Answers(second.next_launch)
    assert first.gather(0) is None
    assert (following.all(), launching.all()) == ([None], [0])
    second.end(KILLED)
    deciding = Answers(second.next_launch)
    busy()
    assert first.gather(1) is None
    assert deciding.all() == [1]


def test_hashed_bytes_and_tokenised_rows_are_counted(run: RunDir) -> None:
    folder = run.checkpoint(3)
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * (5 << 20))
    entries = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, entries, {"step": 3}).to_json())
    counted: list[int] = []
    checkpoint, _ = latest_checkpoint(run, digests=True, progress=counted.append)
    assert checkpoint is not None
    assert (len(counted), sum(counted)) == (2, 5 << 20)
    bar: list[int] = []

    class Shown:
        def advance(self, n: int = 1) -> None:
            bar.append(n)

    CountedBar(Shown(), counted.append).advance(7)
    assert (bar, counted[-1]) == ([7], 7)
