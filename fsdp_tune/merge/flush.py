"""Keeps the disk busy while the engine computes: a thread that syncs what was written, a few hundred megabytes at a time."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdp_tune.atomic import DISK
from fsdp_tune.merge.page_cache import give_back

FLUSH_BYTES = 256 << 20


class Flusher:
    """Without it nothing reaches the disk before the last fsync, and the time of the copy is added to the time of the disk.

    `gives_back`: what is on the disk leaves the page cache.
    """

    def __init__(self, stage: Path, *, gives_back: bool = False) -> None:
        self._stage, self._gives_back = stage, gives_back
        self._done: dict[str, list[tuple[int, int]]] = {}
        self._pending: dict[str, int] = {}
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="merge-flush", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._queue.put(None)
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def wrote(self, name: str, count: int) -> None:
        with self._lock:
            pending = self._pending.get(name, 0) + count
            self._pending[name] = pending % FLUSH_BYTES
        if pending >= FLUSH_BYTES:
            self._queue.put(name)

    def finished(self, name: str, start: int, end: int) -> None:
        """Nobody needs these bytes any more: with `gives_back` their pages go once they are on the disk."""
        if self._gives_back:
            with self._lock:
                self._done.setdefault(name, []).append((start, end))

    def _sync(self, name: str) -> None:
        with self._lock:
            done = self._done.pop(name, [])
        with DISK.open(self._stage / name, "r+b") as handle:
            DISK.fsync(handle)
            give_back(handle.fileno(), done)

    def _run(self) -> None:
        while (name := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._sync(name)
                except OSError as error:
                    self._error = error
