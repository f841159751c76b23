"""The machine of a GPU day: its environment, its versions, and the wheels that travel to it."""

from __future__ import annotations

import hashlib
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
CODE = ("fsdp_tune", "benchmarks", "tests/gpu")
PRESENT = (
    *(
        "torch",
        "transformers",
        "accelerate",
        "triton",
        "numpy",
        "packaging",
        "pyyaml",
        "regex",
        "safetensors",
        "tokenizers",
        "tqdm",
    ),
    *(
        "filelock",
        "fsspec",
        "jinja2",
        "markupsafe",
        "sympy",
        "mpmath",
        "networkx",
        "typing-extensions",
        "huggingface-hub",
        "psutil",
    ),
    *("setuptools", "requests"),
)
"""What a rented GPU machine has: all versions of torch, transformers and accelerate need it."""
TOOLS = ("pytest", "pytest-xdist", "hypothesis", "torchao", "liger-kernel")
"""What the tests and the parts need in addition to `dependencies` of pyproject.toml."""
LEFT_OUT = ("datasets",)
"""With pyarrow and pandas it has 65 MiB. Only data sets of the hub need it, and the part `parity`, which runs
where a machine has it."""
WHEELS_BYTES = 60 << 20


def versions() -> dict[str, str]:
    return {name: found for name in VERSIONS if (found := _version(name))} | {
        "Python": sys.version.split()[0]
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def source() -> str:
    """Return a digest of the code: a machine may have no commit, and a working tree may have changes in
    addition to its commit."""
    found = hashlib.sha256()
    for file in sorted(
        each for name in CODE for each in (ROOT / name).rglob("*") if each.suffix in (".py", ".json")
    ):
        found.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]


def prepare_environment(*, tiny: bool) -> None:
    """Before torch is imported, here and in every process that is started here; as the launcher sets it."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    # without bytecode of the wheels each process compiles them again
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of numpy do not survive a fork
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if tiny:
        os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(ROOT))  # the models of tests/gpu


def travelling_packages() -> list[str]:
    """Return what `dependencies` and the tools need and a machine lacks, in the versions that are installed
    here (`name==version`)."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    found: dict[str, str] = {}
    waiting = [*map(_name, dependencies), *TOOLS]
    while waiting:
        if (name := waiting.pop()) in (*PRESENT, *LEFT_OUT) or name in found:
            continue
        version = _version(name)
        found[name] = name if version is None else f"{name}=={version}"
        required = [
            Requirement(text)
            for text in (importlib.metadata.requires(name) or () if version is not None else ())
        ]
        waiting += [
            _name(each.name)
            for each in required
            if each.marker is None or each.marker.evaluate({"extra": ""})
        ]
    return [found[name] for name in sorted(found)]


def _name(requirement: str) -> str:
    return Requirement(requirement).name.lower().replace("_", "-")


def download_wheels(folder: Path, python: str) -> int:
    """Download the packages for Linux and a version of Python (3.12). Returns the exit code: 1 if they are
    too large to carry."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    command += ["--python-version", python, "--implementation", "cp"]
    for glibc in ("2014", "_2_28", "_2_17"):
        command += ["--platform", f"manylinux{glibc}_x86_64"]
    subprocess.run([*command, *travelling_packages()], check=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: {size / (1 << 20):.1f} MiB of at most {WHEELS_BYTES >> 20}")
    return 0 if size <= WHEELS_BYTES else 1
