"""How long `plan` takes: the first answer after the imports, one from the cache, and the whole search.

    python benchmarks/plan_speed.py [--only answer|cached|search] [--recipe NAME] [--rounds 3]

Medians of the rounds, each in a process of its own with an empty cache (except for what is to be cached).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RECIPES: dict[str, tuple[str, str, int, tuple[str, ...]]] = {
    "7B, 8 GPUs": ("llama7b_full_shard", "A100-80GB", 8, ()),
    "70B offloaded, 8 GPUs": ("llama70b_full_shard_offload", "A100-80GB", 8, ()),
    "405B, 512 GPUs": (
        "llama70b_full_shard_offload",
        "H100-SXM",
        512,
        (
            "model.name_or_path=meta-llama/Llama-3.1-405B",
            "fsdp.offload_params=false",
            "training.global_batch_size=1024",
        ),
    ),
}
"""Recipe of the catalogue, GPU, how many, and what is set otherwise."""


def resolved(name: str, folder: str) -> tuple[Any, Any]:
    """The recipe and the hardware as `plan` has them."""
    from fsdp_tune.core.devices import Machine
    from fsdp_tune.core.gpus import find_hardware
    from fsdp_tune.recipe.read.loader import load_recipe
    from fsdp_tune.recipe.resolve import resolve

    source, gpu, number, changes = RECIPES[name]
    hardware = find_hardware(gpu)
    machines = -(-number // (hardware.devices_per_machine or 8))
    launch = (
        f"launch.num_processes={number}",
        f"launch.num_machines={machines}",
        "launch.device=cuda",
        f"data.cache_dir={folder}",
    )
    loaded = load_recipe(source, [*changes, *launch])
    return resolve(loaded.recipe, Machine(None, 0, 2, None), cwd=Path.cwd(), assume="cuda").recipe, hardware


def first_answer(name: str) -> dict[str, float]:
    """In a forked process, so that every round begins with the imports done and nothing else."""
    import fsdp_tune.planner.trace.trace_recipe  # noqa: F401  the import is not what is measured

    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(name, writer))
    child.start()
    answer: dict[str, float] = reader.recv()
    child.join()
    return answer


def _answer(name: str, writer: Any) -> None:
    from fsdp_tune.planner.predict.predict import plan
    from fsdp_tune.planner.trace.trace_recipe import trace_recipe

    with tempfile.TemporaryDirectory() as folder:
        recipe, hardware = resolved(name, folder)
        began = time.perf_counter()
        trace = trace_recipe(recipe)
        traced = time.perf_counter()
        plan(recipe, hardware, trace)
        ended = time.perf_counter()
    writer.send({"trace": traced - began, "replay and clocks": ended - traced, "first answer": ended - began})


CACHED = """
import json, sys, time
sys.path.insert(0, "benchmarks")
import plan_speed
import fsdp_tune.cli.app, fsdp_tune.jobs.train
recipe, hardware = plan_speed.resolved(sys.argv[1], sys.argv[2])
began = time.perf_counter()
from fsdp_tune.jobs.plan_session import PlanSession
with PlanSession(recipe, hardware) as plans:
    plans.plan_once()
print(json.dumps({"cached answer": time.perf_counter() - began}))
"""


def cached_answer(name: str, folder: str) -> dict[str, float]:
    """What a plan adds to a command that has started and knows its recipe."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CACHED, name, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def search(name: str, folder: str) -> dict[str, float]:
    """The whole command, as a user runs it: with an empty cache, and again."""
    source, gpu, number, changes = RECIPES[name]
    words = [word for key in (*changes, f"data.cache_dir={folder}") for word in ("--set", key)]
    command = [
        sys.executable,
        "-m",
        "fsdp_tune",
        "plan",
        "--config",
        source,
        "--gpu",
        gpu,
        "--num-gpus",
        str(number),
        *words,
        "--json",
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    seconds: dict[str, float] = {}
    for label in ("whole command, nothing cached", "whole command, again"):
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stdout}")
        seconds[label] = time.perf_counter() - began
    return seconds


def import_seconds() -> float:
    """Of what traces: torch, transformers, and this package's part, in a fresh interpreter."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "import fsdp_tune.planner.trace.trace_recipe"], capture_output=True, check=True
    )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("answer", "cached", "search"))
    parser.add_argument("--recipe", choices=tuple(RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.only in (None, "answer"):
        print(f"imports: {statistics.median(import_seconds() for _ in range(options.rounds)):.2f} s")
    for name in [options.recipe] if options.recipe else RECIPES:
        rounds: list[dict[str, float]] = []
        for _ in range(options.rounds):
            found: dict[str, float] = {}
            with tempfile.TemporaryDirectory() as folder:
                if options.only in (None, "answer"):
                    found |= first_answer(name)
                if options.only in (None, "search"):
                    found |= search(name, folder)
                if options.only in (None, "cached"):
                    cached_answer(name, folder)  # fills the cache where the search did not
                    found |= cached_answer(name, folder)
            rounds.append(found)
        for figure in rounds[0]:
            values = [each[figure] for each in rounds]
            print(
                f"{name:24} {figure:32} {statistics.median(values):6.2f} s   ({min(values):.2f} to "
                f"{max(values):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
