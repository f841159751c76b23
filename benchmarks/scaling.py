"""The table of the tutorials: samples a second, memory and communication on 1, 2, 4 and 8 ranks, for each strategy.

    python benchmarks/scaling.py [--strategies NO_SHARD …] [--ranks 1 2 4 8] [--results FILE] [--write]

Measured: `fsdp-tune train` on CPU ranks (gloo) with a Llama of 25 million parameters, one thread a rank. Beside it: what `plan` predicts
for Llama-2 7B on as many A100-80GB. `--results` keeps what was measured, so that a later call adds to it;
`--write` writes docs/evidence/scaling.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.planner.hardware.gpus import find_hardware
from fsdp_tune.planner.predict.predict import Plan, plan
from fsdp_tune.planner.tracing import Tracing
from fsdp_tune.recipe.read.loader import load_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "scaling.md"
STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
RANKS = (1, 2, 4, 8)
STEPS, WARMUP_STEPS = 7, 3
MICRO_BATCH = 2
TOKENS = 128
SMALL = {
    "model": {
        "from_config": {
            "model_type": "llama",
            "vocab_size": 384,
            "hidden_size": 512,
            "intermediate_size": 1376,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "max_position_embeddings": 512,
        },
        "tokenizer": "builtin:arithmetic",
    },
    "data": {"train": [{"path": "builtin:arithmetic", "split": "train"}], "max_length": TOKENS, "packing": True, "shuffle": True},
    "precision": {"mixed_precision": "no"},
    "training": {"per_device_train_batch_size": MICRO_BATCH, "max_steps": STEPS, "save_strategy": "no", "logging_steps": 1},
    "launch": {"device": "cpu", "num_cpu_threads_per_process": 1},
    "merge": {"at_end": False},
}
LARGE, GPU = "llama7b_full_shard", "A100-80GB"

Measured = dict[str, Any]


def measure(strategy: str, ranks: int, folder: Path) -> Measured:
    """One run through the command line; medians over the steps after the first few."""
    recipe, run = folder / "scaling.json", RunDir(folder / f"{strategy}-{ranks}")
    recipe.write_text(json.dumps(SMALL), encoding="utf-8")
    keys = {"fsdp.sharding_strategy": strategy, "launch.num_processes": ranks, "output_dir": run.path, "data.cache_dir": folder / "cache"}
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", str(recipe), *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise SystemExit(f"{strategy} on {ranks} ranks: exit code {done.returncode}\n{done.stderr}")
    lines = [line for line in read_metrics(run) if "loss" in line][WARMUP_STEPS:]
    seconds = statistics.median(line["step_seconds"] for line in lines)
    talking = [line["exposed_communication_seconds"] for line in lines]
    return {
        "steps": len(lines),
        "samples_per_second": MICRO_BATCH * ranks / seconds,
        "peak_host_gib": max(line["peak_host_gib"] for line in lines),
        "communication": None if None in talking else statistics.median(talking) / seconds,
    }


def large_recipe(strategy: str, ranks: int, cache: str) -> Recipe:
    """As the catalogue has it, without accumulation, so that every size does the same work a GPU."""
    keys = (f"fsdp.sharding_strategy={strategy}", f"launch.num_processes={ranks}", "launch.device=cuda", f"data.cache_dir={cache}")
    loaded = load_recipe(LARGE, [*keys, "training.global_batch_size=null", "training.gradient_accumulation_steps=1"])
    return resolve(loaded.recipe, Machine(None, 0, 1, None), cwd=Path.cwd(), assume="cuda").recipe


def predict(cases: list[tuple[str, int]]) -> dict[tuple[str, int], tuple[Recipe, Plan]]:
    hardware = find_hardware(GPU)
    with tempfile.TemporaryDirectory() as folder, Tracing(Path(folder), offline=True) as tracing:
        recipes = [large_recipe(strategy, ranks, folder) for strategy, ranks in cases]
        found: dict[tuple[str, int], tuple[Recipe, Plan]] = {}
        for case, recipe, trace in zip(cases, recipes, tracing(recipes), strict=True):
            if isinstance(trace, FsdpTuneError):
                raise trace
            found[case] = recipe, plan(recipe, hardware, trace)
    return found


def table(measured: dict[str, Measured], predicted: dict[tuple[str, int], tuple[Recipe, Plan]]) -> list[str]:
    lines = [
        "| strategy | ranks | CPU: samples/s | GiB a rank | communication | A100: samples/s | GiB a GPU | communication | fits |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (strategy, ranks), (recipe, made) in predicted.items():
        mine = measured[f"{strategy} {ranks}"]
        share = "cannot be observed" if mine["communication"] is None else f"{mine['communication']:.0%}"
        cells = [strategy, str(ranks), f"{mine['samples_per_second']:.2f}", f"{mine['peak_host_gib']:.2f}", share]
        speed = made.tokens_per_second_per_device
        samples = "unknown" if speed is None else f"{speed * ranks / recipe.data.max_length:.2f}"
        exposed = "unknown" if made.step_seconds is None else f"{made.time['exposed_seconds'] / made.step_seconds:.1%}"
        lines.append(f"| {' | '.join([*cells, samples, f'{made.device_gib:.1f}', exposed, made.fits])} |")
    return lines


def page(rows: list[str], results: dict[str, Any]) -> str:
    """docs/evidence/scaling.md."""
    fewest = min(run["steps"] for run in results["runs"].values())
    return f"""# Scaling

