"""Keeps a cold disk reading while the engine computes and writes: a thread that asks the kernel for what is needed next.

The kernel's own read-ahead follows one reader through one file. Here several threads read from the files of many ranks
in turn, so it would see jumps, and each new slice would begin with an empty page cache.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from fsdp_tune.merge.formats.contents import Source
from fsdp_tune.merge.formats.reader import AHEAD_BYTES, SourceFiles
from fsdp_tune.merge.formats.tensors import Packed

WINDOW_BYTES = 128 << 20


class ReadAhead:
    """Stays WINDOW_BYTES ahead of what was read, in the order of `names`."""

    def __init__(self, sources: Sequence[Source], names: Sequence[str]) -> None:
        self._sources, self._names = sources, names
        self._read_bytes = 0
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="merge-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def has_read(self, count: int) -> None:
        """Called from all threads as bytes of the source arrive."""
        with self._changed:
            self._read_bytes += count
            self._changed.notify()

    def _pieces(self) -> Iterator[tuple[SourceFiles, str, int, int]]:
        for name in self._names:
            for source in self._sources:
                tensor = source.tensors[name]
                for chunk in tensor.chunks:
                    place = chunk.place
                    start, length = (
                        (place.offset, place.length_bytes) if isinstance(place, Packed) else (place.storage_start, place.storage_bytes)
                    )
                    for at in range(start, start + length, AHEAD_BYTES):
                        yield tensor.files, place.file, at, min(AHEAD_BYTES, start + length - at)

    def _run(self) -> None:
        asked_bytes = 0
        for files, file, at, count in self._pieces():
            with self._changed:
                while not self._stopped and asked_bytes > self._read_bytes + WINDOW_BYTES:
                    self._changed.wait()
                if self._stopped:
                    return
            files.will_need(file, at, count)
            asked_bytes += count
