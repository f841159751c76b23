from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.launch.machines import channel as channels
from fsdp_tune.launch.machines.channel import Channel, open_channel
from tests.launch.links import until


class Recorder:
    """An exchange that records its lines."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._ended = threading.Event()

    def send(self, line: str) -> None:
        self.sent.append(line)

    def lines(self) -> Iterable[str]:
        self._ended.wait()
        return ()

    def finish(self) -> None:
        self._ended.set()

    kill = finish


def documents(link: Recorder) -> list[tuple[int, dict[str, Any]]]:
    """The documents that an exchange was sent, with their versions."""
    return [(line["version"], line["document"]) for line in map(json.loads, link.sent) if "heard" not in line]


def test_document_is_sent_if_the_channel_is_closed_before_its_exchange_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the other machines do not learn why a command has ended, and closing takes its limit."""
    monkeypatch.setattr(channels, "CLOSE_SECONDS", 1.0)
    link = Recorder()

    def start() -> Recorder:
        time.sleep(0.05)
        return link

    channel, began = Channel(start), time.monotonic()
    channel.publish({"state": "ended"})
    channel.close()
    assert documents(link) == [(1, {"state": "ended"})]
    assert time.monotonic() - began < 0.9


def test_channel_whose_exchange_cannot_start_is_closed() -> None:
    def start() -> Recorder:
        raise OSError("no process can be started")

    channel, began = Channel(start), time.monotonic()
    channel.publish({"state": "ended"})
    channel.close()
    assert time.monotonic() - began < 2.0


class Scripted(Recorder):
    """An exchange that has these lines, and ends after them unless it `stays`."""

    def __init__(self, *lines: dict[str, Any] | str, stays: bool = True) -> None:
        super().__init__()
        self._lines, self._stays = lines, stays

    def lines(self) -> Iterable[str]:
        yield from (each if isinstance(each, str) else json.dumps(each) for each in self._lines)
        if self._stays:
            self._ended.wait()


def test_line_that_no_exchange_writes_does_not_end_the_reading() -> None:
    good = {"documents": {"1": {"state": "ready"}}, "silent_seconds": {"1": 0.5}, "clock_seconds": {"1": 2.0}}
    channel = Channel(lambda: Scripted("torn", '{"documents": []}', good))
    until(lambda: channel.document(1))
    assert channel.document(1) == {"state": "ready"}
    assert channel.document(2) == {}
    assert (channel.clock_seconds(1), channel.clock_seconds(2)) == (2.0, 0.0)
    assert 0.5 <= (channel.silent_seconds(1) or 0.0) < 10
    assert channel.silent_seconds(2) is None
    channel.close()


def test_only_a_document_that_differs_counts_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(channels, "LIVED", SimpleNamespace(now=lambda: now[0]))
    channel = Channel(Recorder)
    for seconds, count in ((10.0, 1), (10.0, 1), (10.0, 2), (10.0, 2)):
        now[0] += seconds
        channel._receive(channels._EXCHANGED.validate_python({"documents": {1: {"work": count}}}))
    assert (channel.unchanged_seconds(1), channel.unchanged_seconds(2)) == (10.0, 40.0)
    assert channel.idle_seconds([1, 2]) == 40.0
    assert channel.idle_seconds([]) == 0.0
    channel.close()


def test_refusal_of_the_first_machine_is_timed_until_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(channels, "LIVED", SimpleNamespace(now=lambda: now[0]))
    channel = Channel(Recorder)
    refused = {"fault": "refuses connections", "is_refused": True, "fault_seconds": 3.0}
    for told, seconds in ((refused, 7.0), ({"fault": "no answer", "fault_seconds": 3.0}, 0.0), ({}, 0.0)):
        channel._receive(channels._EXCHANGED.validate_python(told))
        now[0] += 4.0
        assert channel.refused_seconds == seconds
    channel.close()


def test_port_that_is_taken_ends_the_command_and_no_other_exchange_is_started() -> None:
    started = list[Recorder]()

    def start() -> Recorder:
        lines = ({"notice": "10.0.0.1 is not its address"}, {"fatal": "port 29501 cannot be used"}, {})
        started.append(Scripted(*lines, stays=False))
        return started[-1]

    channel = Channel(start)
    until(lambda: not channel._reader.is_alive())
    assert (len(started), channel.notice) == (1, "10.0.0.1 is not its address")
    with pytest.raises(FailedError, match="port 29501 cannot be used") as caught:
        channel.refuse_fatal()
    assert caught.value.problems[0].code == "port-taken"
    channel.close()
    served = Channel(Recorder)
    served.refuse_fatal()
    served.close()


def test_exchange_that_ends_by_itself_is_replaced_and_gets_the_document(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "RESPAWN_SECONDS", 0.01)
    links = [Scripted(stays=False), Scripted(stays=False), Scripted()]
    left = list(links)
    channel = Channel(lambda: left.pop(0))
    channel.publish({"state": "ready"})
    until(lambda: links[-1].sent)
    assert documents(links[-1]) == [(1, {"state": "ready"})]
    channel.close()
    assert left == []


