"""No process of a run is left five seconds after it: what the supervisor promises, also on a busy machine."""

from __future__ import annotations

import psutil

PROMISED_SECONDS = 5


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def left_over(before: set[psutil.Process]) -> list[psutil.Process]:
    """Processes below this one that were not there `before` and have not gone in time."""
    _, alive = psutil.wait_procs(list(children() - before), timeout=PROMISED_SECONDS)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
