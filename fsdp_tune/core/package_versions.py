"""Versions of packages as they are installed, from metadata alone."""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Iterable

from fsdp_tune.core.version import __version__

PACKAGES = (
    *(
        "torch",
        "transformers",
        "accelerate",
        "datasets",
        "tokenizers",
        "safetensors",
        "huggingface_hub",
        "peft",
        "bitsandbytes",
    ),
    *(
        "flash-attn",
        "liger-kernel",
        "torchao",
        "triton",
        "numpy",
        "ml_dtypes",
        "pydantic",
        "typer",
        "tensorboard",
        "wandb",
    ),
)


def versions() -> dict[str, str | None]:
    """Return the installed version of each package, or None; read from metadata, without importing
    anything."""
    return {"python": platform.python_version(), "fsdp-tune": __version__, **installed_versions(PACKAGES)}


def installed_versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return the installed version of each of these packages, or None."""
    return {name: _installed_version(name) for name in packages}


@functools.cache
def _installed_version(package: str) -> str | None:
    """Kept, because reading the metadata takes 6 ms and each recipe that is read compares the version of
    transformers."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
