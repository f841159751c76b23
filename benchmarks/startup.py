"""Time to the end of the first step, phase by phase, of the real command; beside it what importing the stack
alone costs.

    python benchmarks/startup.py [--rounds 3] [--ranks 1 2]

Each round trains the embedded recipe for one step, first with an empty data cache, then with a full one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

IMPORTS = "import torch, transformers, accelerate, transformers.trainer"
COMMAND, OTHERS = "command: validate, prepare, write", "others, below 0.05 s each"
SHOWN_SECONDS = 0.05


def first_step(folder: Path, name: str, ranks: int, environment: dict[str, str]) -> dict[str, float]:
    """Seconds of each phase; `COMMAND` is what came before `accelerate launch` was started."""
    keys = {
        "training.max_steps": 1,
        "training.warmup_steps": 0,
        "launch.num_processes": ranks,
        "output_dir": str(folder / name),
    }
    keys |= {
        "training.global_batch_size": 128,
        "training.eval_strategy": "no",
        "merge.at_end": "false",
        "checkpoint.probe": "false",
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    began = time.time()
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event.get("event") == "first_step":
            phases: dict[str, float] = event["phase_seconds"]
            return {COMMAND: event["time"] - began - sum(phases.values()), **phases}
    raise SystemExit("the run tells nothing of its first step")


def seconds_to_import(environment: dict[str, str]) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    seen: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    imports: list[float] = []
    with tempfile.TemporaryDirectory(prefix="startup-") as place:
        for number in range(options.rounds):
            for ranks in options.ranks:
                environment = {
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "XDG_CACHE_HOME": f"{place}/cache-{number}-{ranks}",
                }
                imports.append(seconds_to_import(environment))
                for cache in ("empty", "full"):
                    seen[ranks, cache].append(
                        first_step(Path(place), f"run-{number}-{ranks}-{cache}", ranks, environment)
                    )
    columns = list(seen)
    print(
        f"medians of {options.rounds} rounds, seconds; importing the stack alone: "
        f"{statistics.median(imports):.2f}\n"
    )
    print(
        "| | "
        + " | ".join(f"{ranks} rank{'s' * (ranks > 1)}, {cache} cache" for ranks, cache in columns)
        + " |"
    )
    print("|---|" + "---|" * len(columns))
    medians = {
        key: {name: statistics.median(one.get(name, 0.0) for one in found) for name in found[0]}
        for key, found in seen.items()
    }
    names = [
        name
        for name in medians[columns[0]]
        if any(medians[key].get(name, 0.0) >= SHOWN_SECONDS for key in columns)
    ]
    for name in names:
        print(f"| {name} | " + " | ".join(f"{medians[key].get(name, 0.0):.2f}" for key in columns) + " |")
    small = {
        key: sum(seconds for name, seconds in medians[key].items() if name not in names) for key in columns
    }
    print(f"| {OTHERS} | " + " | ".join(f"{small[key]:.2f}" for key in columns) + " |")
    totals = [statistics.median(sum(one.values()) for one in seen[key]) for key in columns]
    print("| **first step** | " + " | ".join(f"**{total:.2f}**" for total in totals) + " |")


if __name__ == "__main__":
    main()
