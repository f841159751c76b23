"""What an observation says of the interpreter that computed it: versions of libraries, and packages that were
lent to it."""

from __future__ import annotations

import functools
import platform
import sys

from fsdp_tune.core.package_versions import installed_versions

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "peft", "numpy", "safetensors")


@functools.cache
def versions() -> dict[str, str | None]:
    """Return the versions of the libraries that compute, of this interpreter."""
    return {"python": platform.python_version(), **installed_versions(PACKAGES)}


def lent_packages() -> list[str]:
    """Return the imported packages that are not this interpreter's own: those in the folders that its command
    line names."""
    files = {
        name: str(getattr(module, "__file__", None) or "")
        for name, module in list(sys.modules.items())
        if "." not in name
    }
    return sorted(
        name
        for name, file in files.items()
        if file.startswith(tuple(f"{folder}/" for folder in sys.argv[1:]))
    )
