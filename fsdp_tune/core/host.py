"""Facts of this machine beside its accelerators: memory, limits, and the network."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

from fsdp_tune.core.cgroups import memory_limit
from fsdp_tune.core.devices import available_cores
from fsdp_tune.core.units import KIB


def host() -> dict[str, Any]:
    """Return the facts of the machine, sizes in bytes; None if the system does not report one."""
    memory = memory_info()
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "name": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "executable": sys.executable,
        "cores": os.cpu_count(),
        "usable_cores": available_cores(),
        "memory_bytes": memory.get("MemTotal"),
        "memory_available_bytes": memory.get("MemAvailable"),
        "memory_limit_bytes": limit.value if (limit := memory_limit()) is not None else None,
        "shared_memory_bytes": shared.total if shared else None,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory_limit_bytes": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
    }


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def memory_info() -> dict[str, int]:
    """Return /proc/meminfo in bytes; {} on systems without it."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return {}
    return {
        match[1]: int(match[2]) * KIB for match in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }


def peak_resident_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    unit = 1 if sys.platform == "darwin" else KIB  # of `ru_maxrss`: `man getrusage` of each
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def interconnect() -> dict[str, Any]:
    """Return the network devices: InfiniBand and RoCE ports with their state, and the names of all interfaces
    except loopback."""
    ports = {
        f"{port.parent.parent.name}/{port.name}": {
            "state": _word(port / "state"),
            "rate": _word(port / "rate"),
            "layer": _word(port / "link_layer"),
        }
        for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*"))
    }
    interfaces = sorted(path.name for path in Path("/sys/class/net").glob("*") if path.name != "lo")
    return {"infiniband": ports, "interfaces": interfaces}


def _word(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
