"""Errors of plans on published runs, as measured by the benchmarks and stored next to the code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fsdp_tune.core.command import JsonAnswer

TABLE = Path(__file__).with_name("accuracy.json")


@dataclass(frozen=True, slots=True)
class FigureError(JsonAnswer):
    """Error of a figure on published runs."""

    median_percent: float | None
    p90_percent: float | None
    rows: int


def accuracy(machines: int) -> dict[str, FigureError]:
    """Return the error of each figure on sources without fitted constants; that of time for one machine or
    for several."""
    table = {name: FigureError(**row) for name, row in json.loads(TABLE.read_text(encoding="utf-8")).items()}
    time = table["step_seconds_over_machines" if machines > 1 else "step_seconds_on_one_machine"]
    return {name: table[name] for name in ("peak_allocated_gib", "peak_reserved_gib")} | {
        "step_seconds": time
    }