Written by `python benchmarks/scaling.py --write`, at commit {results["commit"]}, with {results["versions"]}.

Left, measured: `fsdp-tune train` over gloo, a Llama of 25 million parameters in fp32, {MICRO_BATCH} rows of {TOKENS} tokens a rank,
one thread a rank, on a machine with {results["cores"]} cores: **with more ranks than cores the cores are oversubscribed**, and samples per
second do not show scaling. Medians of {fewest} steps or more. A rank's memory is its full process: Python, torch and
transformers are more than half a GiB of it, which hides what sharding saves at this size. Communication is the
share of a step that the computing thread spends in FSDP2's collectives and waits; on a CPU nothing overlaps, and with too few
cores it is mostly waiting for ranks that have not had their turn. DDP's waits are inside torch's reducer and cannot be observed.

Right, predicted: `{LARGE}` (rows of 4,096 tokens, 2 a GPU, everything recomputed, bf16) on one machine with as many
{GPU}. Samples are rows; GiB is reserved memory with CUDA's context and NCCL; communication is the share of a step that the compute
stream waits for others. Recipes that do not fit have figures too: the memory they would need, and their speed if they fitted.
[Plan accuracy](plan-accuracy.md) has the errors of such figures.

{chr(10).join(rows)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument("--results", type=Path, help="a JSON file to add to; what is in it is not measured again")
    parser.add_argument("--write", action="store_true", help="write docs/evidence/scaling.md")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    results: dict[str, Any] = {"runs": {}}
    if options.results and options.results.exists():
        results = json.loads(options.results.read_text(encoding="utf-8"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "accelerate"))
    results |= {"commit": commit, "versions": versions, "cores": len(os.sched_getaffinity(0))}
    cases = [(strategy, ranks) for strategy in options.strategies for ranks in options.ranks]
    with tempfile.TemporaryDirectory() as folder:
        for strategy, ranks in cases:
            name = f"{strategy} {ranks}"
            if name not in results["runs"]:
                results["runs"][name] = measure(strategy, ranks, Path(folder))
                print(name, results["runs"][name], file=sys.stderr, flush=True)
                if options.results:
                    options.results.write_text(json.dumps(results, indent=2), encoding="utf-8")
    rows = table(results["runs"], predict(cases))
    print("\n".join(rows))
    if options.write:
        PAGE.write_text(page(rows, results), encoding="utf-8")


if __name__ == "__main__":
    main()
