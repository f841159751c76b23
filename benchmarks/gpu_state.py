"""day.json, the state of a GPU day, which travels from machine to machine: plans, and each row as it was
measured."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_machine import IS_EMULATED, commit, source, versions

STATE, REPORT = "day.json", "report.md"
PLANNED = "planned, not measured yet"
"""The reason of a row that has only its plan."""
_PLAN_KEYS = ("fits", "plan_failed", "recipe", "because", "changes")
_ANEW = "Start in another folder, without --from."
Part = dict[str, Any]


def read(output: Path, earlier: Path | None) -> dict[str, Any]:
    """Return the state of an earlier call (`--from`), else of the output folder, else of a new day.
    SystemExit without an earlier one."""
    file = (earlier or output) / STATE
    if earlier is not None and not file.exists():
        raise SystemExit(f"--from: {file} does not exist. Name the --output of an earlier call.")
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"calls": [], "parts": {}}


def plan_for(day: dict[str, Any], hardware: str) -> None:
    """Note what the plans of a day are for. SystemExit if it has plans for another GPU or of other code."""
    for name, here in (("planned_for", hardware), ("planned_by", source())):
        if (before := day.setdefault(name, here)) != here:
            raise SystemExit(f"the plans are those of {before}, and here is {here}. {_ANEW}")


def write(day: dict[str, Any], folder: Path) -> None:
    """Both files, each complete at any time."""
    import gpu_report
    from gpu_parts import PARTS

    from fsdp_tune.core.atomic import write_file, write_json

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STATE, day)
    write_file(folder / REPORT, gpu_report.markdown(day, PARTS))


def begin_call(
    day: dict[str, Any],
    facts: dict[str, Any],
    hardware: str,
    minutes: float,
    *,
    tiny: bool,
    start_seconds: float,
) -> None:
    """Add a call. SystemExit if the day has rows of another device or version, or plans for another GPU."""
    kind = {key: value for key, value in facts.items() if key in ("name", "capability", "cuda", "nccl")}
    setting = {
        "commit": commit(),
        "source": source(),
        "versions": versions(),
        "device": kind | {"emulated": IS_EMULATED},
        "tiny": tiny,
    }
    if (before := day.setdefault("setting", setting)) != setting:
        raise SystemExit(f"these are results of another day: {before}, and here is {setting}. {_ANEW}")
    plan_for(day, hardware)
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    day["calls"].append(
        {"began": now, "minutes": minutes, "start_seconds": start_seconds, "free_gib": facts["free_gib"]}
    )


def empty_part() -> Part:
    return {"rows": [], "seconds": 0.0, "ended": None, "is_complete": False}


def add_row(part: Part, row: dict[str, Any]) -> None:
    """Add a measured row, in the place of its plan."""
    part["rows"] = [each for each in part["rows"] if each["name"] != row["name"]] + [row]


def add_plan(part: Part, row: dict[str, Any]) -> None:
    """Add what a row has of a plan; a row that is measured keeps its figures."""
    earlier = next((each for each in part["rows"] if each["name"] == row["name"]), {"reason": PLANNED})
    add_row(part, earlier | {"name": row["name"]} | _plan_of(row))


def measured(part: Part) -> frozenset[str]:
    """Return the names of the rows that need not be measured again."""
    return frozenset(row["name"] for row in part["rows"] if row.get("reason") != PLANNED)


def plans(day: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: plan for row in day["parts"][part]["rows"] if (plan := _plan_of(row))}


def _plan_of(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key in _PLAN_KEYS or key.startswith("predicted_")}


def forget(day: dict[str, Any], names: Sequence[str]) -> None:
    """Forget the figures of parts, but not their plans."""
    for name in names:
        old = day["parts"].pop(name, empty_part())
        day["parts"][name] = empty_part()
        for row in old["rows"]:
            if _plan_of(row):
                add_plan(day["parts"][name], row)
