"""Exclusive ownership of a directory or a stage, recorded in a lock file.

The lock file holds the record of its owner: host, process and the id of the claim. The owner refreshes the
modification time of the file every few seconds. Mutual exclusion is by flock, which the kernel releases when
the owner dies. On a file system without flock it is by creating the file with O_EXCL.

Readers only read the record and take no lock, so a query never makes a claim fail. If the owner's processes
are visible to this process, pid and start time decide whether it lives. Any other owner counts as dead only
after `FOREIGN_SILENCE_SECONDS` without a refresh, since flock on a network file system may be local to each
client.

Also tells which processes are ranks of a run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from fsdp_tune.core.files import read_regular

LOCKLESS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
"""Errors of flock on a file system without locks."""
FOREIGN_SILENCE_SECONDS = 300.0
"""Refreshes are every 10 s, and the slowest network file systems show one within half a minute."""
REFRESH_SECONDS = 10.0
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW  # the directory may be writable by others
_CLAIM_SECONDS = 10.0
"""A file without a record that is younger than this may belong to a process that is still to write one."""
_CLAIM_ATTEMPTS = 20
_RETRY_SECONDS = 0.05
_LATEST_SECONDS = 1e11
"""A time after this is damage; the functions of the time of day raise for some of them."""


@dataclass(frozen=True, slots=True)
class Owner:
    host: str
    pid: int
    since: float
    """Wall clock, seconds."""
    claim: str
    """Random id of this claim, unique even within one process."""
    kernel: str
    """Boot id of the machine."""
    namespace: str
    """Pid namespace; that of a container differs from that of its host."""
    started: str
    """Start time of the process, to distinguish it from a later one with the same pid."""

    @property
    def is_visible(self) -> bool:
        """Whether its process would be visible to this process."""
        return (self.host, self.kernel, self.namespace) == (socket.gethostname(), _kernel(), _namespace())

    def is_same_process(self, other: Owner) -> bool:
        """Return whether both are claims of one process."""
        return replace(self, claim="", since=0.0) == replace(other, claim="", since=0.0)

    def __str__(self) -> str:
        return (
            f"pid {self.pid} on {self.host} since "
            f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.since))}"
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """A successful claim."""

    owner: Owner
    previous: Owner | None
    """A dead owner whose record was replaced."""
    has_flock: bool
    """False: the file system has no flock, so exclusion depends on the existence of the file."""


class HeldError(Exception):
    """Another owner holds the file."""

    def __init__(self, owner: Owner | None, *, is_certain: bool) -> None:
        super().__init__(f"held by {owner or 'another process'}")
        self.owner = owner
        """None if it has not written its record yet."""
        self.is_certain = is_certain
        """Whether the owner certainly lives; otherwise only the age of its last refresh is known."""


def this_owner() -> Owner:
    """Return the record of a new claim of this process."""
    started = _start_of(os.getpid()) or ""
    return Owner(
        socket.gethostname(), os.getpid(), time.time(), secrets.token_hex(8), _kernel(), _namespace(), started
    )


def is_running(owner: Owner) -> bool | None:
    """Return whether the process of an owner runs, or None if it would not be visible to this process."""
    return _start_of(owner.pid) == owner.started if owner.is_visible else None


def read_owner(path: Path) -> Owner | None:
    """Return the record in a lock file, of a live owner or a dead one; None if the file has no readable
    record."""
    try:
        return parse_owner(read_regular(path))
    except OSError:
        return None


def parse_owner(raw: bytes) -> Owner | None:
    """Return the record of an owner, or None if it is damaged."""
    try:
        record: Any = json.loads(raw)
        texts = {name: str(record[name]) for name in ("host", "claim", "kernel", "namespace", "started")}
        pid, since = int(record["pid"]), float(record["since"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return Owner(pid=pid, since=since, **texts) if 0 <= since < _LATEST_SECONDS else None


def live_owner(path: Path) -> Owner | None:
    """Return the owner that holds a lock file, or None. Takes no lock and writes nothing."""
    owner = read_owner(path)
    return owner if owner is not None and _is_live(owner, path, time.time()) else None


def is_abandoned(path: Path) -> bool:
    """Return whether no process holds a lock file or may still write its record, by the clock of the file
    system."""
    now, owner = _file_system_time(path.parent), read_owner(path)
    return _age(path, now) >= _CLAIM_SECONDS if owner is None else not _is_live(owner, path, now)


@contextmanager
def announced(path: Path) -> Iterator[None]:
    """Hold a lock file that no other process claims, to show that this process lives. It is removed at the
    end."""
    descriptor = os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with _recorded(descriptor, path):
            yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


TEMPORARY_PREFIX = "fsdp-tune-"
_RECORD = "owner.json"


@contextmanager
def temporary_directory(kind: str = "", keep: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Make a private directory TMPDIR/fsdp-tune-KIND…, and remove it at the end unless `keep` returns True.

    A process that is killed with SIGKILL removes nothing, so that the directories of dead owners are removed
    first.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    path, is_kept = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{kind}")), False
    try:
        with announced(path / _RECORD):
            yield path
            is_kept = keep()
    except BaseException:
        is_kept = keep()
        raise
    finally:
        if not is_kept:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's temporary directories whose record names a dead process; any other may be a user's
    own."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{TEMPORARY_PREFIX}*"):
            with contextlib.suppress(OSError):
                is_ours = path.lstat().st_uid == os.geteuid() and not path.is_symlink()
                if is_ours and read_owner(path / _RECORD) is not None and is_abandoned(path / _RECORD):
                    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def owned(path: Path) -> Iterator[Claim]:
    """Hold the lock file `path` and refresh its record. Raises: HeldError if another owner holds it.

    At the end the file is removed if ownership depends on its existence; otherwise it is emptied and stays,
    since removing it would let two processes lock two files of one name.
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
    """Write the record of a new claim and refresh it."""
    owner = this_owner()
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


