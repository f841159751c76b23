"""A run over several machines continues on fewer of them, and on all again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.machines import peers
from fsdp_tune.launch.machines.machine import Fewer, Standby
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.supervise.attempts import Attempts, Resized
from fsdp_tune.launch.supervise.launch_events import Event, Message
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.rank_files import Verdict
from tests.launch.fake_ranks import PlanOf, ended, messages
from tests.launch.links import Answers, Play, failure_of, problem_of, start, until
from tests.launch.recipes import resolved

PATIENCE_SECONDS = 0.3
pytestmark = pytest.mark.usefixtures("quick_machines")


def two_or_more(count: int) -> bool:
    return count >= 2


def continue_without_second(first: Machines, third: Machines) -> None:
    """Leave out the second machine of three, from which nothing is heard any more."""
    following = Answers(third.next_launch)
    assert first.gather(1, first.expected(), two_or_more) == Fewer((0, 2))
    assert first.gather(2, (0, 2), two_or_more) is None
    assert following.all() == [2]


@pytest.fixture
def three(play_of: Callable[[int], Play], monkeypatch: pytest.MonkeyPatch) -> tuple[Play, list[Machines]]:
    monkeypatch.setattr(peers, "UNHEARD_SECONDS", PATIENCE_SECONDS)
    played = play_of(3)
    every = [played.machine(number, replacement_seconds=PATIENCE_SECONDS) for number in range(3)]
    start(*every)
    return played, every


def test_launch_without_a_lost_machine_numbers_the_others_anew(three: tuple[Play, list[Machines]]) -> None:
    played, (first, second, third) = three
    second.close()
    continue_without_second(first, third)
    assert (first.members, third.members) == ((0, 2), (0, 2))
    assert (first.others, third.others) == ([2], [0])
    assert first.environment() == third.environment()
    assert '"1": "host-2"' in played.run.machines_json.read_text()


def test_too_few_machines_end_the_run(
    three: tuple[Play, list[Machines]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (first, second, third) = three
    second.close()
    third.close()
    monkeypatch.setattr(first, "hang_seconds", 2 * PATIENCE_SECONDS)
    problem = problem_of(first.gather(1, first.expected(), two_or_more))
    assert problem.code == "machines-missing"
    assert problem.message.endswith("; missing: machine 1, machine 2")


def test_machine_that_comes_back_waits_and_joins_the_next_launch(three: tuple[Play, list[Machines]]) -> None:
    played, (first, second, third) = three
    second.close()
    continue_without_second(first, third)
    again = played.machine(1)
    waiting = Answers(again.join, again.next_launch, again.next_launch)
    until(lambda: len(waiting.found) == 2)
    assert waiting.found == [None, Standby((0, 2))]
    assert first.failure_elsewhere() is None
    until(lambda: first.expected() == [0, 1, 2])
    following = Answers(third.next_launch)
    assert first.gather(3, first.expected(), two_or_more) is None
    assert (following.all(), waiting.all()[-1]) == ([3], 3)
    assert again.members == (0, 1, 2)


def test_machine_that_waits_outside_a_launch_neither_ends_nor_stops_it(
    three: tuple[Play, list[Machines]],
) -> None:
    played, (first, second, third) = three
    second.close()
    continue_without_second(first, third)
    other = played.machine(1, versions={"torch": "2.0"})
    assert problem_of(other.join()).code == "machines-differ"
    until(lambda: (report := first.read(1)) is not None and report.verdict is not None)
    assert (first.failure_elsewhere(), first.stopped_elsewhere()) == (None, None)
    assert first.expected() == [0, 2]


def test_replacement_that_differs_is_left_out_of_a_restart(three: tuple[Play, list[Machines]]) -> None:
    played, (first, second, third) = three
    second.close()
    other = played.machine(1, versions={"torch": "2.0"})
    joining, following = Answers(other.join), Answers(third.next_launch)
    joining.all()
    assert first.gather(1, first.expected(), two_or_more) == Fewer((0, 2))
    first.conclude(ended(ExitReason.FINISHED))
    following.all()


def test_patience_for_a_replacement_may_be_longer_than_for_a_hang(three: tuple[Play, list[Machines]]) -> None:
    _, (first, second, third) = three
    first.hang_seconds = PATIENCE_SECONDS / 2
    second.close()
    following = Answers(third.next_launch)
    assert first.gather(1, first.expected(), two_or_more) == Fewer((0, 2))
    first.conclude(ended(ExitReason.FINISHED))
    following.all()


def test_machine_that_was_cut_off_ends_its_ranks_when_the_others_have_gone_on(
    three: tuple[Play, list[Machines]],
) -> None:
    played, (first, second, third) = three
    second.replacement_seconds = 3600.0  # it does not give up by itself
    played.network.link(1).is_cut.set()
    until(lambda: not first.is_there(1))
    continue_without_second(first, third)
    assert second.failure_elsewhere() is None
    played.network.link(1).is_cut.clear()
    problem = failure_of(second)
    assert problem.code == "machine-lost"
    second.end(ended(ExitReason.LOST_RANK, "lost-rank"))
    assert isinstance(second.next_launch(), Standby)


@pytest.mark.parametrize("replacement_seconds", [0.0, 60.0, 300.0, 3600.0])
def test_machine_that_is_cut_off_gives_up_before_the_first_continues_without_it(
    play_of: Callable[[int], Play], replacement_seconds: float
) -> None:
    played = play_of(2)
    first, second = (
        played.machine(number, replacement_seconds=replacement_seconds, hang_seconds=1800.0)
        for number in range(2)
    )
    start(first, second)
    earliest_seconds = peers.UNHEARD_SECONDS + replacement_seconds
    for silent_seconds in (earliest_seconds - 5.0, peers.LOST_SECONDS + 1.0):
        second.channel.silent_seconds = lambda _, seconds=silent_seconds: seconds  # type: ignore[method-assign]
        assert second.failure_elsewhere() is not None


class Sizes:
    """A run that can do with some numbers of machines, if it `fits`."""

    def __init__(self, plan: LaunchPlan, *, fits: bool = True, allowed: Sequence[int] = (1, 2, 3)) -> None:
        self.made, self.fits, self.allowed = plan, fits, allowed
        self.written: list[tuple[int, ...]] = []

    def allows(self, machines: int) -> bool:
        return machines in self.allowed

    def plan(self, members: Sequence[int]) -> LaunchPlan:
        return replace(self.made, world_size=len(members))

    def resize(self, members: Sequence[int]) -> Resized:
        if not self.fits:
            raise FsdpTuneError(Problem("does-not-fit", "too large"), exit_code=ExitCode.USAGE)
        self.written.append(tuple(members))
        return Resized(self.plan(members), 4, len(members), 6 // len(members))


class Scripted(Attempts):
    """Launches that end as scripted, or when another machine fails."""

    script: list[Callable[[Machines], Verdict]]
    has_signal = False

    def _launch(self) -> Generator[Event, None, Any]:
        first, others = self._machines, self._machines.others
        if first.machine == 0:  # a launch takes time, in which the others see that it has started
            until(
                lambda: all(
                    (report := first.read(each)) is not None and report.state in ("running", "ended")
                    for each in others
                )
            )
        verdict = self.script.pop(0)(self._machines)
        yield Message(f"ran on {len(self._machines.members)}")

        class Done:
            signals = [15] if self.has_signal else []
            has_trained = True

        return Done(), verdict


def loses_a_peer(machine: Machines) -> Verdict:
    return ended(ExitReason.LOST_RANK, "lost-rank")


def finishes(machine: Machines) -> Verdict:
    return ended(ExitReason.FINISHED)


class Command:
    """The command of one machine, in a thread."""

    def __init__(
        self,
        machine: Machines,
        plan: LaunchPlan,
        recipe: Any,
        script: list[Any],
        *,
        signal: bool = False,
        **sizes: Any,
    ) -> None:
        self.sizes = Sizes(plan, **sizes)
        self.attempts = Scripted(plan, recipe, lambda step: None, None, machine, sizes=self.sizes)
        self.attempts.script, self.attempts.has_signal = script, signal
        self.events: list[Event] = []
        self.thread = threading.Thread(target=self._run, args=(machine,), daemon=True)
        self.thread.start()

    def _run(self, machine: Machines) -> None:
        if machine.machine > 0:
            assert machine.join() is None
        with suppress(Killed):
            self.events.extend(self.attempts.events())
            machine.close()

    def end(self) -> Verdict:
        self.thread.join(30.0)
        assert not self.thread.is_alive()
        assert isinstance(self.events[-1], Verdict)
        return self.events[-1]


@pytest.fixture
def commands(
    play_of: Callable[[int], Play],
    plan_of: PlanOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., list[Command]]:
    monkeypatch.setattr(peers, "UNHEARD_SECONDS", PATIENCE_SECONDS)
    recipe = resolved(tmp_path, "launch.max_restarts=3")
    plan = plan_of({"0": []})

    def run(*scripts: list[Any], **changes: dict[int, Any]) -> list[Command]:
        played = play_of(3)
        made = list[Command]()
        for number, script in enumerate(scripts):
            machine = played.machine(number, replacement_seconds=PATIENCE_SECONDS)
            own = {name: values[number] for name, values in changes.items() if number in values}
            made.append(Command(machine, replace(plan, machine_rank=number), recipe, script, **own))
        return made

    return run


class Killed(Exception):
    """Ends the command of a machine without a word."""


def dies(machine: Machines) -> Verdict:
    machine.close()
    raise Killed


def test_run_continues_on_two_of_three_machines(commands: Callable[..., list[Command]], run: RunDir) -> None:
    first, _, third = commands([loses_a_peer, finishes], [dies], [loses_a_peer, finishes])
    assert (first.end().exit_code, third.end().exit_code) == (0, 0)
    assert first.sizes.written == [(0, 2)]
    said = (
        "continuing on machines 0, 2, without machine 1: 2 ranks × 3 micro-batches a step; the global "
        "batch is the same"
    )
    assert said in messages(first.events)
    assert "this machine runs rank 0 of 2" in messages(third.events)
    restarted, changed = [
        line for line in read_metrics(run) if line["event"] in ("restarted", "machines_changed")
    ]
    assert restarted["code"] == "machine-lost"
    assert (changed["step"], changed["machines"], changed["ranks"]) == (4, [0, 2], 2)
    assert (changed["gradient_accumulation_steps"], changed["message"]) == (3, said)


def test_run_continues_on_the_next_smaller_number_that_is_possible(
    commands: Callable[..., list[Command]],
) -> None:
    first, _, third = commands(
        [loses_a_peer, finishes], [dies], [loses_a_peer], allowed=dict.fromkeys(range(3), (1, 3))
    )
    assert first.end().exit_code == 0
    assert first.sizes.written == [(0,)]
    assert third.end().exit_code == 0


def test_files_that_cannot_be_written_for_fewer_machines_end_the_run(
    commands: Callable[..., list[Command]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(sizes: Sizes, members: Sequence[int]) -> Resized:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Sizes, "resize", full)
    first, _, third = commands([loses_a_peer], [dies], [loses_a_peer])
    assert "No space left on device" in problem_of(first.end()).message
    assert third.end().exit_code == first.end().exit_code == 1


def test_run_continues_alone(commands: Callable[..., list[Command]]) -> None:
    first, *_ = commands([loses_a_peer, finishes], [dies], [dies])
    assert first.end().exit_code == 0
    assert first.sizes.written == [(0,)]


def is_stopped(machine: Machines) -> Verdict:
    return ended(ExitReason.PREEMPTED)


def test_machine_that_a_scheduler_stops_is_left_out(commands: Callable[..., list[Command]]) -> None:
    first, second, third = commands(
        [is_stopped, finishes], [is_stopped], [is_stopped, finishes], signal={1: True}
    )
    assert [each.end().exit_code for each in (first, second, third)] == [0, 143, 0]
    assert first.sizes.written == [(0, 2)]


def test_signal_to_the_first_machine_stops_all(commands: Callable[..., list[Command]]) -> None:
    every = commands([is_stopped], [is_stopped], [is_stopped], signal={0: True})
    assert [each.end().exit_code for each in every] == [143, 143, 143]


def test_fewer_machines_without_enough_memory_end_the_run(commands: Callable[..., list[Command]]) -> None:
    first, _, third = commands([loses_a_peer], [dies], [loses_a_peer], fits={0: False})
    assert (first.end().exit_code, problem_of(first.end()).code) == (2, "does-not-fit")
    assert third.end().exit_code == 2
