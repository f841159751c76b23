"""Plans that were made before: replaying the step of a hundred layers takes longer than reading what came of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.atomic import write_json
from fsdp_tune.planner.hardware.efficiency import Efficiency
from fsdp_tune.planner.hardware.gpus import Hardware
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.recipe.schema import Recipe

_OWN = Path(__file__).parent
_UNSEEN = ("name", "output_dir")


def plan_key(recipe: Recipe, hardware: Hardware, efficiency: Efficiency | None, trace: str) -> str:
    """Names a plan by everything that it depends on. `trace` is the key of the trace, which names its sources."""
    data: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    for name in _UNSEEN:
        data.pop(name)
    parts = [json.dumps(data, sort_keys=True), repr(hardware), repr(efficiency), trace, state_of(_OWN)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def state_of(folder: Path) -> str:
    """The files under a folder of the package, by size and time of change: what was computed with others is computed anew."""
    states = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    return "".join(f"{path.name} {state.st_size} {state.st_mtime_ns}\n" for path, state in states)


def kept_plan(cache: Path, key: str, recipe: Recipe) -> Plan | None:
    """The plan of this key, without its timeline; None where there is none, or where the file is no plan any more."""
    try:
        found: Any = json.loads((cache / f"{key}.json").read_text(encoding="utf-8"))
        return replace(Plan(**found), recipe=recipe.name or "recipe")
    except (OSError, ValueError, TypeError):
        return None


def keep_plan(cache: Path, key: str, plan: Plan) -> None:
    """Alternatives and scaling are another search's, and not kept."""
    known = {field.name for field in fields(Plan)} - {"memory", "alternatives", "scaling"}
    cache.mkdir(parents=True, exist_ok=True)
    write_json(cache / f"{key}.json", {name: getattr(plan, name) for name in sorted(known)})
