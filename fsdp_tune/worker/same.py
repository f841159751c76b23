"""Whether all ranks run the same thing: the same code on the same recipe and data. Asked before any of them loads a model."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version

from fsdp_tune.errors import FailedError, Problem
from fsdp_tune.run_dir import RunDir
from fsdp_tune.worker.agree import gather

PACKAGES = ("fsdp-tune", "torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy")


def identity(run: RunDir) -> dict[str, str]:
    """What must be equal on every rank: versions, and the digests of the files that it reads."""
    files = {path.name: path.read_bytes() for path in (run.recipe_json, run.data_json)}
    digests = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in files.items()}
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}, **digests}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "not installed"


def check_same(run: RunDir) -> None:
    """FailedError on every rank, with each difference to rank 0, where the ranks are not alike. Collective."""
    first, *others = gather(identity(run))
    differences = [
        f"rank {rank} has {name} {other[name]}, rank 0 has {first[name]}"
        for rank, other in enumerate(others, start=1)
        for name in first
        if other[name] != first[name]
    ]
    if differences:
        more = f" (and {len(differences) - 1} more differences)" if len(differences) > 1 else ""
        hint = "install the same packages on every machine, and let all of them see the same run directory"
        raise FailedError(Problem("ranks-differ", f"{differences[0]}{more}", hint=hint))