class _Claimed(NamedTuple):
    """A lock file that this process has claimed."""

    descriptor: int
    previous: Owner | None
    """The dead owner that was replaced."""
    has_flock: bool
    """Whether flock works on this file system."""


def _claim(path: Path) -> _Claimed:
    """Open and claim the lock file. Raises: HeldError if another owner holds it."""
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
                return _Claimed(descriptor, previous, has_flock=False)
            os.close(descriptor)
            previous = _clear_dead(path) or previous
            continue
        owner = read_owner(path)
        if owner is not None and owner.kernel != _kernel() and not is_abandoned(path):
            os.close(descriptor)
            raise HeldError(owner, is_certain=False)
        return _Claimed(descriptor, owner, has_flock=True)
    raise HeldError(read_owner(path), is_certain=False)


def _open(path: Path) -> tuple[int, bool]:
    """Open the lock file; the second value is whether this call created it."""
    while True:
        with contextlib.suppress(FileExistsError):
            return os.open(path, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644), True
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, _FLAGS), False


def _clear_dead(path: Path) -> Owner | None:
    """Remove the lock file of a dead owner, without flock, and return that owner. Raises: HeldError if it may
    live.

    A second file, created with O_EXCL, guards the removal: if two processes find the same dead owner, the
    slower one must not remove the file that the faster one has created in the meantime.
    """
    guard = path.with_name(f".{path.name}.taking")
    try:
        os.close(os.open(guard, _FLAGS | os.O_CREAT | os.O_EXCL, 0o644))
    except FileExistsError:
        # left by a process that was killed here
        if _age(guard, _file_system_time(path.parent)) >= FOREIGN_SILENCE_SECONDS:
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
    """Return whether `path` is still the open file of `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_live(owner: Owner, path: Path, now: float) -> bool:
    runs = is_running(owner)
    if runs is None:
        return _age(path, now) < FOREIGN_SILENCE_SECONDS
    return runs and _may_hold(owner.pid, path)


def _may_hold(pid: int, path: Path) -> bool:
    """Return False if a process certainly has another file open than `path`: a copy of its directory, whose
    record it has not written."""
    try:
        own = path.stat()
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # of another user, or no such file on this system
        return True
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), own):
                return True
    return False


def _file_system_time(directory: Path) -> float:
    """Return the current time by the clock that sets modification times in a directory, which may be that of
    a file server."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # nothing can be written there
        return time.time()


def _age(path: Path, now: float) -> float:
    """Return the seconds since the last refresh; infinity for a missing file."""
    try:
        return abs(now - path.stat().st_mtime)
    except FileNotFoundError:
        return float("inf")


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
    """Return the start time of a process in units of the kernel; None if there is none, or only a zombie."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if after_name[0] in "ZX" else after_name[19]
    except OSError:
        pass
    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs and is not a zombie. psutil compares start times, so a reused pid does
    not count.

    One that cannot be looked at, such as with no descriptor left for it, counts as alive.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except (psutil.Error, OSError, MemoryError):
        return True


def is_rank_of(run: Path, rank: int, pid: int) -> bool:
    """Return whether a pid still belongs to a rank of the run: pids are reused, but not with the same RANK
    and run directory."""
    try:
        process = psutil.Process(pid)
        named = Path(process.cwd(), *process.cmdline()[-1:])
        return (
            is_alive(process)
            and process.environ().get("RANK") == str(rank)
            and named.resolve() == run.resolve()
        )
    except psutil.Error:
        return False
