"""The child of a command that exchanges documents with the other machines of the run through torch's
TCPStore.

    python -m fsdp_tune.launch.machines.store MACHINE MACHINES ADDRESS PORT TOPIC [FOLDER]

The child of the first machine serves the store. Each line on stdin replaces this machine's document: a JSON
object with it and its version, which grows with each document of the command. An exchange that goes on in
place of one that was killed first gets a line with the seconds since each other machine was heard. The end
of stdin ends the exchange. Each line on stdout is an `Exchanged` as JSON. The command starts it as a process
of its own, since it needs torch.

Two keys a machine: `document/N`, and `beat/N`, a few bytes that change each second and name the version of
the document. Under the topic `call`, those of the other machines begin with it, so that the first machine
takes none for a document about a launch. The first machine reads the beats of all others in one operation,
the others only that of the first, so the operations grow with the number of machines. What is in the store
is only the present state of the machines, and each of them writes its own again after a lost connection.
So the store may be served again by another child at any time, and nothing in it outlives the command of the
first machine.

A document of the first machine may name an archive. Its child puts the file of that name in FOLDER into the
store, in chunks, and the others write it into their FOLDER when they have all of them.

The store has no authentication: any process that reaches the port can read and replace the documents. They
are JSON of bounded size.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.clocks import LIVED
from fsdp_tune.launch.machines.tcp_store import (
    KeyValueStore,
    StoreFault,
    connect_to,
    listening_socket,
    serve,
)

PERIOD_SECONDS = 0.5
SERVED_SECONDS = 30.0
"""Limit for the other machines to read the last document of the first one before its store ends."""
UNSERVED_SECONDS = 10.0
"""Limit for that store to be there, so that another machine that has failed can say so."""
PRESENT_SECONDS = 30.0
"""A machine whose beat is older is not waited for at the end. After a cut of the link TCP tries again at
twice the interval, up to as long as the cut was."""
PRESENT_AT_STOP_SECONDS = 15.0
"""The same where a signal ended the command: Slurm kills it 30 s later."""
LARGEST_BYTES = 4 << 20
"""Of a document. The store itself refuses values over 8 MiB
(torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp, MAX_PAYLOAD_LEN)."""
TOKEN = "token"
"""Field of a document that differs between commands."""

ARCHIVE, ARCHIVE_BYTES = "archive", "archive_bytes"
"""In the field `files` of the first machine's document: the name of a file, and its size."""
CHUNK_BYTES = 1 << 20
CHUNKS_AT_ONCE = 8
"""Chunks that are read between two beats."""
LARGEST_ARCHIVE_BYTES = 1 << 30

LAUNCH, CALL = TOPICS = ("launch", "call")
"""What the machines exchange: one launch, or the calls of several (`launch.machines.calls`)."""

JsonObject = dict[str, Any]


Connect = Callable[[], KeyValueStore]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What this machine knows of the others."""

    documents: dict[int, JsonObject] = field(default_factory=dict[int, JsonObject])
    """By machine, those that are new since the last line."""
    silent_seconds: dict[int, float] = field(default_factory=dict[int, float])
    """By machine, since its beat was last seen to change; only of machines that have been seen."""
    clock_seconds: dict[int, float] = field(default_factory=dict[int, float])
    """By machine, how far its clock is ahead of this one's, within the time of an exchange."""
    fault: str | None = None
    """Why the store cannot be reached now."""
    is_refused: bool = False
    """Whether the first machine answers, and serves no store."""
    fault_seconds: float = 0.0
    """For how long."""
    twin: str | None = None
    """The token of another live command with the number of this machine."""
    notice: str | None = None
    fatal: str | None = None
    """Why this machine cannot serve the store; the child ends."""


@dataclass
class _Peer:
    beat: bytes = b""
    changed_at: float | None = None
    version: tuple[str, int] | None = None
    clock_seconds: float = 0.0
    seen: int = -1


