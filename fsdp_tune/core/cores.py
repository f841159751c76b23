"""The number of usable cores, for tokenising processes, merging threads and threads of a rank."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the number of cores that this process may use, limited by containers and `taskset`; on macOS, all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
