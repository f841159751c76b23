"""The counter with which the first machine of a run shows the others that it works before a launch.

Long work before a launch (tokenising rows, hashing a checkpoint) is counted in a file that the others read. Only a change of the count
matters, so the file of a killed command is not mistaken for work.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.core.progress import Bar
from fsdp_tune.run.directory import RunDir

PUBLISH_SECONDS = 1.0


class WorkCounter:
    """Count rows or bytes and publish the count at most once a second; a run on one machine publishes nothing."""

    def __init__(self, run: RunDir, machines: int) -> None:
        self._paths = _paths(run) if machines > 1 else ()
        self._count = 0
        self._published_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for path in self._paths:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def advance(self, n: int = 1) -> None:
        self._count += n
        if self._paths and time.monotonic() - self._published_at >= PUBLISH_SECONDS:
            self._published_at = time.monotonic()
            with suppress(OSError):
                DISK.mkdir(self._paths[0].parent)
            for path in self._paths:
                with suppress(OSError):  # try the next path; if none is writable, the others wait for their usual time
                    write_json(path, {"count": self._count, "time": time.time()})
                    return


class CountedBar:
    """A progress bar that also counts work."""

    def __init__(self, bar: Bar, work: WorkCounter) -> None:
        self._bar, self._work = bar, work

    def advance(self, n: int = 1) -> None:
        self._bar.advance(n)
        self._work.advance(n)


class WorkWatch:
    """Follow the counter from another machine."""

    def __init__(self, run: RunDir) -> None:
        self._paths = _paths(run)
        self._seen = self._content()
        self._changed_at = time.monotonic()

    def silent_seconds(self) -> float:
        """Return the seconds since the count was last seen to change, or since this watch was made."""
        if (content := self._content()) != self._seen:
            self._seen, self._changed_at = content, time.monotonic()
        return time.monotonic() - self._changed_at

    def _content(self) -> list[bytes | None]:
        return [_read(path) for path in self._paths]


def _paths(run: RunDir) -> tuple[Path, ...]:
    """Return the paths to try: next to the run directory, which may not exist yet, else in its logs."""
    return run.path.with_name(f".{run.name}.work.json"), run.logs / "work.json"


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