def _key(name: str, machine: int, topic: str) -> str:
    return f"{name}/{machine}" if machine == 0 or topic == LAUNCH else f"{topic}/{name}/{machine}"


def keys_of(machines: int) -> list[str]:
    """Return the keys of beats and documents of all machines, under every topic."""
    keys = (
        _key(name, machine, topic)
        for machine in range(machines)
        for name in ("beat", "document")
        for topic in TOPICS
    )
    return list(dict.fromkeys(keys))


class StoreExchange:
    """One machine's part in the exchange. `connect` opens the store, and raises `StoreFault`."""

    def __init__(
        self, machine: int, machines: int, connect: Connect, folder: Path | None = None, topic: str = LAUNCH
    ) -> None:
        """`folder`: of archives; None if there are none."""
        self._machine, self._connect, self._topic = machine, connect, topic
        self._token = ""
        self._archives = Archives(folder) if folder is not None else None
        self._peers = {peer: _Peer() for peer in (range(1, machines) if machine == 0 else [0])}
        self._store: KeyValueStore | None = None
        self._beats = 0
        self._published = -1
        self._wrote_beat = False
        self._seen = ("", -1)
        """On another machine: token and version of the first one's document that it has read."""
        self._faulty_since: float | None = None

    def remember(self, heard: Mapping[str, float]) -> None:
        """Take over the seconds since each machine was heard by the exchange before this one."""
        for machine, seconds in heard.items():
            peer = self._peers.get(int(machine))
            if peer is not None and peer.changed_at is None:
                peer.changed_at = LIVED.now() - seconds

    def tick(self, document: JsonObject, version: int) -> Exchanged:
        """Publish this machine's document and read those of the others."""
        twin: str | None = None
        documents: dict[int, JsonObject] = {}
        try:
            if self._store is None:
                self._store = self._connect()
                self._published, self._wrote_beat = -1, False
            twin = self._publish(self._store, document, version)
            documents = self._read(self._store)
            if self._machine > 0 and self._archives is not None:
                self._archives.fetch(self._store, documents.get(0))
        except (StoreFault, RuntimeError, OSError) as error:  # torch's errors of a store are RuntimeErrors
            self._store = None
            now = LIVED.now()
            self._faulty_since = now if self._faulty_since is None else self._faulty_since
            is_refused = isinstance(error, StoreFault) and error.is_refused
            return self._exchanged(
                {},
                fault=str(error).partition("\n")[0],
                is_refused=is_refused,
                fault_seconds=now - self._faulty_since,
            )
        self._faulty_since = None
        return self._exchanged(documents, twin=twin)

    def _publish(self, store: KeyValueStore, document: JsonObject, version: int) -> str | None:
        """Write the document if it is new, and a beat. Return the token of another command that writes under
        the same number."""
        key, token = _key("beat", self._machine, self._topic), str(document.get(TOKEN))
        self._token = token
        if version != self._published:
            if self._machine == 0 and self._archives is not None:
                self._archives.serve(store, document)
            store.set(_key("document", self._machine, self._topic), json.dumps(document))
            self._published = version
        twin: str | None = None
        if self._wrote_beat and self._machine > 0:
            other = str(_object(store.get(key)).get(TOKEN))
            twin = other if other != token else None
        self._beats += 1
        beat = {"beat": self._beats, TOKEN: token, "version": version, "seen": self._seen}
        store.set(key, json.dumps(beat | {"time": time.time()}))
        self._wrote_beat = True
        return twin

    def _read(self, store: KeyValueStore) -> dict[int, JsonObject]:
        documents: dict[int, JsonObject] = {}
        keys = [_key("beat", number, self._topic) for number in self._peers]
        for (number, peer), raw in zip(self._peers.items(), store.multi_get(keys), strict=True):
            beat = _object(raw)
            if raw == peer.beat or TOKEN not in beat:
                continue
            try:
                version = (str(beat[TOKEN]), int(beat["version"]))
                seen = (str(beat["seen"][0]), int(beat["seen"][1]))
                clock_seconds = float(beat["time"]) - time.time()
            except (
                KeyError,
                IndexError,
                TypeError,
                ValueError,
                OverflowError,
            ):  # not written by this program
                continue
            peer.beat, peer.changed_at, peer.clock_seconds = raw, LIVED.now(), clock_seconds
            if self._machine == 0:  # else it has read an earlier channel of the same port
                peer.seen = seen[1] if seen[0] == self._token else -1
            key = _key("document", number, self._topic)
            if version != peer.version and (document := _object(store.get(key))):
                documents[number], peer.version = document, version
                if self._machine > 0:
                    self._seen = version
        return documents

    def _exchanged(self, documents: dict[int, JsonObject], **facts: Any) -> Exchanged:
        seen = {number: peer for number, peer in self._peers.items() if peer.changed_at is not None}
        now = LIVED.now()
        silent = {number: now - (peer.changed_at or now) for number, peer in seen.items()}
        return Exchanged(
            documents, silent, {number: peer.clock_seconds for number, peer in seen.items()}, **facts
        )

    def is_told(self, version: int, *, awaits_unseen: bool) -> bool:
        """Return whether every other machine that is there has read this version of the document, or, on
        another one than the first, whether it is in the store. A store that was seen and is gone does not
        come back.

        `awaits_unseen`: whether a machine that was never seen counts as there, since it may be about to come.
        """
        if self._machine > 0:
            return self._published == version or self._peers[0].changed_at is not None or not awaits_unseen
        now = LIVED.now()
        present_seconds = PRESENT_SECONDS if awaits_unseen else PRESENT_AT_STOP_SECONDS
        return all(
            peer.seen >= version
            or (not awaits_unseen if peer.changed_at is None else now - peer.changed_at >= present_seconds)
            for peer in self._peers.values()
        )


