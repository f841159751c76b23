"""The machine of a GPU day: its environment, its versions, and the wheels that travel to it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
IS_EMULATED = "EMULATED_CUDA" in os.environ
VERSIONS = ("torch", "transformers", "accelerate", "peft", "torchao", "flash-attn", "liger-kernel", "triton")
PRESENT = ("torch", "transformers", "accelerate")
"""What a rented GPU machine has, with what these need."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "torchao", "liger-kernel")
"""What the tests and the parts need in addition to `dependencies` of pyproject.toml."""
WHEELS_BYTES = 60 << 20


def versions() -> dict[str, str]:
    return {name: found for name in VERSIONS if (found := _version(name))} | {"Python": sys.version.split()[0]}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    done = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def prepare_environment(*, tiny: bool) -> None:
    """Before torch is imported, here and in every process that is started here; as the launcher sets it."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode of the wheels each process compiles them again
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of numpy do not survive a fork
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if tiny:
        os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))  # the models of tests/gpu


def travelling_packages() -> list[str]:
    """Return what `dependencies` and the tools need here and `PRESENT` does not, each as `name==version`."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    present = _closure(PRESENT)
    needed = _closure([*(Requirement(each).name for each in wanted), *TOOLS])
    return [f"{name}=={version}" for name, version in sorted(needed.items()) if name not in present]


def _closure(names: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Return the versions of packages that are installed here, with all that they require."""
    found: dict[str, str] = {}
    waiting = [name.lower().replace("_", "-") for name in names]
    while waiting:
        if (name := waiting.pop()) in found or (version := _version(name)) is None:
            continue
        found[name] = version.split("+")[0]
        required = [Requirement(text) for text in importlib.metadata.requires(name) or ()]
        waiting += [each.name.lower().replace("_", "-") for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def download_wheels(folder: Path) -> int:
    """Download the travelling packages for Linux and this Python, without those that only a build provides. Returns the exit code."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*command, *travelling_packages()], check=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / (1 << 20):.1f} MiB of at most {WHEELS_BYTES >> 20}")
    return 0 if size <= WHEELS_BYTES else 1
