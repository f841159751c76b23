"""The user's own cache directory, which holds the files that compilers execute."""

from __future__ import annotations

import os
from pathlib import Path

from fsdp_tune.core.errors import usage_error

COMPILED = "compiled"
"""Directory of Inductor's kernels inside the default cache directory. Inductor unpickles and executes the files in it."""

INSPECTIONS = "inspections"
"""Directory of kept inspections of models inside the default cache directory."""


def home_directory() -> Path | None:
    """Return the user's home directory; None without HOME for a user id that has no entry in /etc/passwd, as in many containers."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def default_cache_directory() -> Path:
    """Return $XDG_CACHE_HOME/fsdp-tune. A relative XDG_CACHE_HOME is ignored, as the XDG specification requires."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return Path(base) / "fsdp-tune"
    if (home := home_directory()) is None:
        message = "there is no place for the cache: HOME and XDG_CACHE_HOME are not set, and this user has no home directory"
        raise usage_error("cache-unusable", message, hint="`export XDG_CACHE_HOME=DIR`, a directory where you may write")
    return home / ".cache" / "fsdp-tune"


def compiler_variables() -> dict[str, str]:
    """Return the variables that keep Inductor out of TMPDIR/torchinductor_USER, which another user can create first.

    Every process gets them: 4-bit layers and low-bit optimizers compile without `kernels.compile`, and so does code of a library. A fixed
    directory also lets the next run reuse the kernels. Inductor has no variable for the directory of precompiled C++ headers
    (`_inductor/codecache.py`, _HEADER_DIR), so they are switched off; torch 2.11 does not read that variable, and `compile_layers` does it.
    """
    return {"TORCHINDUCTOR_CACHE_DIR": str(default_cache_directory() / COMPILED), "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
