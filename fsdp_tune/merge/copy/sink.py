"""Puts a tensor's bytes into their place in the output, past the page cache where the file system can.

What is written through the cache needs a fresh page for every 4 KiB, and on a virtual machine whose host takes free memory
back such a page costs more than the disk: 4.2 GB with one thread take 4 to 12 CPU-seconds of the kernel, and 1 past it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import xxhash

from fsdp_tune.core.atomic import DISK
from fsdp_tune.merge.copy.layout import PAGE_BYTES
from fsdp_tune.merge.copy.values import Array

BLOCK_BYTES = 4 << 20
SAMPLE_BYTES = 64 << 10
_WORD_BYTES = 16  # the widest element


@dataclass(frozen=True, slots=True)
class Piece:
    """What goes to the disk in one write. `is_paged`: whole pages, which no other tensor has a part in."""

    offset: int
    size_bytes: int
    is_paged: bool


def pieces(first_byte: int, size_bytes: int) -> Iterator[Piece]:
    """The pages that lie whole in a tensor, in blocks; before and behind them what shares a page with a neighbour."""
    end = first_byte + size_bytes
    pages_start, pages_end = -(-first_byte // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES
    if pages_start >= pages_end:
        pages_start = pages_end = end
    if first_byte < pages_start:
        yield Piece(first_byte, pages_start - first_byte, is_paged=False)
    for at in range(pages_start, pages_end, BLOCK_BYTES):
        yield Piece(at, min(BLOCK_BYTES, pages_end - at), is_paged=True)
    if pages_end < end:
        yield Piece(pages_end, end - pages_end, is_paged=False)


def block_buffer() -> Array:
    """Room for one piece, at an address that direct I/O takes."""
    return np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)


class TensorSink:
    """Takes one tensor's bytes from front to back; as a context manager. `block` (`block_buffer`) is clobbered.

    `digest` is over what was handed to the disk.
    """

    def __init__(self, path: Path, first_byte: int, size_bytes: int, block: Array, *, is_direct: bool) -> None:
        self.digest = xxhash.xxh3_128()
        self._path, self._block, self._is_direct = path, block, is_direct
        self._pieces = pieces(first_byte, size_bytes)
        self._piece: Piece | None = None
        self._filled_bytes = 0
        self._samples: list[tuple[Piece, bytes]] = []
        self._files = ExitStack()
        self._handles: dict[bool, IO[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def room(self, size_bytes: int) -> Array | None:
        """Where the next bytes may be made, so that `write` need not copy them; None where they belong to two pieces."""
        piece, start = self._current(), self._filled_bytes
        return self._block[start : start + size_bytes] if start % _WORD_BYTES == 0 and start + size_bytes <= piece.size_bytes else None

    def write(self, data: Array) -> None:
        while data.size:
            piece, start = self._current(), self._filled_bytes
            count = min(data.size, piece.size_bytes - start)
            place = self._block[start : start + count]
            if place.ctypes.data != data.ctypes.data:
                np.copyto(place, data[:count])
            self._filled_bytes, data = start + count, data[count:]
            if self._filled_bytes == piece.size_bytes:
                self._put(piece)
                self._piece = None

    def _current(self) -> Piece:
        """The piece under way; bytes beyond the last one are a bug of the caller."""
        if self._piece is None:
            self._piece, self._filled_bytes = next(self._pieces), 0
        return self._piece

    def reads_back(self) -> bool:
        """Whether a sample of every piece lies where it was put: from the disk itself what went past the cache."""
        for sample, digest in self._samples:
            handle = self._handle(sample.is_paged)
            handle.flush()
            found = self._block.data[: sample.size_bytes]
            if os.preadv(handle.fileno(), [found], sample.offset) != len(found) or xxhash.xxh3_128_digest(found) != digest:
                return False
        return True

    def _put(self, piece: Piece) -> None:
        raw = self._block.data[: piece.size_bytes]
        self.digest.update(raw)
        handle = self._handle(piece.is_paged)
        handle.seek(piece.offset)
        DISK.write(handle, raw)
        # Another place in each piece, so that what goes wrong at the same place of all of them is seen too.
        places = max(1, len(raw) // SAMPLE_BYTES)
        start = len(self._samples) % places * SAMPLE_BYTES
        part = raw[start : start + SAMPLE_BYTES]
        self._samples.append((Piece(piece.offset + start, len(part), piece.is_paged), xxhash.xxh3_128_digest(part)))

    def _handle(self, is_paged: bool) -> IO[bytes]:  # noqa: FBT001  a key, not a switch
        if is_paged not in self._handles:
            opened = DISK.open_direct(self._path) if is_paged and self._is_direct else DISK.open(self._path, "r+b")
            self._handles[is_paged] = self._files.enter_context(opened)
        return self._handles[is_paged]


def takes_direct_writes(path: Path) -> bool:
    """Whether the file system of `path`, a file whose first page is still to be written, can go without its cache."""
    try:
        with DISK.open_direct(path) as handle:
            DISK.write(handle, memoryview(mmap.mmap(-1, PAGE_BYTES)))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        raise
    return True


def allocate(handle: IO[bytes], size_bytes: int) -> None:
    """Makes the file so long, its blocks found now where the system can: a disk without room says so here, and threads that
    write at the same time need not wait for one another while blocks are found (4.2 GB: 2.0 s instead of 3.0)."""
    handle.truncate(size_bytes)
    # Not os.posix_fallocate: where a file system cannot, the C library writes a byte into every block instead.
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or not size_bytes:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(handle.fileno(), 0, 0, size_bytes) and (code := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        raise OSError(code, os.strerror(code))
