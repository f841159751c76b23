"""Streams that never wait for who reads them.

`train | less`, Ctrl-S, a frozen tmux and a collector of logs that has stopped leave a write waiting for as
long as nobody reads. While ranks run, a thread writes what a stream is given. What waits for it is bounded:
more is left out and counted.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

WAITING_BYTES = 1 << 18
"""What may wait in one outlet."""
CLOSE_SECONDS = 60.0
"""How long `close` waits for a reader that takes nothing."""
GONE = (errno.EPIPE, errno.EIO)
"""Errors of a reader that has ended, of which nobody has to be told."""


class Outlet:
    """Writes what it is given in a thread, in order."""

    def __init__(
        self,
        write: Callable[[bytes], object],
        failed: Callable[[OSError], None],
        *,
        limit_bytes: int = WAITING_BYTES,
    ) -> None:
        """`write` may block. `failed` is called once, in the thread, with the first error; everything after
        it is left out."""
        self._write, self._failed, self._limit_bytes = write, failed, limit_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = self._left_out_lines = 0
        self._is_open, self._is_writing, self._has_failed = True, False, False
        self._moved_at = time.monotonic()
        self._state = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="outlet", daemon=True)
        self._thread.start()

    def put(self, data: bytes) -> None:
        """Write `data` when the reader takes it. Returns at once."""
        with self._state:
            if self._has_failed or not self._is_open:
                return
            if self._waiting_bytes + len(data) > self._limit_bytes:
                self._left_out_lines += data.count(b"\n")
                return
            self._count_left_out()
            self._append(data)

    def _count_left_out(self) -> None:
        if self._left_out_lines:
            self._append(f"({self._left_out_lines:,} lines were left out: nobody took them)\n".encode())
            self._left_out_lines = 0

    def _append(self, data: bytes) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._state.notify_all()

    def close(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until everything is written, at most `seconds` without any progress. Returns whether it is."""
        with self._state:
            self._count_left_out()
            self._is_open = False
            self._moved_at = time.monotonic()
            self._state.notify_all()
            while (self._waiting or self._is_writing) and (
                left := self._moved_at + seconds - time.monotonic()
            ) > 0:
                self._state.wait(left)
            return not self._waiting and not self._is_writing

    def _run(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: bool(self._waiting) or not self._is_open)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
                self._is_writing = True
            error: OSError | None = None
            try:
                self._write(data)
            except OSError as raised:
                error = raised
            with self._state:
                self._waiting_bytes -= len(data)
                self._is_writing, self._moved_at = False, time.monotonic()
                if error is not None:
                    self._has_failed = True
                    self._waiting.clear()
                self._state.notify_all()
            if error is not None:
                self._failed(error)
                return


class OutletStream(io.TextIOBase):
    """A text stream over an outlet, in place of `sys.stdout` or `sys.stderr`."""

    def __init__(self, stream: TextIO, failed: Callable[[OSError], None]) -> None:
        self.stream = stream
        self._encoding = stream.encoding or "utf-8"
        self._outlet = Outlet(lambda data: write_all(stream.fileno(), data), failed)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def write(self, text: str) -> int:
        self._outlet.put(text.encode(self._encoding, "backslashreplace"))
        return len(text)

    def flush(self) -> None:
        """Nothing is held back: the thread writes what there is."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def drain(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Write what waits. Returns whether the reader took everything."""
        return self._outlet.close(seconds)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`, also where another program has made the descriptor non-blocking. Raises:
    OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            with contextlib.suppress(InterruptedError):
                select.select([], [descriptor], [])
