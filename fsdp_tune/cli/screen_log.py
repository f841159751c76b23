"""The file that gets every line of the console, each with its time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fsdp_tune.atomic import DISK


class ScreenLog:
    """Appends lines. The first failure closes the file and is reported once: a log never stops a command."""

    def __init__(self, path: Path, failed: Callable[[Path, OSError], None]) -> None:
        self._path, self._failed = path, failed
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = DISK.open_private(path, "ab")
        except OSError as error:
            failed(path, error)

    def write(self, line: str) -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        text = "".join(f"{stamp}  {part}\n" for part in line.split("\n"))
        with self._lock:
            if self._file is None:
                return
            try:
                DISK.write(self._file, text.encode("utf-8", "backslashreplace"))
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
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
            with contextlib.suppress(OSError):  # the disk has failed: what the buffer still holds cannot be written
                file.close()
        self._failed(self._path, error)
