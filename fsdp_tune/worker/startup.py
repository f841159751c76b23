"""How long it took to the end of the first step, phase by phase."""

from __future__ import annotations

import psutil

from fsdp_tune.worker.heartbeat import Heartbeat


def startup_seconds(heartbeat: Heartbeat) -> dict[str, float]:
    """Seconds of this rank's phases in their order, beginning with the process that launched it.

    That process is `accelerate launch`, or whatever else started the rank; what came before it is the command's own.
    """
    rank = psutil.Process()
    born, launcher_born = rank.create_time(), psutil.Process(rank.ppid()).create_time()
    return {"launching": born - launcher_born, "starting Python": heartbeat.began_at - born, **heartbeat.phase_seconds}
