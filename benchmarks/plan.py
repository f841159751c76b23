"""`plan` against published measurements of others: peak memory and step time, row by row and by source.

    python benchmarks/plan.py DIRECTORY [--cache DIR] [--exact] [--write] [--only memory|time|lora|qlora]

DIRECTORY holds memory_measurements.csv, timing_measurements.csv and architectures.json. `--write` puts the
medians and 90th percentiles into fsdp_tune/planner/predict/accuracy.json, where plans quote them from.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import plan_memory
import plan_timing

from fsdp_tune.planner.predict.accuracy import TABLE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "fsdp-tune-traces"))
    parser.add_argument("--exact", action="store_true", help="memory: trace every decoder layer")
    parser.add_argument(
        "--write",
        action="store_true",
        help="put what plans quote into fsdp_tune/planner/predict/accuracy.json",
    )
    parser.add_argument("--only", choices=("memory", "time", "lora", "qlora"))
    options = parser.parse_args()
    architectures = options.directory / "architectures.json"
    quoted: dict[str, Any] = {}
    for method in ("lora", "qlora"):
        if options.only in (None, method):
            print(f"# Peak memory of {plan_memory.METHODS[method]}, GiB: predicted, measured, error, fits")
            measurements = options.directory / "memory_measurements.csv"
            plan_memory.bench(measurements, architectures, options.cache, exact=options.exact, method=method)
    if options.only in (None, "memory"):
        print("# Peak memory, GiB: predicted, measured, error, fits")
        quoted |= plan_memory.bench(
            options.directory / "memory_measurements.csv", architectures, options.cache, exact=options.exact
        )
    if options.only in (None, "time"):
        print("# Time: predicted, measured, error (of the time)")
        quoted |= plan_timing.bench(
            options.directory / "timing_measurements.csv", architectures, options.cache
        )
    for name, error in quoted.items():
        print(f"{name:34} {error}")
    if options.write:
        table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
        TABLE.write_text(json.dumps(table | quoted, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
