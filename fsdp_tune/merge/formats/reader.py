"""Reads ranges of files: exact, bounded, and through descriptors that are shared by all threads."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.merge.formats.page_cache import PageCache
from fsdp_tune.run.manifest import is_inside

AHEAD_BYTES = 256 << 10


class SourceFiles:
    """Opens each file of a checkpoint once. `pread` needs no position, so threads share descriptors.

    At most `limit` files stay open: a checkpoint of a thousand ranks has more files than a process may open.
    `is_vouched`: a manifest has digests of the files, so that the checksums in them add nothing. `pages`: where another
    reads the same files.
    """

    def __init__(self, root: Path, *, is_vouched: bool = False, limit: int = 256, pages: PageCache | None = None) -> None:
        self.root, self.is_vouched = root, is_vouched
        self._pages = pages or PageCache()
        self._limit = limit
        self._lock = threading.Lock()
        self._open: dict[str, int] = {}
        self._users: dict[str, int] = {}
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            for name, descriptor in self._open.items():
                self._pages.closing(self.root / name, descriptor)
                os.close(descriptor)
            self._open.clear()

    def size_bytes(self, name: str) -> int:
        if name not in self._sizes:
            with self._lease(name) as descriptor:
                self._sizes[name] = os.fstat(descriptor).st_size
        return self._sizes[name]

    def read(self, name: str, offset: int, count: int) -> bytes:
        """`count` bytes at `offset`; a file that ends before is an error that names it."""
        data = bytearray(count)
        self.read_into(name, offset, memoryview(data))
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._lease(name) as descriptor:
            done = 0
            while done < len(buffer):
                try:
                    got = os.preadv(descriptor, [buffer[done:]], offset + done)
                except OSError as error:
                    raise unreadable(self.root / name, error.strerror or str(error)) from error
                if got == 0:
                    raise unreadable(self.root / name, f"it ends at byte {offset + done}, where {len(buffer) - done} more bytes are due")
                done += got
            self._pages.copied(self.root / name, descriptor, offset, done)

    def will_need(self, name: str, offset: int, count: int) -> None:
        """Asks the kernel to read ahead. A file that is not there is for the one who reads it to report."""
        with contextlib.suppress(FsdpTuneError), self._lease(name) as descriptor:
            will_need(descriptor, offset, count)

    @contextlib.contextmanager
    def _lease(self, name: str):
        with self._lock:
            if name not in self._open:
                self._make_room()
                self._open[name] = self._open_file(name)
            self._users[name] = self._users.get(name, 0) + 1
            descriptor = self._open[name]
        try:
            yield descriptor
        finally:
            with self._lock:
                self._users[name] -= 1

    def _make_room(self) -> None:
        if len(self._open) >= self._limit:
            for name in [name for name in self._open if not self._users.get(name)][: self._limit // 2]:
                descriptor = self._open.pop(name)
                self._pages.closing(self.root / name, descriptor)
                os.close(descriptor)

    def _open_file(self, name: str) -> int:
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
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._pages.opened(path, descriptor, is_read_twice=self.is_vouched)
            return descriptor
        except FileNotFoundError as error:
            raise failed_error(
                "merge-shard-missing",
                f"the checkpoint needs `{name}`, which is not there",
                where=Where(str(path)),
                hint="copy the file from where the checkpoint was written, or merge another checkpoint with `--step N`",
            ) from error
        except OSError as error:
            raise unreadable(path, error.strerror or str(error)) from error


def will_need(descriptor: int, offset: int, count: int) -> None:
    """Asks the kernel to read ahead, piece by piece: of one request it reads max(read_ahead_kb, max_sectors_kb) and forgets the rest."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            for at in range(offset, offset + count, AHEAD_BYTES):
                os.posix_fadvise(descriptor, at, min(AHEAD_BYTES, offset + count - at), os.POSIX_FADV_WILLNEED)


def _owned_by(root: Path) -> Path:
    """Where links may lead: a snapshot in the hub's cache links to the blobs of its repository (REPOSITORY/snapshots/REVISION)."""
    repository = root.parent.parent
    return repository if root.parent.name == "snapshots" and (repository / "blobs").is_dir() else root


def unreadable(path: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-file",
        f"cannot be read: {why}",
        where=Where(str(path)),
        hint="copy the file anew from where it was written, or merge another checkpoint with `--step N`",
    )
