"""Compile the emulated device: once per version of torch, 30 s, kept in the user's cache."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
# Before the fixtures of the tests give each its own home.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp-tune" / "emulated-cuda"
FLAGS = [
    "-O1",
    "-g0",
    "-fPIC",
    "-std=c++20",
    "-w",
    "-DTORCH_EXTENSION_NAME=emulated_cuda",
    "-DAT_PER_OPERATOR_HEADERS",
]


@dataclass(frozen=True, slots=True)
class Built:
    device: Path
    """The extension module."""
    nvml: Path
    """Folder of `libnvidia-ml.so.1`."""


_compiling: subprocess.Popen[bytes] | None = None


def start() -> None:
    """Begin to compile in the background, if it has to be done; `built` waits for it."""
    command = [sys.executable, "-m", "tests.cuda.build"]
    global _compiling
    _compiling = subprocess.Popen(
        command,
        cwd=NATIVE.parents[2],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def why_not() -> str | None:
    """Return why the device cannot be emulated here; None if it can."""
    import torch

    if torch.backends.cuda.is_built():
        return "this torch has CUDA of its own"
    if sys.platform != "linux":
        return "the emulated device is for Linux"
    return None if _compiler() else "no C++ compiler"


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


@functools.cache
def built() -> Built:
    """Return the compiled device, compiling it first if the sources or torch are new. Processes wait for the
    first that compiles."""
    import torch

    sources = sorted(NATIVE.iterdir())
    digest = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in sources))
    digest.update(f"{torch.__version__} {sys.version_info[:2]} {FLAGS}".encode())
    folder = CACHE / f"torch-{torch.__version__}-{digest.hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    found = Built(folder / "emulated_cuda.so", folder)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.device.exists():
            _compile(folder, found.device)
    return found


def _compile(folder: Path, device: Path) -> None:
    from torch.utils import cpp_extension

    compiler = _compiler()
    assert compiler is not None
    subprocess.run(
        [
            compiler,
            "-x",
            "c",
            "-shared",
            "-fPIC",
            "-O1",
            NATIVE / "nvml.c",
            "-o",
            folder / "libnvidia-ml.so.1",
        ],
        check=True,
    )
    includes = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    includes += ["-isystem", sysconfig.get_paths()["include"], "-I", str(NATIVE)]
    # All sources in one: nearly all of the time goes into torch's headers.
    together, compiled = folder / "together.cpp", folder / "together.o"
    together.write_text(
        "".join(f'#include "{source.name}"\n' for source in sorted(NATIVE.glob("*.cpp"))), encoding="utf-8"
    )
    done = subprocess.run(
        [compiler, *FLAGS, *includes, "-c", together, "-o", compiled],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the emulated device does not compile:\n{done.stderr[-6000:]}")
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + [
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
        "-ltorch_python",
    ]
    linked = folder / "linked.so"
    subprocess.run([compiler, "-shared", compiled, *libraries, "-o", linked], check=True)
    linked.replace(device)
    compiled.unlink()


if __name__ == "__main__":
    if why_not() is None:
        built()
