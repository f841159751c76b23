"""Machines of a run in one process: each exchanges its documents in a thread, through a real store of torch
on loopback."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

from fsdp_tune.core.errors import Problem
from fsdp_tune.launch.machines import store, tcp_store
from fsdp_tune.launch.machines.channel import Channel
from fsdp_tune.launch.machines.identity import Identity
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Verdict

END = None


class ThreadLink:
    """An exchange in a thread, instead of in a child process."""

    def __init__(
        self,
        machine: int,
        machines: int,
        connect: Callable[[], tcp_store.KeyValueStore],
        folder: Path | None = None,
        topic: str = "launch",
    ) -> None:
        self._to: queue.Queue[str | None] = queue.Queue()
        self._from: queue.Queue[str | None] = queue.Queue()
        self.is_cut = threading.Event()
        """While set, no operation of the store succeeds."""

        def checked() -> tcp_store.KeyValueStore:
            if self.is_cut.is_set():
                raise tcp_store.StoreFault("the link is cut")
            return CutStore(connect(), self.is_cut)

        def run() -> None:
            try:
                lines = iter(self._to.get, END)
                store.exchange(machine, machines, checked, lines, self._from.put, folder, topic)
            finally:
                self._from.put(END)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def send(self, line: str) -> None:
        self._to.put(line)

    def lines(self) -> Iterator[str]:
        return iter(self._from.get, END)

    def finish(self) -> None:
        self._to.put(END)

    def kill(self) -> None:
        """Let the channel see its end; the thread itself ends with its input."""
        self._to.put(END)
        self._from.put(END)


class CutStore:
    def __init__(self, inner: tcp_store.KeyValueStore, is_cut: threading.Event) -> None:
        self._inner, self._is_cut = inner, is_cut

    def set(self, key: str, value: str, /) -> None:
        self._check()
        self._inner.set(key, value)

    def get(self, key: str, /) -> bytes:
        self._check()
        return self._inner.get(key)

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self._check()
        return self._inner.multi_get(keys)

    def delete_key(self, key: str, /) -> bool:
        self._check()
        return self._inner.delete_key(key)

    def _check(self) -> None:
        if self._is_cut.is_set():
            raise RuntimeError("recvValue failed")


class Values:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.values.get(key, b"{}")

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        return [self.get(key) for key in keys]

    def delete_key(self, key: str, /) -> bool:
        return self.values.pop(key, None) is not None


class Network:
    """The store of a run over `count` machines, and channels to it."""

    def __init__(self, count: int = 2) -> None:
        self._count = count
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        self._served: tcp_store.KeyValueStore | None = tcp_store.serve(listener, store.keys_of(count))
        self.links: dict[int, list[ThreadLink]] = {}
        self.channels: list[Channel] = []

    def channel(self, machine: int, folder: Path | None = None, topic: str = "launch") -> Channel:
        def connect() -> tcp_store.KeyValueStore:
            if machine > 0:
                return tcp_store.connect_to("127.0.0.1", self.port)
            assert self._served is not None, "the network is closed"
            return self._served

        def start() -> ThreadLink:
            link = ThreadLink(machine, self._count, connect, folder, topic)
            self.links.setdefault(machine, []).append(link)
            return link

        known = len(self.links.get(machine, []))
        channel = Channel(start)
        self.channels.append(channel)
        while len(self.links.get(machine, [])) == known:
            time.sleep(0.001)
        return channel

    def close(self) -> None:
        """End everything at once: no machine waits until the others have read its last document."""
        for links in self.links.values():
            for link in links:
                link.is_cut.clear()
        closing = [threading.Thread(target=channel.close) for channel in self.channels]
        names = ("PRESENT_SECONDS", "PRESENT_AT_STOP_SECONDS", "SERVED_SECONDS")
        with patch.multiple(store, **dict.fromkeys(names, 0.0)):
            for thread in closing:
                thread.start()
            for thread in (*closing, *(link.thread for links in self.links.values() for link in links)):
                thread.join(30.0)
        self._served = None  # the last reference, with which torch closes the port

    def link(self, machine: int) -> ThreadLink:
        return self.links[machine][-1]


def identity(host: str = "host", **changes: object) -> Identity:
    same: dict[str, object] = {
        "host": host,
        "versions": {"torch": "2.13.0"},
        "code": "c0de",
        "recipe": {"data.max_length": "a"},
        "device": "cpu",
        "devices": [],
    }
    return Identity.from_dict(same | changes)


class Play:
    """The machines of one run, which share its directory."""

    def __init__(self, run: RunDir, count: int = 2) -> None:
        run.logs.mkdir(exist_ok=True)
        for path in (run.recipe_json, run.launch_json):
            path.write_text("{}")
        self.run, self.count, self.network = run, count, Network(count)

    def machine(
        self,
        number: int,
        *,
        hang_seconds: float = 20.0,
        replacement_seconds: float = 0.0,
        run: RunDir | None = None,
        **changes: object,
    ) -> Machines:
        channel = self.network.channel(number)
        there = identity(f"host-{number}", **changes)
        limits = {"hang_seconds": hang_seconds, "replacement_seconds": replacement_seconds}
        machine = Machines(run or self.run, number, self.count, **limits, channel=channel, identity=there)
        return machine.__enter__()


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Answers:
    """What calls in a thread return."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self.found: list[object] = []
        self.thread = threading.Thread(
            target=lambda: [self.found.append(call()) for call in calls], daemon=True
        )
        self.thread.start()

    def all(self) -> list[object]:
        self.thread.join(30.0)
        assert not self.thread.is_alive()
        return self.found


def problem_of(verdict: object) -> Problem:
    """The problem of a verdict that has one."""
    assert isinstance(verdict, Verdict)
    assert verdict.problem is not None
    return verdict.problem


def failure_of(machine: Machines) -> Problem:
    """Wait until a machine sees a failure of another one."""
    until(machine.failure_elsewhere)
    problem = machine.failure_elsewhere()
    assert problem is not None
    return problem


def start(first: Machines, *others: Machines, launch: int = 0) -> None:
    """All agree on a launch; the others join first if they have not."""
    following = [Answers(*([each.join] if launch == 0 else []), each.next_launch) for each in others]
    assert first.gather(launch) is None
    assert [each.all()[-1] for each in following] == [launch] * len(others)
