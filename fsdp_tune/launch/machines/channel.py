"""The command's end of the control channel: its own document, and the last known one of each other machine.

The command imports no torch, so a child (`launch.machines.store`) holds the connection. If the child dies,
another one is started; nothing is lost, since each machine writes its present state again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from pydantic import TypeAdapter

from fsdp_tune.core import processes as children
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.core.command import Bar
from fsdp_tune.core.errors import FailedError, Problem
from fsdp_tune.launch.machines.route import INTERFACE_VARIABLES, Route
from fsdp_tune.launch.machines.store import LAUNCH, SERVED_SECONDS, Exchanged, JsonObject

CLOSE_SECONDS = SERVED_SECONDS + 5.0
"""Limit for the child to write the last document and to end."""
RESPAWN_SECONDS = 1.0
_EXCHANGED = TypeAdapter(Exchanged)


class Link(Protocol):
    """A running exchange: lines to it, lines from it."""

    def send(self, line: str) -> None:
        """Raises: OSError if the exchange has ended."""
        ...

    def lines(self) -> Iterable[str]:
        """Raises: OSError after the last line of an exchange that was killed or has failed."""
        ...

    def finish(self) -> None:
        """Let the exchange write the last document and end."""
        ...

    def kill(self) -> None: ...


class ChildLink:
    """The exchange in a child process."""

    def __init__(
        self, machine: int, machines: int, address: str, port: int, topic: str, folder: Path | None
    ) -> None:
        words = [
            sys.executable,
            "-m",
            "fsdp_tune.launch.machines.store",
            str(machine),
            str(machines),
            address,
            str(port),
            topic,
        ]
        words += [str(folder)] if folder is not None else []
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        self._child = children.start(
            words, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def send(self, line: str) -> None:
        assert self._child.stdin is not None, "it is a pipe"
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def lines(self) -> Iterable[str]:
        assert self._child.stdout is not None, "it is a pipe"
        yield from self._child.stdout
        if (code := self._child.wait()) != 0:
            raise ChildProcessError(f"the exchange has ended with {code}")

    def finish(self) -> None:
        assert self._child.stdin is not None, "it is a pipe"
        self._child.stdin.close()

    def kill(self) -> None:
        children.end(self._child)


@dataclass
class _Known:
    """What is known of another machine."""

    document: JsonObject = field(default_factory=dict[str, Any])
    changed_at: float = 0.0
    """Monotonic time at which the document last changed."""
    silent_seconds: float = 0.0
    told_at: float | None = None
    """When `silent_seconds` was reported; None: it has never been seen."""
    clock_seconds: float = 0.0


class Channel:
    """The documents of all machines of a run. Reading and writing never wait for the network."""

    def __init__(self, start: Callable[[], Link]) -> None:
        """`start` begins an exchange. It is called again if one ends by itself."""
        self._start = start
        self._state = threading.Condition()
        self._others: dict[int, _Known] = {}
        self._document: str | None = None
        self._line = ""
        """The document with its version. The versions go on in the next exchange: by them, the others know
        what they have read."""
        self._version = 0
        self._link: Link | None = None
        self._sent_to: tuple[Link, str] | None = None
        self._finished: Link | None = None
        self._is_closing = False
        self._replacements_left = 1
        """For exchanges that are killed while they let the others read the last document."""
        self._is_over = False
        """Whether no other exchange is started."""
        self._began = LIVED.now()
        self.last = Exchanged()
        """The last line of the exchange."""
        self._last_at = self._began
        self.fatal: str | None = None
        """Why the store cannot be served."""
        self.notice: str | None = None
        """A message for the user about the store."""
        # The kernel ends a child with the thread that started it; `close` ends both.
        self._reader = threading.Thread(target=self._exchange, name="machines-reader", daemon=True)
        self._writer = threading.Thread(target=self._write, name="machines-writer", daemon=True)
        self._reader.start()
        self._writer.start()

    def publish(self, document: Mapping[str, object]) -> None:
        """Replace this machine's document."""
        with self._state:
            text = json.dumps(document)
            if text != self._document:
                self._document, self._version = text, self._version + 1
                self._line = json.dumps({"version": self._version, "document": document})
            self._state.notify_all()

    def document(self, machine: int) -> JsonObject:
        """Return the last known document of another machine; {} before the first."""
        with self._state:
            known = self._others.get(machine)
            return known.document if known is not None else {}

    def silent_seconds(self, machine: int) -> float | None:
        """Return the seconds since the last sign of life of a machine; None before the first one."""
        with self._state:
            known = self._others.get(machine)
            return (
                None
                if known is None or known.told_at is None
                else known.silent_seconds + LIVED.now() - known.told_at
            )

    def unchanged_seconds(self, machine: int) -> float:
        """Return the seconds since the document of a machine last changed, at most those since the channel
        was opened."""
        with self._state:
            known = self._others.get(machine)
            return LIVED.now() - max(self._began, known.changed_at if known is not None else 0.0)

    def idle_seconds(self, machines: Iterable[int]) -> float:
        """Return the most seconds for which one of these machines has not changed its document, as it does
        while it counts work."""
        return max(map(self.unchanged_seconds, machines), default=0.0)

    def clock_seconds(self, machine: int) -> float:
        """Return how far the clock of a machine is ahead of this one's, to about a second."""
        with self._state:
            known = self._others.get(machine)
            return known.clock_seconds if known is not None else 0.0

    @property
    def refused_seconds(self) -> float:
        """Seconds for which the first machine has answered without serving a store; 0 if it serves one, or
        does not answer."""
        with self._state:
            return self.last.fault_seconds + LIVED.now() - self._last_at if self.last.is_refused else 0.0

    def refuse_fatal(self) -> None:
        """Raises: FailedError if the store cannot be served, without which no machine can join."""
        if self.fatal is not None:
            hint = (
                "end what uses the port, or set another `launch.main_process_port` on all machines (the "
                "channel has the port after it)"
            )
            raise FailedError(Problem("port-taken", self.fatal, hint=hint))

    def close(self) -> None:
        """Let the other machines read the last document, then end the exchange."""
        with self._state:
            self._is_closing = True
            self._state.notify_all()
        self._reader.join(CLOSE_SECONDS)
        with self._state:
            link, self._replacements_left = self._link, 0
        if link is not None:
            link.kill()

    def _exchange(self) -> None:
        try:
            self._read()
        finally:
            with self._state:
                self._is_over = True
                self._state.notify_all()

    def _read(self) -> None:
        """Start exchanges and read their lines until the channel is closed, and one has let the others read
        the last document."""
        while True:
            try:
                link = self._start()
            except OSError:  # no memory or no process for it now
                with self._state:
                    if self._state.wait_for(lambda: self._is_closing, RESPAWN_SECONDS):
                        return
                continue
            with self._state:
                self._link = link
                self._state.notify_all()
            is_killed = self._follow(link)
            link.kill()
            with self._state:
                self._link = None
                if self.fatal is not None or (self._is_closing and not is_killed):
                    return
                self._state.wait_for(lambda: self._is_closing, RESPAWN_SECONDS)
                if self._is_closing and (self._document is None or self._replacements_left == 0):
                    return
                self._replacements_left -= self._is_closing

    def _follow(self, link: Link) -> bool:
        """Read the lines of an exchange. Returns whether it was killed or has failed."""
        try:
            for line in link.lines():
                # what a machine wrote; without this thread, nothing would be read any more
                with contextlib.suppress(ValueError):
                    self._receive(_EXCHANGED.validate_json(line))
        except OSError:
            return True
        return False

    def _receive(self, told: Exchanged) -> None:
        with self._state:
            now = LIVED.now()
            self.fatal, self.notice = told.fatal or self.fatal, told.notice or self.notice
            self.last, self._last_at = told, now
            for machine, document in told.documents.items():
                known = self._others.setdefault(machine, _Known())
                if document != known.document:
                    known.document, known.changed_at = document, now
            for machine, seconds in told.silent_seconds.items():
                known = self._others.setdefault(machine, _Known())
                known.silent_seconds, known.told_at = seconds, now
                known.clock_seconds = told.clock_seconds.get(machine, 0.0)

    def _write(self) -> None:
        """Send each new document. A thread of its own: an exchange that is stopped reads nothing, and the
        command must not wait for it."""
        while True:
            with self._state:
                self._state.wait_for(lambda: self._unsent() or self._unfinished() or self._is_over)
                if self._is_over:
                    return
                pending, unfinished = self._unsent(), self._unfinished()
            with contextlib.suppress(OSError, ValueError):  # it has ended, and the next one gets the document
                if pending is not None:
                    is_new = self._sent_to is None or self._sent_to[0] is not pending[0]
                    if is_new and (heard := self._heard()):
                        pending[0].send(json.dumps({"heard": heard}))
                    pending[0].send(pending[1])
            with contextlib.suppress(OSError, ValueError):
                if unfinished is not None:
                    unfinished.finish()
            with self._state:
                self._sent_to = pending or self._sent_to
                self._finished = unfinished or self._finished

    def _heard(self) -> dict[int, float]:
        """Return, for an exchange that goes on in place of another, the seconds since each machine was
        heard."""
        with self._state:
            machines = [*self._others]
        silent = {machine: self.silent_seconds(machine) for machine in machines}
        return {machine: seconds for machine, seconds in silent.items() if seconds is not None}

    def _unfinished(self) -> Link | None:
        """Return the exchange that has to end after the last document."""
        return self._link if self._is_closing and self._link is not self._finished else None

    def _unsent(self) -> tuple[Link, str] | None:
        if self._link is None or self._document is None:
            return None
        return None if self._sent_to == (self._link, self._line) else (self._link, self._line)


