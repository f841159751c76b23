"""One machine calls launches and the others follow: in one process, through a real store of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, failed_error, usage_error
from fsdp_tune.launch.machines import calls
from fsdp_tune.launch.machines.calls import FirstMachine, LaunchCall, OtherMachine
from fsdp_tune.launch.machines.machine import MachineReport
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.machines.store import StoreExchange
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Verdict
from tests.launch.links import Answers, Network, Play, Values, identity, problem_of, until

pytestmark = pytest.mark.usefixtures("quick_machines")


@pytest.fixture(autouse=True)
def quick_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "READ_SECONDS", 0.01)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


def first_of(network: Network, *, hang_seconds: float = 20.0) -> FirstMachine:
    return FirstMachine(lambda topic: network.channel(0, topic=topic), 2, hang_seconds)


def other_of(network: Network) -> OtherMachine:
    return OtherMachine(lambda topic: network.channel(1, topic=topic))


def follow(network: Network) -> None:
    """Answer one call."""
    with other_of(network) as other:
        other.next_call()


def error_of(call: Callable[[], object]) -> FsdpTuneError:
    """The error that a call raises."""
    with pytest.raises(FsdpTuneError) as raised:
        call()
    return raised.value


def test_each_launch_is_called_once_and_the_end_has_the_result(network: Network) -> None:
    found: list[LaunchCall] = []

    def follow() -> None:
        with other_of(network) as other:
            while not found or found[-1].state != "final":
                found.append(other.next_call())

    following = Answers(follow)
    with first_of(network) as first:
        first.call("a/1")
        first.call("a/3")
        first.succeed({"seconds": 2.0})
    following.all()
    assert [(each.call, each.run, each.state, each.result) for each in found] == [
        (1, "a/1", "waiting", None),
        (2, "a/3", "waiting", None),
        (3, "a/3", "final", {"seconds": 2.0}),
    ]


def test_missing_machine_ends_the_calls_and_is_named(network: Network) -> None:
    with first_of(network, hang_seconds=0.1) as first, pytest.raises(FsdpTuneError) as raised:
        first.call("a/1")
    problem = raised.value.problems[0]
    assert problem.code == "machines-missing"
    assert problem.message.startswith("1 of 2 machines answered within ")
    assert problem.message.endswith("; missing: machine 1")


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (usage_error("nothing-fits", "no recipe fits"), "machine 0: no recipe fits", ExitCode.USAGE),
        (failed_error("broken", "it broke"), "machine 0: it broke", ExitCode.FAILED),
        (KeyboardInterrupt(), "machine 0 was stopped by a signal", ExitCode.INTERRUPTED),
    ],
    ids=["usage", "failure", "Ctrl-C"],
)
def test_error_of_the_first_machine_ends_the_others(
    network: Network, error: BaseException, message: str, code: ExitCode
) -> None:
    following = Answers(partial(error_of, partial(follow, network)))

    def lead() -> None:
        with first_of(network):
            until(lambda: any(each.document(0) for each in network.channels))
            raise error

    with pytest.raises(type(error)):
        lead()
    (found,) = following.all()
    assert isinstance(found, FsdpTuneError)
    assert (found.problems[0].code, found.problems[0].message) == ("machine-failed", message)
    assert found.exit_code == code


def test_error_of_another_machine_ends_the_calls(network: Network) -> None:
    def fail() -> None:
        with other_of(network):
            raise usage_error("no-such-file", "rows.jsonl is not there")

    failing = Answers(partial(error_of, fail))
    with first_of(network) as first, pytest.raises(FsdpTuneError) as raised:
        first.call("a/1")
    failing.all()
    assert raised.value.problems[0].message == "machine 1: rows.jsonl is not there"
    assert raised.value.exit_code == ExitCode.USAGE


def test_document_of_a_launch_is_no_call(network: Network) -> None:
    """A machine that comes late waits for the next call while the others train."""
    launching = network.channel(0)
    launching.publish(MachineReport(token="t", life="t", state="running").as_dict())
    with other_of(network) as other:
        following = Answers(other.next_call)
        until(lambda: any(each.document(0) for each in network.channels))
        launching.close()
        with first_of(network) as first:
            first.call("a/2")
            (call,) = following.all()
        assert isinstance(call, LaunchCall)
        assert call.run == "a/2"
        assert other.next_call().state == "final"


def test_machine_that_waits_for_the_launch_learns_of_the_end(network: Network, run: RunDir) -> None:
    """It has answered the call, which another machine has not."""

    def joining() -> Verdict | None:
        channel = network.channel(1)
        return Machines(run, 1, 2, hang_seconds=20.0, channel=channel, identity=identity()).__enter__().join()

    def lead() -> None:
        with first_of(network):
            until(lambda: any(each.document(0) for each in network.channels))
            raise failed_error("machines-missing", "2 of 3 machines answered")

    following = Answers(joining)
    assert isinstance(error_of(lead), FsdpTuneError)
    (ended,) = following.all()
    assert isinstance(ended, Verdict)
    assert ended.reason is ExitReason.FAILED
    assert ended.problem is not None
    assert ended.problem.message == "machine 0: 2 of 3 machines answered"


def test_first_machine_that_was_started_again_is_not_followed(network: Network) -> None:
    with other_of(network) as other:
        following = Answers(other.next_call)
        killed = first_of(network).__enter__()
        killed.call("a/1")
        following.all()
        with first_of(network):
            found = error_of(other.next_call)
    assert found.problems[0].code == "machine-lost"


def test_first_machine_that_never_comes_is_named(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "JOIN_SECONDS", 0.1)
    assert error_of(partial(follow, network)).problems[0].code == "first-machine-missing"


def test_failure_before_the_next_call_stays_readable(
    play_of: Callable[[int], Play],
) -> None:
    """The first machine may still prepare the launch in which the other one has failed."""
    play = play_of(2)
    first, second = play.machine(0), play.machine(1, code="other")
    assert isinstance(second.join(), Verdict)
    second.close()
    with other_of(play.network) as other:
        following = Answers(partial(error_of, other.next_call))
        until(lambda: any(each.document(0) for each in play.network.channels[2:]))
        time.sleep(0.1)
        assert problem_of(first.gather(0)).message.startswith("machine 1: machine 1 (host-1) differs")
        first.close()
        with pytest.raises(FsdpTuneError), first_of(play.network):
            raise failed_error("broken", "it broke")
        following.all()


def test_what_an_earlier_channel_of_the_port_showed_does_not_count_as_read() -> None:
    """Else the first machine closed its store before the others had read the end of the command."""
    values = Values()
    before, other, after = (StoreExchange(machine, 2, lambda: values) for machine in (0, 1, 0))
    for _ in range(2):
        before.tick({"token": "a"}, 1)
        other.tick({"token": "x"}, 1)
    before.tick({"token": "a"}, 1)
    assert before.is_told(1, awaits_unseen=True)
    after.tick({"token": "b"}, 1)
    assert not after.is_told(1, awaits_unseen=True)
    for _ in range(2):
        other.tick({"token": "x"}, 1)
        after.tick({"token": "b"}, 1)
    assert after.is_told(1, awaits_unseen=True)
