"""Seconds that this process lived through, for limits that one process judges another by.

A job can be stopped as a whole and continued: `scontrol suspend`, `docker pause`, Ctrl-Z, a laptop's lid. The
monotonic clock runs on meanwhile, so that by it everything has been silent for hours. A thread looks at the
clock each second. Where it could not, for longer than `LEAST_GAP_SECONDS`, this process did not run, and that
time does not count.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

PERIOD_SECONDS = 1.0
LEAST_GAP_SECONDS = 5.0
"""A shorter delay is that of a busy machine."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which this process did not run, in monotonic seconds."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class LivedClock:
    """The monotonic clock of a process without the gaps in which it did not run."""

    gaps: list[Gap] = field(default_factory=list[Gap])
    _seen: float | None = None
    """When the clock was last looked at; None while nothing looks at it regularly."""
    _pid: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def now(self) -> float:
        """Return the seconds lived through. The first call starts the thread. Not for a handler of signals:
        it waits for a lock."""
        if self._pid != os.getpid():  # also in a fork, which has no threads
            self._pid, self._seen, self._lock = os.getpid(), None, threading.Lock()
            self._look()
            threading.Thread(target=self._keep_looking, name="clock", daemon=True).start()
        return self.at(self._look())

    def at(self, monotonic: float) -> float:
        """Return `now()` of the moment at which the monotonic clock had a value."""
        return monotonic - sum(
            min(gap.ended, monotonic) - gap.began for gap in self.gaps if gap.began < monotonic
        )

    def _look(self) -> float:
        with self._lock:
            before, self._seen = self._seen, time.monotonic()
            if before is not None and self._seen - before > LEAST_GAP_SECONDS:
                self.gaps.append(Gap(before, self._seen))
            return self._seen

    def _keep_looking(self) -> None:
        while True:
            time.sleep(PERIOD_SECONDS)
            self._look()


LIVED = LivedClock()
"""The clock of this process."""


def seconds_since_boot() -> tuple[str, float]:
    """Return the id of the machine's boot, "" if unknown, and the seconds since, suspended ones included."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return "", 0.0
    return boot, time.clock_gettime(time.CLOCK_BOOTTIME)
