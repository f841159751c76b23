"""Cache of model inspections for `train`: a child process imports torch and transformers for one, a repeated start reads a file.

The name of a file is a digest of everything that the inspection depends on. Only an inspection without problems is kept, so that a
mistake is inspected again on each start. `validate` always inspects.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import DISK, write_json
from fsdp_tune.jobs import inspection
from fsdp_tune.jobs.inspection import Inspection, inspect_model, notices_from
from fsdp_tune.planner.tracing import installed_code
from fsdp_tune.recipe.paths import default_cache_directory
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.directory import run_of

FOLDER = "inspections"
KEPT_FILES = 50
LIBRARIES = ("torch", "transformers", "accelerate", "peft")
VARIABLES = (
    "ACCELERATE",
    "BNB",
    "CUDA",
    "DISABLE_",
    "FLASH",
    "FSDP",
    "HF_",
    "HUGGING",
    "LD_",
    "LIGER",
    "PEFT",
    "PYT",
    "TORCH",
    "TRANSFORMERS",
    "USE_",
)
"""Beginnings of the names of variables that libraries read."""
_UNSEEN = ("name", "output_dir")


def inspect_model_once(recipe: Recipe) -> Inspection:
    """Return the kept inspection of a model, or inspect it and keep the result."""
    key = inspection_key(recipe)
    if key is None:
        return inspect_model(recipe)
    # The user's own directory, never `data.cache_dir`, which others may write: RUN/model is written from the document.
    path = default_cache_directory() / FOLDER / f"{key}.json"
    if (kept := _read(path)) is not None:
        return kept
    found = inspect_model(recipe)
    # The key is computed again: the files may have been edited during the inspection.
    if not (found.problems or found.unchecked) and inspection_key(recipe) == key:
        with contextlib.suppress(OSError):  # a cache that cannot be written stops no training
            _keep(path, found)
    return found


def inspection_key(recipe: Recipe) -> str | None:
    """Return a digest of everything that an inspection depends on; None if that is not known completely.

    That is so for models of the hub, for RUN as a model, for a continued adapter, for a model's own code, and for modules that no
    installed version identifies: those of PYTHONPATH and of editable installations of the libraries.
    """
    model = recipe.model
    sources = [Path(each) for each in (model.name_or_path, model.from_config) if isinstance(each, str)]
    continues_adapter = recipe.lora is not None and recipe.lora.adapter is not None
    if model.trust_remote_code or continues_adapter or "PYTHONPATH" in os.environ or not all(map(_is_installed, LIBRARIES)):
        return None
    if any(not each.exists() or run_of(each) is not None for each in sources):
        return None
    try:
        files = [_state(each) for each in sources]
    except OSError:  # a link without a target
        return None
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    for name in _UNSEEN:
        data.pop(name)
    variables = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(VARIABLES) and "TOKEN" not in name)
    parts = [json.dumps(data, sort_keys=True), *inspection.INSPECT, platform.node(), *variables, *files, *installed_code()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _is_installed(library: str) -> bool:
    """Return whether a library is in a directory of installed packages, where its version identifies its code, or not found at all."""
    spec = importlib.util.find_spec(library)
    return spec is None or (spec.origin is not None and bool({"site-packages", "dist-packages"} & set(Path(spec.origin).parts)))


def _state(source: Path) -> str:
    """Return path, size and times of change of a file, or of all files in a directory."""
    states = [(path, path.stat()) for path in (sorted(source.rglob("*")) if source.is_dir() else [source])]
    return "".join(f"{path.resolve()} {state.st_ino} {state.st_size} {state.st_mtime_ns} {state.st_ctime_ns}\n" for path, state in states)


def _read(path: Path) -> Inspection | None:
    """Return a kept inspection, or None if there is none or it is damaged."""
    try:
        kept: Any = json.loads(path.read_text(encoding="utf-8"))
        if kept["digest"] != _digest(kept["model"], kept["notices"]):
            return None
        return Inspection(kept["model"], notices=notices_from(kept["notices"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _keep(path: Path, found: Inspection) -> None:
    """Write an inspection, and remove the oldest beyond `KEPT_FILES`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    notices = [each.as_dict() for each in found.notices]
    write_json(path, {"digest": _digest(found.model, notices), "model": found.model, "notices": notices})
    oldest_first = sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
    for old in oldest_first[:-KEPT_FILES]:
        DISK.unlink(old)


def _digest(model: dict[str, Any], notices: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps([model, notices]).encode()).hexdigest()