class Killed(Recorder):
    """An exchange that is killed when a test sets `killed`."""

    def __init__(self) -> None:
        super().__init__()
        self.killed = threading.Event()

    def lines(self) -> Iterable[str]:
        self.killed.wait()
        raise OSError("it was killed")

    def finish(self) -> None: ...

    kill = finish


def test_versions_go_on_in_the_next_exchange() -> None:
    """Else the others take the next document for one that they have read."""
    links = [Killed(), Recorder()]
    left: list[Recorder] = list(links)
    channel = Channel(lambda: left.pop(0))
    for number in range(3):
        channel.publish({"n": number})
        until(lambda number=number: len(links[0].sent) == number + 1)
    channel.publish({"n": 2})
    links[0].killed.set()
    until(lambda: links[1].sent)
    channel.publish({"n": 3})
    channel.close()
    assert documents(links[0]) == [(1, {"n": 0}), (2, {"n": 1}), (3, {"n": 2})]
    assert documents(links[1]) == [(3, {"n": 2}), (4, {"n": 3})]


def test_next_exchange_knows_which_machines_were_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "RESPAWN_SECONDS", 0.01)
    links = [Scripted({"documents": {"1": {}}, "silent_seconds": {"1": 3.0}}, stays=False), Recorder()]
    left: list[Recorder] = list(links)
    channel = Channel(lambda: left.pop(0))
    channel.publish({"state": "running"})
    until(lambda: len(links[1].sent) == 2)
    channel.close()
    heard = json.loads(links[1].sent[0])["heard"]
    assert heard["1"] == pytest.approx(3.0, abs=2.0)


@pytest.mark.parametrize("before", [True, False], ids=["before it is closed", "while it is closed"])
def test_exchange_that_is_killed_at_the_end_is_replaced_once(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other machines would wait for the document, which says that the run has ended."""
    monkeypatch.setattr(channels, "RESPAWN_SECONDS", 30.0)
    first, second = Killed(), Recorder()
    left: list[Recorder] = [first, second]
    channel = Channel(lambda: left.pop(0))
    channel.publish({"state": "running"})
    until(lambda: first.sent)
    channel.publish({"state": "final"})
    until(lambda: len(first.sent) == 2)
    if before:
        first.killed.set()
        until(lambda: channel._link is None)
    closing = threading.Thread(target=channel.close)
    closing.start()
    until(lambda: channel._is_closing)
    first.killed.set()
    closing.join(20.0)
    assert not closing.is_alive()
    assert documents(second) == [(2, {"state": "final"})]


def test_exchange_that_is_killed_again_and_again_at_the_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "RESPAWN_SECONDS", 30.0)
    links = [Killed(), Killed()]
    left: list[Recorder] = list(links)
    for link in links:
        link.killed.set()
    channel = Channel(lambda: left.pop(0))
    channel.publish({"state": "final"})
    channel.close()
    assert left == []


class Pipe:
    def __init__(self) -> None:
        self.text, self.is_closed = "", False

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("code", [0, 1, -9])
def test_child_that_was_killed_is_told_from_one_that_has_ended(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = SimpleNamespace(stdout=["a line\n"], wait=lambda: code)
    monkeypatch.setattr(channels.children, "start", lambda *_, **__: child)
    lines = iter(channels.ChildLink(0, 2, "10.0.0.1", 29501, "launch", None).lines())
    assert next(lines) == "a line\n"
    with pytest.raises(StopIteration if code == 0 else ChildProcessError):
        next(lines)


@pytest.mark.parametrize("has_folder", [True, False])
def test_exchange_is_a_child_with_pipes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, has_folder: bool
) -> None:
    ended = threading.Event()

    def output() -> Iterable[str]:
        yield '{"documents": {"0": {"state": "ready"}}}\n'
        ended.wait()

    child = SimpleNamespace(stdin=Pipe(), stdout=output(), wait=lambda: 0)
    started = list[tuple[list[str], dict[str, str]]]()

    def start(words: list[str], environment: dict[str, str], **_: object) -> SimpleNamespace:
        started.append((words, environment))
        return child

    def close() -> None:
        child.stdin.is_closed = True
        ended.set()

    child.stdin.close = close
    killed = list[object]()
    monkeypatch.setattr(channels.children, "start", start)
    monkeypatch.setattr(channels.children, "end", killed.append)
    channel = open_channel(1, 2, "10.0.0.1", 29501, tmp_path if has_folder else None, topic="call")
    channel.publish({"state": "joining"})
    until(lambda: channel.document(0))
    until(lambda: child.stdin.text)
    channel.close()
    ((words, environment),) = started
    assert words[0] == sys.executable
    assert words[3:] == ["1", "2", "10.0.0.1", "29501", "call", *([str(tmp_path)] if has_folder else [])]
    assert environment["PYTHONSAFEPATH"] == "1", "a module in the working directory is not imported"
    assert child.stdin.text == '{"version": 1, "document": {"state": "joining"}}\n'
    assert (child.stdin.is_closed, set(map(id, killed))) == (True, {id(child)})
