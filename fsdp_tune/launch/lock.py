"""One command at a time in a run directory.

The lock is an advisory lock (flock) on RUN/run.lock: the kernel gives it back when its owner dies, so a pid that was
reused is never taken for the owner. The file says who holds it, for people, and for machines that share the directory
over a network but not the kernel's locks.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_tune.errors import FsdpTuneError, Notice, usage_error
from fsdp_tune.run_dir import RunDir

# A rank writes a sign of life every second, and the slowest network file systems show it within half a minute.
FOREIGN_SILENCE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Owner:
    host: str
    pid: int
    since: float
    """Wall clock, seconds."""

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


def read_owner(run: RunDir) -> Owner | None:
    """Who wrote the lock last and has not ended in order; None where nobody did."""
    try:
        raw: Any = json.loads(run.lock.read_bytes())
        return Owner(str(raw["host"]), int(raw["pid"]), float(raw["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_held(run: RunDir) -> bool:
    """Whether a live process of this machine (or of any that shares its locks) holds the directory."""
    try:
        with open(run.lock, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def has_owner(run: RunDir) -> bool:
    """Whether a command holds the directory, on this machine or, by the word of the file alone, on another."""
    owner = read_owner(run)
    return owner is not None and (not owner.is_here or is_held(run))


def refuse_when_held(run: RunDir) -> None:
    """Exit 2 where another command holds the directory. Takes nothing: it may be held a moment later."""
    if is_held(run):
        raise in_use(run, read_owner(run) or "another command")


def in_use(run: RunDir, by: Owner | str, *ways_out: str) -> FsdpTuneError:
    ways = (f"fsdp-tune status {run.path}", "--set output_dir=… for another directory", *ways_out)
    return usage_error("run-in-use", f"{run.path} is in use by {by}", ways_out=ways)


@contextmanager
def locked(run: RunDir) -> Iterator[list[Notice]]:
    """Holds RUN/run.lock; exit 2 where another command does. Gives a notice where a dead owner's lock was taken over."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # the directory may be writable by others
    descriptor = os.open(run.lock, flags, 0o644)
    with open(descriptor, "r+b") as file:
        previous = read_owner(run)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(run, previous or "another command") from None
        if previous is not None and not previous.is_here and _seconds_since_life(run.logs) < FOREIGN_SILENCE_SECONDS:
            raise in_use(run, previous, f"remove {run.lock} if that process is surely dead")
        try:
            _rewrite(file.fileno(), json.dumps(asdict(Owner(socket.gethostname(), os.getpid(), time.time()))).encode())
        except OSError as error:  # a full disk; a write knows only a number
            error.filename = str(run.lock)
            raise
        try:
            yield [] if previous is None else [Notice("stale-lock", f"the lock of {previous}, which has ended, was taken over")]
        finally:
            _rewrite(file.fileno(), b"")  # the file stays: removing it would let two commands lock two files of one name


def _rewrite(descriptor: int, content: bytes) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def _seconds_since_life(logs: Path) -> float:
    newest = max((path.stat().st_mtime for path in logs.glob("rank-*.heartbeat.json")), default=0.0)
    return abs(time.time() - newest)
