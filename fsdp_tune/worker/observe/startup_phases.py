"""How long it took to the end of the first step, phase by phase."""

from __future__ import annotations

from contextlib import suppress

import psutil

from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter

_INIT = 1
"""Adopts what outlives its parent."""


def startup_seconds(heartbeat: HeartbeatWriter) -> dict[str, float]:
    """Return the seconds of this rank's start-up phases in order, from the start of its launcher.

    That process is `accelerate launch`, or whatever else started the rank; what came before it is the
    command's own. `launching` is left out for a rank whose launcher cannot be seen: it has ended, or the rank
    is the first of its namespace of processes; where no process can be seen (no /proc), so is
    `starting Python`.
    """
    phases = dict(heartbeat.phase_seconds)
    with suppress(psutil.Error):
        rank = psutil.Process()
        born = rank.create_time()
        phases = {"starting Python": heartbeat.began_at - born, **phases}
        launcher = rank.parent()
        if launcher is not None and launcher.pid != _INIT:
            return {"launching": born - launcher.create_time(), **phases}
    return phases
