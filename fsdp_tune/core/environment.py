"""Describe this machine and this Python: versions, memory, limits, and default config files of Accelerate. Torch-free."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp_tune.core.devices import available_cores
from fsdp_tune.core.version import __version__

PACKAGES = (
    *("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface_hub", "peft", "bitsandbytes"),
    *("flash-attn", "liger-kernel", "torchao", "triton", "numpy", "ml_dtypes", "pydantic", "typer", "tensorboard", "wandb"),
)
# https://github.com/huggingface/accelerate: commands/config/config_args.py, default_config_file
_ACCELERATE_DEFAULTS = ("default_config.yaml", "default_config.json")


def versions() -> dict[str, str | None]:
    """Return the installed version of each package, or None; read from metadata, without importing anything."""
    return {"python": platform.python_version(), "fsdp-tune": __version__, **installed_versions(PACKAGES)}


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the installed version of each of these packages, or None."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def host() -> dict[str, Any]:
    """Return the facts of the machine, sizes in bytes; None if the system does not report one."""
    memory = _memory_info()
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
        "memory_limit_bytes": _container_limit_bytes(),
        "shared_memory_bytes": shared.total if shared else None,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory_limit_bytes": _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
    }


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def _memory_info() -> dict[str, int]:
    """Return /proc/meminfo in bytes; {} on systems without it."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return {}
    return {match[1]: int(match[2]) * 1024 for match in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def _container_limit_bytes() -> int | None:
    """Return the memory limit of the control group (cgroup v2, then v1); None if there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < 1 << 60 else None
    return None


def interconnect() -> dict[str, Any]:
    """Return the network devices: InfiniBand and RoCE ports with their state, and the names of all interfaces except loopback."""
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


def accelerate_default_config(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the default Accelerate config, which a bare `accelerate launch` uses and fsdp-tune ignores; None if there is none."""
    home = Path(environment.get("HOME", "~")).expanduser()
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    folder = Path(environment.get("HF_HOME") or cache / "huggingface") / "accelerate"
    for name in _ACCELERATE_DEFAULTS:
        path = folder / name
        if path.is_file():
            return {"path": str(path), "content": _parsed(path)}
    return None


def _parsed(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        return f"cannot be read: {error}"
