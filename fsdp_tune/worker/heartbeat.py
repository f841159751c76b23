"""A sign of life from each rank: which step, which phase, how far in it, when. Read by `status` and by the supervisor.

The training thread only notes where it is. A thread of its own writes the file each second, so that a rank which waits
in a collective still shows that it lives; and it looks at the training thread a few times a second, to tell the time that
this rank waits for others from the time that it works.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fsdp_tune.errors import failed_error
from fsdp_tune.run_dir import RunDir
from fsdp_tune.units import MIB

INTERVAL_SECONDS = 1.0
SAMPLE_SECONDS = 0.1
# In these, bytes read and written are progress: a checkpoint on a slow disk is no hang.
FILE_PHASES = frozenset({"importing", "loading the model", "probing a save", "saving"})
_WAITING_FRAMES = 4
"""How deep below the call that waits torch.distributed's own code is looked for."""


class Heartbeat:
    """`beat`, `mark` and `tick` are for the training thread. `silence_seconds`: after so long without any of them `on_silence` runs."""

    def __init__(
        self, run: RunDir, rank: int, *, silence_seconds: float | None = None, on_silence: Callable[[], None] | None = None
    ) -> None:
        self._path = run.rank_heartbeat(rank)
        self._rank = rank
        self._written = 0.0
        self._phase = self._told_phase = ""
        self._phase_began = time.monotonic()
        self.began_at = time.time()
        self.phase_seconds: dict[str, float] = {}
        """How long the training thread was in each phase, the one that lasts left out."""
        self._ticks = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._trained = threading.get_ident()
        self._silence_seconds, self._on_silence = silence_seconds, on_silence
        self._is_gone = False
        self.step = 0
        self.collective: dict[str, Any] | None = None
        """The last collective that the flight recorder saw, once this rank stands still."""
        self.waited_seconds = 0.0
        """Time that the training thread has spent waiting for other ranks, as sampled; see `worker.progress`."""

    @property
    def phase(self) -> str:
        return self._phase

    def beat(self, phase: str, step: int | None = None) -> None:
        """Writes at once when the phase changes, else at most once a second. FailedError when the run directory has gone."""
        self.step = self.step if step is None else step
        changed, self._told_phase = phase != self._told_phase, phase
        self.mark(phase)
        if changed or time.monotonic() - self._written >= INTERVAL_SECONDS:
            self._write()
        if self._is_gone:
            raise failed_error(
                "run-directory-gone",
                f"{self._path.parent} is no longer there: the run directory was removed, renamed or replaced",
                hint="put it back, and start again with `--resume auto`",
            )

    def mark(self, phase: str) -> None:
        """As `beat`, without touching the file: cheap enough for every part of every step."""
        if phase != self._phase:
            now = time.monotonic()
            if self._phase:
                self.phase_seconds[self._phase] = self.phase_seconds.get(self._phase, 0.0) + now - self._phase_began
            self._phase, self._phase_began = phase, now
        self._ticks += 1

    def tick(self) -> None:
        """Progress inside a phase."""
        self._ticks += 1

    def start(self) -> None:
        """Called on the training thread: the file stays fresh from now on, whatever that thread waits for."""
        self._trained = threading.get_ident()
        self._thread = threading.Thread(target=self._keep_beating, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(INTERVAL_SECONDS)  # it may itself stand still, asking a wedged device

    def _keep_beating(self) -> None:
        progress, since = (-1, -1), time.monotonic()
        while not self._ended.wait(SAMPLE_SECONDS):
            self._sample()
            now = time.monotonic()
            if now - self._written < INTERVAL_SECONDS:
                continue
            self._write()
            if progress != (progress := (self._ticks, self._moved_mib())):
                since = now
            elif self._silence_seconds is not None and self._on_silence is not None and now - since > self._silence_seconds:
                since = now
                try:
                    self._on_silence()
                except Exception:  # noqa: BLE001  a report that fails must not end the signs of life
                    traceback.print_exc()

    def _sample(self) -> None:
        frame = sys._current_frames().get(self._trained)
        if frame is not None and is_waiting(frame):
            self.waited_seconds += SAMPLE_SECONDS

    def _write(self) -> None:
        self._written = time.monotonic()
        content = {
            "rank": self._rank,
            "pid": os.getpid(),
            "step": self.step,
            "phase": self._phase,
            "time": time.time(),
            "ticks": self._ticks,
            "moved_mib": self._moved_mib(),
            "collective": self.collective,
        }
        # Not through `atomic`: this is a sign of life, overwritten each second, and an fsync would stall the step.
        stage = self._path.with_suffix(".tmp")
        with self._lock:
            try:
                stage.write_text(json.dumps(content), encoding="utf-8")
                stage.replace(self._path)
            except (FileNotFoundError, NotADirectoryError):
                self._is_gone = True
            except OSError:  # a full disk: the write that matters, a checkpoint's or a metric's, reports it
                return

    def _moved_mib(self) -> int:
        """MiB that this process has read and written, in the phases where that is progress; else 0."""
        if self._phase not in FILE_PHASES:
            return 0
        try:
            lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        except OSError:  # no such file on this system
            return 0
        counted = ("rchar", "wchar", "read_bytes", "write_bytes")
        return sum(int(line.split()[1]) for line in lines if line.split(":")[0] in counted) // MIB


def is_waiting(frame: FrameType) -> bool:
    """Whether a thread stands in torch.distributed's own code, a few calls deep at most."""
    below: FrameType | None = frame
    for _ in range(_WAITING_FRAMES):
        if below is None:
            return False
        if "/torch/distributed/" in below.f_code.co_filename:
            return True
        below = below.f_back
    return False
