"""One machine calls launches and the others follow: in one process, through a real store of torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, failed_error, usage_error
from fsdp_tune.launch.machines import calls
from fsdp_tune.launch.machines.calls import FirstMachine, LaunchCall, OtherMachine
from fsdp_tune.launch.machines.machine import MachineReport
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Verdict
from tests.launch.links import Answers, Network, identity, until

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
    return FirstMachine(lambda: network.channel(0), 2, hang_seconds)


def other_of(network: Network) -> OtherMachine:
    return OtherMachine(lambda: network.channel(1))


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
    with pytest.raises(FsdpTuneError) as raised, first_of(network, hang_seconds=0.1) as first:
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
    raised: list[FsdpTuneError] = []

    def follow() -> None:
        with pytest.raises(FsdpTuneError) as caught, other_of(network) as other:
            other.next_call()
        raised.append(caught.value)

    with pytest.raises(type(error)), first_of(network):
        following = Answers(follow)
        until(lambda: network.channels[-1].silent_seconds(0) is not None)
        raise error
    following.all()
    assert (raised[0].problems[0].code, raised[0].problems[0].message) == ("machine-failed", message)
    assert raised[0].exit_code == code


def test_error_of_another_machine_ends_the_calls(network: Network) -> None:
    def fail() -> None:
        with pytest.raises(FsdpTuneError), other_of(network):
            raise usage_error("no-such-file", "rows.jsonl is not there")

    with pytest.raises(FsdpTuneError) as raised, first_of(network) as first:
        failing = Answers(fail)
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
        until(lambda: network.channels[-1].document(0))
        launching.close()
        with first_of(network) as first:
            first.call("a/2")
            (call,) = following.all()
        assert isinstance(call, LaunchCall)
        assert call.run == "a/2"
        assert other.next_call().state == "final"


def test_machine_that_waits_for_the_launch_learns_of_the_end(network: Network, run: RunDir) -> None:
    """It has answered the call, which another machine has not."""
    failed = failed_error("machines-missing", "2 of 3 machines answered")
    with pytest.raises(FsdpTuneError), first_of(network):
        joining = Machines(
            run, 1, 2, hang_seconds=20.0, channel=network.channel(1), identity=identity()
        ).__enter__()
        following = Answers(joining.join)
        until(lambda: joining.read(0) is not None)
        raise failed
    (ended,) = following.all()
    assert isinstance(ended, Verdict)
    assert ended.reason is ExitReason.FAILED
    assert ended.problem is not None
    assert ended.problem.message == "machine 0: 2 of 3 machines answered"


def test_first_machine_that_was_started_again_is_not_followed(network: Network) -> None:
    with pytest.raises(FsdpTuneError) as raised, other_of(network) as other:
        following = Answers(other.next_call)
        killed = first_of(network).__enter__()
        killed.call("a/1")
        following.all()
        with first_of(network):
            other.next_call()
    assert raised.value.problems[0].code == "machine-lost"


def test_first_machine_that_never_comes_is_named(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "JOIN_SECONDS", 0.1)
    with pytest.raises(FsdpTuneError) as raised, other_of(network) as other:
        other.next_call()
    assert raised.value.problems[0].code == "first-machine-missing"
