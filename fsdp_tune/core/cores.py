"""How many cores there are to work with: processes that tokenise, threads that merge, threads of a rank."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Cores that this process may use: a container or `taskset` allows fewer than the machine has, and macOS does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
