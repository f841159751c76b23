"""Exclusive ownership of a directory or a stage, recorded in a lock file.

The lock file holds the record of its owner: host, process and the id of the claim. The owner refreshes the modification
time of the file every few seconds. Mutual exclusion is by flock, which the kernel releases when the owner dies. On a file
system without flock it is by creating the file with O_EXCL.

Readers judge the record and take no lock, so a query never makes a claim fail. An owner whose processes are visible from
here is judged by pid and start time. Any other owner is dead only after `FOREIGN_SILENCE_SECONDS` without a refresh, since
flock on a network file system may be local to each client.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""What flock fails with on a file system that has no locks."""
FOREIGN_SILENCE_SECONDS = 300.0
"""A refresh every 10 s, and the slowest network file systems show one within half a minute."""
REFRESH_SECONDS = 10.0
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW  # the directory may be writable by others
_CLAIM_SECONDS = 10.0
"""A file without a record that is younger than this may belong to a process that is about to write one."""
_CLAIM_ATTEMPTS = 20
_RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Owner:
    host: str
    pid: int
    since: float
    """Wall clock, seconds."""
    claim: str
    """Random id of this claim: no two claims share one, also in one process."""
    kernel: str
    """Boot id of the machine."""
    namespace: str
    """Namespace of the pid; that of a container differs from that of its host."""
    started: str
    """When the process started, to tell it from a later one with the same pid."""

    @property
    def is_visible(self) -> bool:
        """Whether its process would be seen from here."""
        return (self.host, self.kernel, self.namespace) == (socket.gethostname(), _kernel(), _namespace())

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A successful claim."""

    owner: Owner
    previous: Owner | None
    """A dead owner whose record was replaced."""
    has_flock: bool
    """False: the file system has no flock, so exclusion rests on the file itself."""


class HeldError(Exception):
    """Another owner holds the file."""

    def __init__(self, owner: Owner | None, *, is_certain: bool) -> None:
        super().__init__(f"held by {owner or 'another process'}")
        self.owner = owner
        """None: it has not written its record yet."""
        self.is_certain = is_certain
        """Whether the owner is known to live; otherwise only the age of its last refresh is known."""


def read_owner(path: Path) -> Owner | None:
    """Return the record in a lock file, of a live owner or a dead one; None if the file has no readable record."""
    try:
        return _parse(path.read_bytes())
    except OSError:
        return None


def live_owner(path: Path) -> Owner | None:
    """Return the owner that holds a lock file, or None. Takes no lock and writes nothing."""
    owner = read_owner(path)
    return owner if owner is not None and _is_live(owner, path, time.time()) else None


def is_abandoned(path: Path) -> bool:
    """Return whether no process holds a lock file, nor is about to write its record. By the clock of the file system."""
    now, owner = _file_system_time(path.parent), read_owner(path)
    return _age(path, now) >= _CLAIM_SECONDS if owner is None else not _is_live(owner, path, now)


@contextmanager
def announced(path: Path) -> Iterator[None]:
    """Hold a lock file that no other process claims, so that others see that this one lives. It is removed at the end."""
    descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with _recorded(descriptor, path):
            yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def owned(path: Path) -> Iterator[Claim]:
    """Hold the lock file `path` and keep its record fresh. Raises HeldError where another owner does.

    The file is removed at the end where ownership rests on its existence; otherwise it is emptied and stays, since
    removing it would let two processes lock two files of one name.
    """
    descriptor, previous, has_flock = _claim(path)
    try:
        with _recorded(descriptor, path) as owner:
            yield Claim(owner, previous, has_flock)
    finally:
        if not has_flock and _is_at(descriptor, path):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


@contextmanager
def _recorded(descriptor: int, path: Path) -> Iterator[Owner]:
    """Write the record of a new claim and keep it fresh."""
    started = _start_of(os.getpid()) or ""
    owner = Owner(socket.gethostname(), os.getpid(), time.time(), secrets.token_hex(8), _kernel(), _namespace(), started)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(owner)).encode(), 0)
    except OSError as error:  # a full disk; the error of a write has no file name
        error.filename = str(path)
        raise
    ended = threading.Event()
    refresher = threading.Thread(target=_refresh, args=(descriptor, ended), daemon=True)
    refresher.start()
    try:
        yield owner
    finally:
        ended.set()
        refresher.join()


def _claim(path: Path) -> tuple[int, Owner | None, bool]:
    """Return an open descriptor of the file that is now ours, the dead owner whose place was taken, and whether flock works."""
    previous: Owner | None = None
    for _ in range(_CLAIM_ATTEMPTS):
        descriptor, is_new = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise HeldError(read_owner(path), is_certain=True) from None
        except OSError as error:
            if error.errno not in LOCKLESS:
                os.close(descriptor)
                raise
            if is_new:
                return descriptor, previous, False
            os.close(descriptor)
            previous = _clear_dead(path) or previous
            continue
        owner = read_owner(path)
        if owner is not None and owner.kernel != _kernel() and not is_abandoned(path):
            os.close(descriptor)
            raise HeldError(owner, is_certain=False)
        return descriptor, owner, True
    raise HeldError(read_owner(path), is_certain=False)


def _open(path: Path) -> tuple[int, bool]:
    """Open the lock file; the second value is whether this call created it."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644), True
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, _FLAGS), False


def _clear_dead(path: Path) -> Owner | None:
    """Remove the lock file of a dead owner, without flock; returns that owner. Raises HeldError where it may live.

    A second file made with O_EXCL guards the removal: of two processes that find the same dead owner, the slower one must
    not remove the file that the faster one has created meanwhile.
    """
    guard = path.with_name(f".{path.name}.taking")
    try:
        os.close(os.open(guard, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        if _age(guard, _file_system_time(path.parent)) >= FOREIGN_SILENCE_SECONDS:  # left by a process that was killed here
            guard.unlink(missing_ok=True)
        time.sleep(_RETRY_SECONDS)
        return None
    try:
        owner = read_owner(path)
        if not is_abandoned(path):
            raise HeldError(owner, is_certain=owner is not None and owner.is_visible)
        path.unlink(missing_ok=True)
        return owner
    finally:
        guard.unlink(missing_ok=True)


def _refresh(descriptor: int, ended: threading.Event) -> None:
    while not ended.wait(REFRESH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether `path` is still the file that `descriptor` has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_live(owner: Owner, path: Path, now: float) -> bool:
    if owner.is_visible:
        return _start_of(owner.pid) == owner.started
    return _age(path, now) < FOREIGN_SILENCE_SECONDS


def _file_system_time(directory: Path) -> float:
    """Return the clock that sets modification times in a directory: that of a file server may differ from this machine's."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # nothing can be written there
        return time.time()


def _age(path: Path, now: float) -> float:
    """Seconds since the last refresh; infinite for a file that is gone."""
    try:
        return abs(now - path.stat().st_mtime)
    except FileNotFoundError:
        return float("inf")


def _parse(raw: bytes) -> Owner | None:
    try:
        record: Any = json.loads(raw)
        texts = {name: str(record[name]) for name in ("host", "claim", "kernel", "namespace", "started")}
        return Owner(pid=int(record["pid"]), since=float(record["since"]), **texts)
    except (ValueError, KeyError, TypeError):
        return None


@cache
def _kernel() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start_of(pid: int) -> str | None:
    """Return when a process started, in the kernel's own units; None if there is none, or only a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else after_name[19]
    except OSError:
        pass
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