class Archives:
    """Files that the first machine gives to the others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._name, self._size_bytes, self._done = "", 0, 0

    def serve(self, store: KeyValueStore, document: JsonObject) -> None:
        """Put the archive that a document names into the store, in place of the one before."""
        name, size_bytes = _archive_of(document)
        if name in ("", self._name):
            return
        for number in range(_chunks(self._size_bytes)):
            store.delete_key(f"archive/{self._name}/{number}")
        raw = (self._folder / name).read_bytes()
        for number in range(_chunks(size_bytes)):
            store.set(
                f"archive/{name}/{number}",
                base64.b64encode(raw[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]).decode(),
            )
        self._name, self._size_bytes = name, size_bytes

    def fetch(self, store: KeyValueStore, document: JsonObject | None) -> None:
        """Read some more chunks of the archive that the last document names. `document`: a new one, or
        None."""
        if document is not None:
            name, size_bytes = _archive_of(document)
            if name != self._name:
                self._name, self._size_bytes, self._done = name, size_bytes, 0
        part = self._folder / f"{self._name}.part"
        for _ in range(CHUNKS_AT_ONCE):
            if not self._name or self._done == _chunks(self._size_bytes):
                return
            chunk = _decoded(store.get(f"archive/{self._name}/{self._done}"))
            if len(chunk) != min(CHUNK_BYTES, self._size_bytes - self._done * CHUNK_BYTES):
                raise StoreFault("a part of the files of the run has another size than was announced")
            with DISK.open_private(part, "ab" if self._done else "wb") as file:
                DISK.write(file, chunk)
            self._done += 1
            if self._done == _chunks(self._size_bytes):
                DISK.replace(part, self._folder / self._name)


def _archive_of(document: JsonObject) -> tuple[str, int]:
    """Return name and size of the archive that a document names; "" if it names none."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        name, size_bytes = str(document["files"][ARCHIVE]), int(document["files"][ARCHIVE_BYTES])
        if re.fullmatch("[0-9a-f]{32}", name) and 0 < size_bytes <= LARGEST_ARCHIVE_BYTES:
            return name, size_bytes
    return "", 0


