"""The exchange of documents in the child of a command: its keys, what it reads from others, and its end."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.launch.machines import store
from fsdp_tune.launch.machines.store import (
    CALL,
    CHUNK_BYTES,
    LARGEST_BYTES,
    Archives,
    StoreExchange,
    exchange,
    keys_of,
    main,
)
from fsdp_tune.launch.machines.tcp_store import StoreFault
from tests.launch.links import Values


@pytest.fixture
def values() -> Values:
    return Values()


def of(machine: int, values: Values, machines: int = 2, **options: Any) -> StoreExchange:
    return StoreExchange(machine, machines, lambda: values, **options)


def test_keys_of_a_call_are_not_taken_for_a_launch() -> None:
    assert keys_of(2) == [
        "beat/0",
        "document/0",
        "beat/1",
        "call/beat/1",
        "document/1",
        "call/document/1",
    ]


def test_each_document_is_reported_once(values: Values) -> None:
    first, other = of(0, values), of(1, values)
    first.tick({"token": "a", "n": 1}, 1)
    assert other.tick({"token": "x"}, 1).documents == {0: {"token": "a", "n": 1}}
    first.tick({"token": "a", "n": 1}, 1)
    found = other.tick({"token": "x"}, 1)
    assert (found.documents, list(found.silent_seconds)) == ({}, [0])
    first.tick({"token": "a", "n": 2}, 2)
    assert other.tick({"token": "x"}, 1).documents == {0: {"token": "a", "n": 2}}


def test_machine_whose_beat_does_not_change_is_silent_and_not_waited_for(
    values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(store, "LIVED", SimpleNamespace(now=lambda: now[0]))
    first, other = of(0, values), of(1, values)
    assert first.tick({"token": "a"}, 1).silent_seconds == {}, "it was never seen"
    other.tick({"token": "x"}, 1)
    assert first.tick({"token": "a"}, 2).silent_seconds == {1: 0.0}
    now[0] += 7.0
    assert first.tick({"token": "a"}, 2).silent_seconds == {1: 7.0}
    assert not first.is_told(2, awaits_unseen=False), "it has read an earlier version"
    now[0] += store.PRESENT_AT_STOP_SECONDS - 7.0
    assert first.is_told(2, awaits_unseen=False)
    assert not first.is_told(2, awaits_unseen=True), "a signal did not end the command"
    now[0] += store.PRESENT_SECONDS
    assert first.is_told(2, awaits_unseen=True)
    for each in (other, other, first):
        found = each.tick({"token": "x"} if each is other else {"token": "a"}, 2)
    assert found.silent_seconds == {1: 0.0}


@pytest.mark.parametrize(
    ("heard", "seconds"),
    [
        ({}, store.SERVED_SECONDS),
        ({"1": 0.0}, store.PRESENT_SECONDS),
        ({"1": 25.6}, store.PRESENT_SECONDS - 25.6),
        ({"1": 99.0}, 0.0),
    ],
    ids=["nobody", "just heard", "cut off for 14 s, and until TCP tries again", "silent"],
)
def test_exchange_that_goes_on_for_another_waits_for_whom_that_had_heard(
    heard: dict[str, float], seconds: float, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.dumps({"heard": heard})
    found = ended_seconds(0, FINISHED, lambda: values, monkeypatch, before)
    assert found == pytest.approx(seconds, abs=store.PERIOD_SECONDS)


def test_second_command_with_the_number_of_a_machine_is_found(values: Values) -> None:
    one, two = of(1, values), of(1, values)
    assert one.tick({"token": "x"}, 1).twin is None
    assert two.tick({"token": "y"}, 1).twin is None, "its first beat replaces what an earlier command left"
    assert one.tick({"token": "x"}, 1).twin == "y"
    assert two.tick({"token": "y"}, 1).twin == "x"


def beat(**changes: object) -> bytes:
    good = {"beat": 1, "token": "a", "version": 1, "seen": ["", -1], "time": 1.0}
    return json.dumps(good | changes).encode()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[1]",
        b"[" * 100_000,
        beat(version="new"),
        beat(version=None),
        beat(seen=[]),
        beat(seen=7),
        beat(time="now"),
        beat(version=1e999),
        beat(note="x" * LARGEST_BYTES),
    ],
    ids=lambda raw: str(raw[:60]),
)
def test_beat_that_this_program_has_not_written_is_ignored(values: Values, raw: bytes) -> None:
    """The store has no authentication."""
    values.values |= {"beat/0": raw, "document/0": b'{"token": "a"}'}
    other = of(1, values)
    found = other.tick({"token": "x"}, 1)
    assert (found.documents, found.silent_seconds, found.fault) == ({}, {}, None)
    values.set("beat/0", beat().decode())
    assert other.tick({"token": "x"}, 1).documents == {0: {"token": "a"}}


def test_fault_is_reported_with_its_length_and_the_store_is_opened_again(
    values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, opened = [100.0], list[None]()
    faults: list[Exception] = [
        StoreFault("refuses connections", is_refused=True),
        RuntimeError("recvValue failed\nframe #0"),
    ]
    monkeypatch.setattr(store, "LIVED", SimpleNamespace(now=lambda: now[0]))

    def fails(*_: object) -> None:
        raise OSError("reset")

    def connect() -> Values:
        opened.append(None)
        if faults:
            raise faults.pop(0)
        return values

    other = StoreExchange(1, 2, connect)
    found = other.tick({"token": "x"}, 1)
    assert (found.fault, found.is_refused, found.fault_seconds) == ("refuses connections", True, 0.0)
    now[0] += 7.0
    found = other.tick({"token": "x"}, 1)
    assert (found.fault, found.is_refused, found.fault_seconds) == ("recvValue failed", False, 7.0)
    assert other.tick({"token": "x"}, 1).fault is None
    values.values.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Values, "multi_get", fails)
        assert other.tick({"token": "x"}, 1).fault_seconds == 0.0, "a fault of its own"
    assert "document/1" not in values.values, "it was published before"
    assert other.tick({"token": "x"}, 1).fault is None
    assert "document/1" in values.values, "a new store gets the document again"
    assert len(opened) == 4


@pytest.fixture
def archives(tmp_path: Path) -> tuple[Path, Path]:
    """The folders of the first machine and another one."""
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
    return tmp_path / "first", tmp_path / "other"


def named(name: str, size_bytes: object) -> dict[str, Any]:
    return {"token": "a", "files": {"archive": name, "archive_bytes": size_bytes}}


ONE, TWO = "1" * 32, "2" * 32


def test_archive_is_complete_on_the_other_machine_and_replaced_by_the_next(
    values: Values, archives: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHUNKS_AT_ONCE", 2)
    first, other = (of(machine, values, folder=archives[machine]) for machine in (0, 1))
    data = bytes(range(256)) * (2 * CHUNK_BYTES // 256) + b"end"
    (archives[0] / ONE).write_bytes(data)
    (archives[0] / TWO).write_bytes(b"two")
    first.tick(named(ONE, len(data)), 1)
    other.tick({"token": "x"}, 1)
    assert [path.name for path in archives[1].iterdir()] == [f"{ONE}.part"], "some chunks between two beats"
    other.tick({"token": "x"}, 1)
    assert [path.name for path in archives[1].iterdir()] == [ONE]
    assert (archives[1] / ONE).read_bytes() == data
    first.tick(named(TWO, 3), 2)
    assert [key for key in values.values if key.startswith("archive/")] == [f"archive/{TWO}/0"]
    other.tick({"token": "x"}, 1)
    assert (archives[1] / TWO).read_bytes() == b"two"


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [
        ("../" + "1" * 29, 3),
        ("1" * 31, 3),
        (ONE, 0),
        (ONE, -1),
        (ONE, (1 << 30) + 1),
        (ONE, "x"),
        (ONE, None),
    ],
)
def test_archive_with_another_name_or_size_is_not_fetched(
    values: Values, archives: tuple[Path, Path], name: str, size_bytes: object
) -> None:
    values.set(f"archive/{name}/0", "dHdv")
    Archives(archives[1]).fetch(values, named(name, size_bytes))
    assert list(archives[1].iterdir()) == []


@pytest.mark.parametrize("chunk", ["", "no base64!", "dHdvIG1vcmU="])
def test_chunk_of_another_size_is_a_fault(values: Values, archives: tuple[Path, Path], chunk: str) -> None:
    values.set(f"archive/{ONE}/0", chunk)
    with pytest.raises(StoreFault, match="another size than was announced"):
        Archives(archives[1]).fetch(values, named(ONE, 3))
    assert not (archives[1] / ONE).exists()


def lines(*documents: dict[str, Any]) -> Iterator[str]:
    return iter(
        [json.dumps({"version": version, "document": each}) for version, each in enumerate(documents, 1)]
    )


def ended_seconds(
    machine: int,
    document: dict[str, Any],
    connect: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    *before: str,
) -> float:
    """The seconds after which the exchange ends whose command has ended with this document."""
    now = [0.0]
    monkeypatch.setattr(store, "LIVED", SimpleNamespace(now=lambda: now[0]))

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(store, "time", SimpleNamespace(sleep=sleep, time=time.time))
    monkeypatch.setattr(store._Inbox, "wait", lambda *_: None)
    exchange(machine, 2, connect, iter([*before, *lines(document)]), lambda _: None)
    return now[0]


FAILED = {"token": "a", "ended": {"problem": {"code": "x"}, "exit_reason": "failed"}}
STOPPED = {"token": "a", "ended": {"problem": None, "exit_reason": "interrupted"}}
FINISHED = {"token": "a", "ended": {"problem": None, "exit_reason": "finished"}}


@pytest.mark.parametrize(
    ("machine", "document", "seconds"),
    [
        (0, FAILED, store.SERVED_SECONDS),
        (0, FINISHED, store.SERVED_SECONDS),
        (0, STOPPED, 0.0),
        (0, {"token": "a"}, 0.0),
        (1, FAILED, 0.0),
    ],
    ids=["failed", "finished", "stopped", "nothing to say", "other machine"],
)
def test_first_machine_waits_for_machines_that_may_come_unless_a_signal_ended_it(
    values: Values, monkeypatch: pytest.MonkeyPatch, machine: int, document: dict[str, Any], seconds: float
) -> None:
    found = ended_seconds(machine, document, lambda: values, monkeypatch)
    assert found == pytest.approx(seconds, abs=store.PERIOD_SECONDS)


@pytest.mark.parametrize(("document", "seconds"), [(FAILED, store.UNSERVED_SECONDS), (STOPPED, 0.0)])
def test_other_machine_waits_for_the_store_to_report_its_failure(
    monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], seconds: float
) -> None:
    def connect() -> Values:
        raise StoreFault("refuses connections")

    found = ended_seconds(1, document, connect, monkeypatch)
    assert found == pytest.approx(seconds, abs=store.PERIOD_SECONDS)


def test_command_that_ends_before_its_first_document_connects_to_nothing() -> None:
    exchange(0, 2, lambda: pytest.fail("it has connected"), lines(), pytest.fail)


class Exited(BaseException):
    """In place of `os._exit`."""


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, values: Values) -> SimpleNamespace:
    """The process of `main`: what it serves, and how its exchange was called."""
    found = SimpleNamespace(served=[], calls=[], during=lambda _connect: None)

    def called(machine: int, machines: int, connect: Callable[[], Any], *rest: Any) -> None:
        found.calls.append((machine, machines, *rest[2:]))
        found.during(connect)

    def serve(listener: socket.socket, keys: list[str]) -> Values:
        found.served.append((listener.getsockname(), keys))
        listener.close()
        return values

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(store.os, "_exit", leave)
    monkeypatch.setattr(store, "exchange", called)
    monkeypatch.setattr(store, "serve", serve)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return found


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_child_of_the_first_machine_serves_once(
    child: SimpleNamespace, values: Values, free_port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a fault of its own store, only another child helps."""

    def during(connect: Callable[[], Any]) -> None:
        assert connect() is values
        with pytest.raises(Exited, match="1"):
            connect()

    child.during = during
    with pytest.raises(Exited, match="0"):
        main(["0", "2", "127.0.0.1", str(free_port), CALL, str(tmp_path)])
    assert child.served == [(("127.0.0.1", free_port), keys_of(2))]
    assert child.calls == [(0, 2, tmp_path, CALL)]
    assert capsys.readouterr().out == ""
    assert store.os.environ["TORCH_CPP_LOG_LEVEL"] == "FATAL"


def test_child_of_the_first_machine_reports_an_address_that_is_not_its_own(
    child: SimpleNamespace, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exited, match="0"):
        main(["0", "2", "192.0.2.1", str(free_port), "launch"])
    (line,) = capsys.readouterr().out.splitlines()
    assert "192.0.2.1 is not an address of this machine" in json.loads(line)["notice"]
    assert child.calls == [(0, 2, None, "launch")]


def test_child_of_the_first_machine_ends_if_its_port_is_taken(
    child: SimpleNamespace, free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        assert main(["0", "2", "127.0.0.1", str(free_port), "launch"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["fatal"] == (
        f"port {free_port} of 127.0.0.1 cannot be used: Address already in use"
    )
    assert child.calls == []


def test_child_of_another_machine_connects_to_the_first(
    child: SimpleNamespace, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "connect_to", lambda address, port: (address, port))
    found = list[object]()
    child.during = lambda connect: found.append(connect())
    with pytest.raises(Exited, match="0"):
        main(["1", "2", "10.0.0.1", "29501", "launch"])
    assert (found, child.served) == ([("10.0.0.1", 29501)], [])
