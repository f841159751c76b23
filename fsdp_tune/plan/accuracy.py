"""How wrong the figures of a plan were on published runs: what the benchmarks measured, kept beside the code that is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("accuracy.json")


def accuracy(machines: int) -> dict[str, Any]:
    """Figure → {median_percent, p90_percent, rows}, of sources that no constant was fitted on; time on one machine, or over several."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    time = table["step_seconds_over_machines" if machines > 1 else "step_seconds_on_one_machine"]
    return {name: table[name] for name in ("peak_allocated_gib", "peak_reserved_gib")} | {"step_seconds": time}
