"""Cache of plans: replaying the step of a hundred layers takes longer than reading a stored plan."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.planner.predict.efficiency import Efficiency
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.schema import Recipe

_OWN = Path(__file__).parent
_UNSEEN = ("name", "output_dir")


def plan_key(recipe: Recipe, hardware: Hardware, efficiency: Efficiency | None, trace: str) -> str:
    """Return a digest of everything that a plan depends on. `trace` is the key of the trace, which includes its sources."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    for name in _UNSEEN:
        data.pop(name)
    parts = [json.dumps(data, sort_keys=True), repr(hardware), repr(efficiency), trace, state_of(_OWN)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def state_of(folder: Path) -> str:
    """Return sizes and modification times of the files in a directory of the package, so that a change invalidates cached plans."""
    states = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    return "".join(f"{path.name} {state.st_size} {state.st_mtime_ns}\n" for path, state in states)


def kept_plan(cache: Path, key: str, recipe: Recipe) -> Plan | None:
    """Return the cached plan of a key, without its timeline; None if there is none, or if the file is not readable as a plan."""
    try:
        found: Any = json.loads((cache / f"{key}.json").read_text(encoding="utf-8"))
        return replace(Plan(**found), recipe=recipe.name or "recipe")
    except (OSError, ValueError, TypeError):
        return None


def keep_plan(cache: Path, key: str, plan: Plan) -> None:
    """Store a plan without alternatives, other trainings and scaling, which depend on the search."""
    known = {field.name for field in fields(Plan)} - {"memory", "alternatives", "other_trainings", "scaling"}
    cache.mkdir(parents=True, exist_ok=True)
    write_json(cache / f"{key}.json", {name: getattr(plan, name) for name in sorted(known)})
