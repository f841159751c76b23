"""A sign of life from each rank: which step, which phase, when. Read by `status` and by the supervisor."""

from __future__ import annotations

import json
import os
import time

from fsdp_tune.run_dir import RunDir

INTERVAL_SECONDS = 1.0


class Heartbeat:
    def __init__(self, run: RunDir, rank: int) -> None:
        self._path = run.rank_heartbeat(rank)
        self._rank = rank
        self._written = 0.0
        self._phase = ""
        self.step = 0

    def beat(self, phase: str, step: int | None = None) -> None:
        """Writes at once when the phase changes, else at most once a second."""
        self.step = self.step if step is None else step
        now = time.time()
        if phase == self._phase and now - self._written < INTERVAL_SECONDS:
            return
        self._phase, self._written = phase, now
        content = {"rank": self._rank, "pid": os.getpid(), "step": self.step, "phase": phase, "time": now}
        # Not through `atomic`: this is a sign of life, overwritten each second, and an fsync would stall the step.
        stage = self._path.with_suffix(".tmp")
        stage.write_text(json.dumps(content), encoding="utf-8")
        stage.replace(self._path)
