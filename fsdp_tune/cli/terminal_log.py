"""The log of a command: a file that gets every printed line with its time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fsdp_tune.cli.nonblocking_streams import Outlet
from fsdp_tune.core.atomic import DISK


class TerminalLog:
    """A file that gets every printed line with its time. The first failure closes it and is reported once: a
    log never stops a command."""

    def __init__(self, path: Path, failed: Callable[[Path, OSError], None]) -> None:
        self._path, self._failed = path, failed
        self._file: IO[bytes] | None = None
        self._outlet: Outlet | None = None
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = DISK.open_private(path, "ab")
        except OSError as error:
            failed(path, error)

    def write(self, line: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        data = "".join(f"{stamp}  {part}\n" for part in line.split("\n")).encode("utf-8", "backslashreplace")
        if self._outlet is not None:
            self._outlet.put(data)
            return
        try:
            self._append(data)
        except OSError as error:
            self._give_up(error)

    def _append(self, data: bytes) -> None:
        with self._lock:
            if self._file is not None:
                DISK.write(self._file, data)
                self._file.flush()

    def stop_waiting(self) -> None:
        """From now on a thread writes to the file."""
        if self._outlet is None:
            self._outlet = Outlet(self._append, self._give_up)

    def close(self) -> None:
        if self._outlet is not None and not self._outlet.close():
            return  # the thread still waits for the disk, with the file
        with self._lock:
            if self._file is not None:
                try:
                    self._file.close()
                except OSError as error:
                    self._give_up(error)
                self._file = None

    def _give_up(self, error: OSError) -> None:
        file, self._file = self._file, None
        if file is not None:
            # the disk has failed: what the buffer still holds cannot be written
            with contextlib.suppress(OSError):
                file.close()
        self._failed(self._path, error)
