"""Positional reads of checkpoint files: exact, bounded, through descriptors that all threads share."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from pathlib import Path
from typing import Self

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.run.manifest import is_inside

READ_AHEAD_FROM_BYTES = 256 << 10
_SAMPLES = 32


class SourceFiles:
    """Read positional ranges of the files of a checkpoint. Threads share descriptors, since `pread` needs no position.

    At most `limit` files stay open in addition to those being read: a checkpoint of a thousand ranks has more files than a process
    may open. `is_vouched`: a manifest has digests of the files, so checksums inside them are not compared.
    """

    def __init__(self, root: Path, *, is_vouched: bool = False, limit: int = 256) -> None:
        self.root, self.is_vouched = root, is_vouched
        self.checked: set[tuple[str, int]] = set()
        """(file, first byte) of the storages whose checksum was compared in a pass of its own."""
        self._open = functools.lru_cache(maxsize=limit)(self._open_file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.cache_clear()

    def size_bytes(self, name: str) -> int:
        return os.fstat(self._open(name).number).st_size

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return `count` bytes at `offset`. Raises: FailedError naming a file that ends before them."""
        data = bytearray(count)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        file, done = self._open(name), 0
        while done < len(buffer):
            try:
                got = os.preadv(file.number, [buffer[done:]], offset + done)
            except OSError as error:
                raise unreadable(self.root / name, error.strerror or str(error)) from error
            if got == 0:
                raise unreadable(self.root / name, f"it ends at byte {offset + done}, where {len(buffer) - done} more bytes are due")
            done += got
        if len(buffer) >= READ_AHEAD_FROM_BYTES:
            advise(file.number, offset + done, done, "WILLNEED")

    def drop_cached(self, name: str, offset: int, count: int) -> None:
        """Drop pages from the page cache that were read for this merge alone."""
        file = self._open(name)
        if file.was_cold:
            advise(file.number, offset, count, "DONTNEED")

    def _open_file(self, name: str) -> _File:
        if not is_inside(name):
            raise failed_error(
                "merge-path-traversal",
                f"the checkpoint names the file `{name}`, which leads out of its directory",
                where=Where(str(self.root)),
            )
        path = self.root / name
        try:
            if path.is_symlink() and not path.resolve().is_relative_to(_owned_by(self.root.resolve())):
                raise failed_error("merge-path-traversal", f"`{name}` is a link that leads out of the checkpoint", where=Where(str(path)))
            return _File(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError as error:
            raise failed_error(
                "merge-shard-missing",
                f"the checkpoint needs `{name}`, which is not there",
                where=Where(str(path)),
                hint="copy the file from where the checkpoint was written, or merge another checkpoint with `--step N`",
            ) from error
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error


class _File:
    """An open descriptor, closed when no thread uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.was_cold = is_cold(number)

    def __del__(self) -> None:
        os.close(self.number)


def is_cold(descriptor: int) -> bool:
    """Return whether most of a file is not in the page cache; False if the system cannot report it.

    Reads at random positions, since the kernel fetches a page that was missing and a second call must not find it.
    """
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    size, cached = os.fstat(descriptor).st_size, 0
    for position in (random.randrange(max(size, 1)) for _ in range(_SAMPLES)):
        try:
            cached += os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
        except BlockingIOError:
            continue
        except OSError:  # a file system without RWF_NOWAIT
            return False
    return size > 0 and cached < _SAMPLES // 2


def advise(descriptor: int, offset: int, count: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, count, getattr(os, f"POSIX_FADV_{advice}"))


def _owned_by(root: Path) -> Path:
    """Return the directory that links may point into: a snapshot in the hub's cache links to the blobs of its repository."""
    repository = root.parent.parent
    return repository if root.parent.name == "snapshots" and (repository / "blobs").is_dir() else root


def unreadable(path: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-file",
        f"cannot be read: {why}",
        where=Where(str(path)),
        hint="copy the file again from where it was written, or merge another checkpoint with `--step N`",
    )
