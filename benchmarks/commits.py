"""Two commits in turns: what the real commands cost, from one run of each after the other.

    git worktree add DIR COMMIT
    python benchmarks/commits.py --before DIR --after . [--rounds 5] [--steps 300]

Each round trains the embedded recipe on two CPU ranks, then merges it, validates it, and trains it with four
micro-batches a step, in both trees; the order of the trees changes from round to round. Both use this Python,
whose libraries must fit both. Printed are medians over the rounds with their ranges, and the median of the
ratios within a round. `command` is the CPU time of `fsdp-tune train` itself, without launcher and ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

QUIET = {
    "training.warmup_steps": 0,
    "training.eval_strategy": "no",
    "merge.at_end": "false",
    "training.logging_steps": 1,
}
FOUR_MICRO_BATCHES = {"training.per_device_train_batch_size": 16, "training.save_strategy": "no"}


class Tree:
    """A tree of the repository, and what its commands have cost."""

    def __init__(self, path: Path, place: Path, name: str) -> None:
        self.path, self.place, self.name = path.resolve(), place, name
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.path),
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(place / f"cache-{name}"),
        }

    def measure(self, number: int, steps: int) -> None:
        self._train("", self.place / f"{self.name}-{number}", steps, {"training.save_steps": steps // 3})
        self._timed("merge", "merge-checkpoint", str(self.place / f"{self.name}-{number}"))
        self._timed("validate", "validate", "--config", "gpt2_smoke")
        self._train(
            ", four micro-batches", self.place / f"{self.name}-{number}-four", steps // 3, FOUR_MICRO_BATCHES
        )

    def _train(self, suffix: str, run: Path, steps: int, changes: dict[str, object]) -> None:
        keys = QUIET | {"training.max_steps": steps, "output_dir": run} | changes
        words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        own, _ = self._run("train", "--config", "gpt2_smoke", *words)
        lines = [
            json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        times = [line["time"] for line in lines if "loss" in line and "event" not in line]
        first = next(line for line in lines if line.get("event") == "first_step")
        self.seconds[f"step{suffix}"].append(
            statistics.median(after - before for before, after in itertools.pairwise(times))
        )
        self.seconds[f"first step{suffix}"].append(sum(first["phase_seconds"].values()))
        self.seconds[f"command, CPU{suffix}"].append(own)

    def _timed(self, name: str, *arguments: str) -> None:
        _, cpu = self._run(*arguments)
        self.seconds[f"{name}, CPU"].append(cpu)

    def _run(self, *arguments: str) -> tuple[float, float]:
        """Return the CPU seconds of the command itself, and those of it and of its children."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-P", "-m", "fsdp_tune", *arguments]
        process = subprocess.Popen(
            command,
            cwd=self.place,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        seen = [0.0]
        threading.Thread(target=_watch, args=(process.pid, seen), daemon=True).start()
        output, _ = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{output}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return seen[0], after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _watch(pid: int, seen: list[float]) -> None:
    """Keep the CPU seconds of a process, without its children, until it ends."""
    ticks = os.sysconf("SC_CLK_TCK")
    while True:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            return
        seen[0] = (int(fields[11]) + int(fields[12])) / ticks
        time.sleep(0.1)


def row(name: str, before: Sequence[float], after: Sequence[float]) -> str:
    shown = [
        f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
        for values in (before, after)
    ]
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    return (
        f"| {name} | {shown[0]} | {shown[1]} | {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commits-") as place:
        trees = [
            Tree(path, Path(place), name)
            for name, path in (("before", options.before), ("after", options.after))
        ]
        for number in range(options.rounds):
            for tree in trees if number % 2 == 0 else trees[::-1]:
                tree.measure(number, options.steps)
    before, after = trees
    print("| seconds | before | after | ratio |\n| --- | ---: | ---: | ---: |")
    for name in before.seconds:
        print(row(name, before.seconds[name], after.seconds[name]))


if __name__ == "__main__":
    main()