def open_channel(
    machine: int,
    machines: int,
    address: str,
    port: int,
    folder: Path | None = None,
    topic: str = LAUNCH,
) -> Channel:
    """Open the channel of a machine. The first machine serves the store on this port of its address.

    `folder`: of archives. `topic`: `LAUNCH` or `CALL`.
    """
    return Channel(lambda: cast(Link, ChildLink(machine, machines, address, port, topic, folder)))


def network_message(route: Route | None, first: str, env: Mapping[str, str]) -> str:
    """Return the message of the network that gloo and NCCL use. `first`: address of the first machine; `env`:
    of the ranks."""
    if route is None:
        return (
            f"no interface leads to {first}: gloo and NCCL choose one themselves "
            f"({', '.join(INTERFACE_VARIABLES)})"
        )
    set_here = [name for name in INTERFACE_VARIABLES if env.get(name, "").lstrip("=") != route.interface]
    named = f"; {', '.join(f'{name}={env[name]}' for name in set_here)} is set" if set_here else ""
    return f"the network is {route}{named}"


class CountedBar:
    """A progress bar that also counts work for the other machines."""

    def __init__(self, bar: Bar, count: Callable[[int], None]) -> None:
        self._bar, self._count = bar, count

    def advance(self, n: int = 1) -> None:
        self._bar.advance(n)
        self._count(n)
