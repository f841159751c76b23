"""Disks that fail, kill the process or tear a write at the n-th operation, and a disk that records its
operations."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast
from unittest.mock import patch

from fsdp_tune.core import atomic
from fsdp_tune.core.atomic import Disk
from tests.ranks import KILLED

OPERATIONS = (
    "open",
    "open_direct",
    "write",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmtree",
    "fsync_dir",
)
How = Literal["before", "after", "torn", "error"]
TEARABLE = ("write", "rmtree")
"""Operations that can be cut in the middle; the others are done or not."""


@dataclass(frozen=True)
class Fault:
    """What happens at operation `number`, counted from 1, and with `sticky` at every one after it."""

    number: int
    how: How
    error: int = errno.ENOSPC
    sticky: bool = False
    inside: str = ""
    """Only operations on paths that hold this text are counted."""
    signal: int | None = None
    """Sent instead of a kill, so that the process may go on."""

    def __str__(self) -> str:
        what = (
            f"{errno.errorcode[self.error]}{' for ever' if self.sticky else ''}"
            if self.how == "error"
            else self.how
        )
        return f"{what} at operation {self.number}"


@dataclass(frozen=True)
class Operation:
    """One line of the log. `data` of a write; `target` of a rename or replacement."""

    name: str
    path: Path
    target: Path | None = None
    data: bytes = b""


def kill_points(log: Sequence[tuple[str, str]], every_write: int = 1, every: int = 1) -> list[Fault]:
    """Before and after each operation, and in the middle of those that have one. Of the many small writes of
    a file, the first, the last and one in `every_write`; of all that, one in `every`."""
    found: list[Fault] = []
    for index, (name, path) in enumerate(log):
        around = {log[other] for other in (index - 1, index + 1) if 0 <= other < len(log)}
        if name == "write" and around == {(name, path)} and index % every_write:
            continue
        found += [Fault(index + 1, "before"), Fault(index + 1, "after")]
        if name in TEARABLE:
            found.append(Fault(index + 1, "torn"))
    return found[::every]


def path_of(argument: Any) -> Path:
    return argument if isinstance(argument, Path) else Path(argument.name)


def die() -> None:
    os._exit(KILLED)


class _Tearing:
    """Counts operations of the one disk, and acts at the chosen one."""

    def __init__(self, fault: Fault | None, log: list[Operation], kill: Callable[[], None]) -> None:
        self.fault, self.log, self.kill = fault, log, kill
        self.count = 0

    def call(
        self, original: Callable[..., Any], name: str, disk: Disk, *arguments: Any, **options: Any
    ) -> Any:
        path = path_of(arguments[0])
        fault = self.fault
        if fault is not None and fault.inside not in str(path):
            return original(disk, *arguments, **options)
        self.count += 1
        target = arguments[1] if name in ("rename", "replace") else None
        data = bytes(arguments[1]) if name == "write" else b""
        mine = fault is not None and (
            self.count == fault.number or (fault.sticky and self.count > fault.number)
        )
        if mine and fault is not None:
            self._before(fault, name, original, disk, arguments)
        result = original(disk, *arguments, **options)
        self.log.append(Operation(name, path, target, data))
        if mine and fault is not None and fault.how == "after":
            self._flush(arguments)
            self.kill()
        return result

    def _before(
        self, fault: Fault, name: str, original: Callable[..., Any], disk: Disk, arguments: tuple[Any, ...]
    ) -> None:
        if fault.how == "before":
            self.kill()
        elif fault.how == "torn":
            self._half(name, original, disk, arguments)
            self.kill()
        elif fault.how == "error":
            raise OSError(fault.error, os.strerror(fault.error), str(path_of(arguments[0])))

    @staticmethod
    def _half(name: str, original: Callable[..., Any], disk: Disk, arguments: tuple[Any, ...]) -> None:
        if name == "write":
            raw = memoryview(arguments[1]).cast("B")
            original(disk, arguments[0], raw[: len(raw) // 2])
            arguments[0].flush()
        elif name == "rmtree":
            files = sorted(path for path in arguments[0].rglob("*") if path.is_file())
            for path in files[: len(files) // 2]:
                path.unlink()

    @staticmethod
    def _flush(arguments: tuple[Any, ...]) -> None:
        """The operation was done: its bytes are with the kernel, as they are after a large write."""
        if not isinstance(arguments[0], Path) and not arguments[0].closed:
            arguments[0].flush()


@contextmanager
def injected(fault: Fault | None, kill: Callable[[], None] = die) -> Iterator[list[Operation]]:
    """Every operation of `atomic.DISK` passes by here; gives the log of those that were done."""
    log: list[Operation] = []
    tearing = _Tearing(fault, log, kill)
    originals = {name: getattr(Disk, name) for name in OPERATIONS}

    def wrapper(name: str) -> Callable[..., Any]:
        return lambda disk, *arguments, **options: tearing.call(
            originals[name], name, disk, *arguments, **options
        )

    with patch.multiple(type(atomic.DISK), **{name: wrapper(name) for name in OPERATIONS}):
        yield log


class _Listing:
    """What `os.scandir` gives, without some entries."""

    def __init__(self, entries: Iterator[os.DirEntry[str]]) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return self._entries

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        pass


@contextmanager
def shown_late(folder: Path, seconds: float, *, by_name: bool = False) -> Iterator[None]:
    """For so long from the first question on, listings show nothing that is in `folder`, nor `folder` itself;
    with `by_name`, neither is anything there under its name. As a client of a network file system may see
    what another machine has made."""
    first: list[float] = []

    def hidden(path: Any) -> bool:
        if not isinstance(path, str | os.PathLike) or not Path(path).is_relative_to(folder):
            return False
        if not first:
            first.append(time.monotonic())
        return time.monotonic() - first[0] < seconds

    real = {name: getattr(os, name) for name in ("listdir", "scandir", "stat", "lstat")}

    def listdir(path: Any = ".") -> list[Any]:
        return [name for name in real["listdir"](path) if not hidden(os.path.join(path, name))]  # noqa: PTH118  as it is asked

    def scandir(path: Any = ".") -> _Listing:
        with real["scandir"](path) as entries:
            return _Listing(iter([entry for entry in entries if not hidden(entry.path)]))

    def refusing(name: str) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if hidden(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            return real[name](path, *arguments, **options)

        return call

    late: dict[str, Any] = {"listdir": listdir, "scandir": scandir}
    with patch.multiple(
        os, **late, **({name: refusing(name) for name in ("stat", "lstat")} if by_name else {})
    ):
        yield


class _Shortening(io.FileIO):
    """A file of which the kernel takes half of what it is given, and is interrupted every other time."""

    turn = 0

    def write(self, data: Any) -> int:
        self.turn += 1
        if self.turn % 2:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        view = memoryview(data).cast("B")
        return super().write(view[: max(1, len(view) // 2)])


@contextmanager
def short_writes() -> Iterator[None]:
    """Each write below Python's buffer is interrupted, then short."""

    def shortened(self: Disk, path: Path, mode: str = "wb") -> IO[bytes]:
        return cast(IO[bytes], io.BufferedWriter(_Shortening(path, mode.replace("b", ""))))

    with patch.object(Disk, "open", shortened):
        yield