def _decoded(raw: bytes) -> bytes:
    """Return the bytes of a chunk; b"" if it was not written by this program."""
    try:
        return base64.b64decode(raw)
    except ValueError:
        return b""


def _chunks(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


class _Inbox:
    """The last line of stdin, read by a thread."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self._changed = threading.Event()
        self.last: tuple[JsonObject, int] | None = None
        """The document and its version."""
        self.heard: Mapping[str, float] = {}
        self.has_ended = False
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for line in self._lines:
            found = json.loads(line)
            if "heard" in found:
                self.heard = found["heard"]
            else:
                self.last = found["document"], found["version"]
            self._changed.set()
        self.has_ended = True
        self._changed.set()

    def wait(self, seconds: float) -> None:
        self._changed.wait(seconds)
        self._changed.clear()


def exchange(
    machine: int,
    machines: int,
    connect: Connect,
    lines: Iterable[str],
    write: Callable[[str], object],
    folder: Path | None = None,
    topic: str = LAUNCH,
) -> None:
    """Exchange documents until `lines` ends. The first machine then waits until the others have read its last
    one, and they for its store.

    Neither waits for one that it has never seen if a signal ended the command: a user or a scheduler wants it
    to end.
    """
    inbox, own = _Inbox(lines), StoreExchange(machine, machines, connect, folder, topic)
    deadline: float | None = None
    while True:
        ended = inbox.has_ended  # before reading the document: the last one is published
        if inbox.last is not None:
            document, version = inbox.last
            own.remember(inbox.heard)
            done = own.tick(document, version)
            write(json.dumps(asdict(done)))
            if ended and own.is_told(version, awaits_unseen=not _is_stopped(document)):
                return
        elif ended:
            return
        if ended:
            deadline = deadline or LIVED.now() + (SERVED_SECONDS if machine == 0 else UNSERVED_SECONDS)
            if LIVED.now() > deadline:
                return
            time.sleep(PERIOD_SECONDS / 5)
        else:
            inbox.wait(PERIOD_SECONDS)


def _is_stopped(document: JsonObject) -> bool:
    """Return whether a command's last document is that of one ended by a signal, or before it had anything to
    say."""
    with contextlib.suppress(KeyError, TypeError):
        return document["ended"]["problem"] is None and document["ended"]["exit_reason"] != "finished"
    return True


def _object(raw: bytes) -> JsonObject:
    """Return the JSON object in a value of the store; {} for anything else, which this program has not
    written."""
    try:
        value: Any = json.loads(raw) if len(raw) <= LARGEST_BYTES else None
    except (ValueError, RecursionError):
        return {}
    return cast(JsonObject, value) if isinstance(value, dict) else {}


def main(arguments: Sequence[str]) -> int:
    machine, machines, address, port = int(arguments[0]), int(arguments[1]), arguments[2], int(arguments[3])
    topic, folder = arguments[4], Path(arguments[5]) if len(arguments) > 5 else None
    os.environ["TORCH_CPP_LOG_LEVEL"] = (
        "FATAL"  # a lost connection is reported as a fault, without torch's stack traces
    )

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if machine > 0:
        exchange(machine, machines, lambda: connect_to(address, port), sys.stdin, write, folder, topic)
        os._exit(0)  # the command waits, and torch takes seconds to be torn down
    try:
        listener, notice = listening_socket(address, port)
    except OSError as error:
        fatal = f"port {port} of {address} cannot be used: {error.strerror or error}"
        write(json.dumps(asdict(Exchanged(fatal=fatal))))
        return 1
    if notice is not None:
        write(json.dumps(asdict(Exchanged(notice=notice))))
    own = [serve(listener, keys_of(machines))]

    def reconnect() -> KeyValueStore:
        """Return the store that this process serves. After a fault of it only another child helps."""
        if not own:
            os._exit(1)  # not by an exception: a thread still reads stdin
        return own.pop()

    exchange(machine, machines, reconnect, sys.stdin, write, folder, topic)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
