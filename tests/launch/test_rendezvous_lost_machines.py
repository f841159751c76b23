"""Machines of a run that lose their connection, their command or themselves, and what a store may contain."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from fsdp_tune.core.errors import ExitReason
from fsdp_tune.launch.machines import peers, store, tcp_store
from fsdp_tune.launch.supervise.attempts import _final
from tests.launch.fake_ranks import ended
from tests.launch.links import Answers, Play, failure_of, start, until

ENDED_WELL = ended(ExitReason.FINISHED)
KILLED = ended(ExitReason.LOST_RANK, "rank-killed", 5)
ECHO = ended(ExitReason.LOST_RANK, "lost-rank", 6)
pytestmark = pytest.mark.usefixtures("quick_machines")


@pytest.fixture
def play(play_of: Callable[[int], Play]) -> Play:
    return play_of(2)


def test_short_cut_of_the_link_costs_nothing(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    play.network.link(1).is_cut.set()
    until(lambda: second.channel.last.fault)
    first.end(KILLED)
    assert (first.failure_elsewhere(), second.failure_elsewhere()) == (None, None)
    play.network.link(1).is_cut.clear()
    until(second.failure_elsewhere)


def test_long_cut_of_the_link_is_a_lost_machine_on_both(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    monkeypatch.setattr(peers, "LOST_SECONDS", 0.3)
    play.network.link(1).is_cut.set()
    until(first.failure_elsewhere)
    until(second.failure_elsewhere)
    lost = [each.failure_elsewhere() for each in (first, second)]
    assert [each and each.code for each in lost] == ["machine-lost"] * 2
    assert lost[0] is not None
    assert lost[0].message.startswith("machine 1 (host-1) is lost: nothing has come from it for ")


def test_machine_that_died_with_its_ranks_is_named_instead_of_a_lost_connection(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    monkeypatch.setattr(peers, "UNHEARD_SECONDS", 0.2)
    play.network.link(1).is_cut.set()
    judged = first.verdict(ECHO)
    assert judged.problem is not None
    assert (judged.problem.code, judged.exit_code) == ("machine-lost", 5)


def test_command_that_was_started_again_joins_the_next_launch(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    second.close()
    again = play.machine(1)
    lost = failure_of(first)
    assert lost.message == "machine 1 (host-1) is lost: its command was started again"
    following = Answers(again.join, again.next_launch)
    assert first.gather(1) is None
    assert following.all() == [None, 1]


def test_first_machine_that_ended_without_a_word_is_lost(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REFUSED_SECONDS", 0.2)
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    second.end(ECHO)
    link = play.network.link(1)
    monkeypatch.setattr(play.network, "port", 1)  # nothing listens there
    link.is_cut.set()
    until(lambda: second.channel.last.fault)
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
    second.end(ENDED_WELL)
    until(lambda: first.read_others()[1].verdict)
    monkeypatch.setattr(peers, "LOST_SECONDS", 0.1)
    play.network.link(1).is_cut.set()
    time.sleep(0.2)
    assert first.failure_elsewhere() is None
    first.conclude(ENDED_WELL)
    play.network.link(1).is_cut.clear()
    until(lambda: (first_there := second.read(0)) is not None and first_there.state == "final")
    play.network.link(1).is_cut.set()
    time.sleep(0.2)
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
    first.conclude(ENDED_WELL)
    first.close()
    report = second.read(0)
    assert report is not None
    assert report.state == "final"


STRANGE_VALUES = [
    "",
    "[1]",
    "{",
    "[" * 100_000,
    '{"token": 1}',
    '{"token": "a", "version": "x", "seen": 1, "time": 1}',
    "null",
]


def test_values_that_this_program_has_not_written_are_ignored(play: Play) -> None:
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    play.network.link(1).is_cut.set()
    stranger = tcp_store.connect_to("127.0.0.1", play.network.port)
    for value in STRANGE_VALUES:
        for key in ("beat/1", "document/1"):
            stranger.set(key, value)
        time.sleep(0.05)
        assert first.failure_elsewhere() is None, value
    play.network.link(1).is_cut.clear()
    second.end(KILLED)
    until(first.failure_elsewhere)


def test_document_of_another_shape_is_ignored(play: Play) -> None:
    first = play.machine(0)
    stranger = play.network.channel(1)
    for number, document in enumerate(
        (
            {"token": "x", "launch": "many"},
            {"token": "x", "ended": {"exit_code": 99}, "life": first.report.life},
        )
    ):
        stranger.publish(document)
        until(lambda: first.channel.document(1) == document)  # noqa: B023
        assert first.failure_elsewhere() is None, number


def test_document_that_is_too_large_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LARGEST_BYTES", 10)
    assert store._object(b'{"a": 1}') == {"a": 1}
    assert store._object(b'{"a": 1, "b": 2}') == {}
