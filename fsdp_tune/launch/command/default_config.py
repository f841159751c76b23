"""The default configuration of Accelerate on this machine, which a bare `accelerate launch` uses and fsdp-tune ignores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.user_cache import home_directory
from fsdp_tune.recipe.read.plain_yaml import read_plain_yaml

# https://github.com/huggingface/accelerate: commands/config/config_args.py, default_config_file
_NAMES = ("default_config.yaml", "default_config.json")


def accelerate_default_config(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the path and the content of the configuration, or why it cannot be read; None if there is none."""
    home = Path(environment["HOME"]) if "HOME" in environment else home_directory() or Path("/")
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    folder = Path(environment.get("HF_HOME") or cache / "huggingface") / "accelerate"
    path = next((folder / name for name in _NAMES if (folder / name).is_file()), None)
    if path is None:
        return None
    try:
        content = read_plain_yaml(path)
    except FsdpTuneError as error:
        content = f"cannot be read: {error.problems[0].message}"
    return {"path": str(path), "content": content}
