"""Memory of long rows: with the mask of sdpa, without it, and shared over ranks; tables of docs/evidence/long-rows.md.

python benchmarks/long_rows.py               every table, in about six minutes
python benchmarks/long_rows.py shared-cpu    one of them (cpu, shared-cpu, plan or shared-plan)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plan_gpu
from gpu_report import table
from gpu_runs import Runner, warm_up

GIB = 2**30
CPU_LENGTHS = (2048, 4096, 8192)
CPU_LAYERS = 4
PLANNED = ((8192, "none"), (8192, "full"), (32768, "full"), (131072, "full"))
PLANNED_LAYERS = 32
KERNELS = ("sdpa", "torch_varlen")
SHARED_LENGTHS = (128, 4096, 8192, 16384)
SHARED_RANKS = 2
SHARED_PLANNED = ((131072, 1), (131072, 2), (131072, 4), (131072, 8), (524288, 8))


def mask_gib(tokens: int, copies: int, copy_bytes: int) -> float:
    """A bool mask for all layers, and a float copy for each layer that saves one."""
    return tokens**2 * (1 + copies * copy_bytes) / GIB


def on_cpu() -> Iterator[dict[str, Any]]:
    """Runs of the worker on one rank. A row of four examples gets a mask; a row of one example, as long, gets none."""
    warm_up()
    config = plan_gpu.MODELS["small"] | {"num_hidden_layers": CPU_LAYERS, "max_position_embeddings": max(CPU_LENGTHS)}
    with tempfile.TemporaryDirectory() as folder:
        run = Runner(Path(folder), "cpu", None, forks=True, left=lambda: 120.0)
        for tokens in CPU_LENGTHS:
            tree = plan_gpu.recipe_of(plan_gpu.Case("small", tokens, 1, loss="chunked"), "cpu", Path(folder), steps=2)
            tree["model"] |= {"from_config": config}
            tree["precision"] = {"mixed_precision": "no"}
            peaks: dict[int, float] = {}
            for examples in (1, 4):
                found = run(tree, draw=False, examples=examples, rows=2)
                if isinstance(found, str):
                    raise SystemExit(found)
                peaks[examples] = max(line["peak_host_gib"] for line in found.lines)
            masks = mask_gib(tokens, CPU_LAYERS, copy_bytes=4)
            yield {"name": f"{tokens:,}", "masks": masks, "without": peaks[1], "with": peaks[4], "difference": peaks[4] - peaks[1]}


def shared_on_cpu() -> Iterator[dict[str, Any]]:
    """Runs of the command line on two ranks: each with rows of its own, and both with halves of the same rows."""
    config = plan_gpu.MODELS["small"] | {"num_hidden_layers": CPU_LAYERS, "max_position_embeddings": max(SHARED_LENGTHS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first: dict[int, float] = {}
        for tokens in SHARED_LENGTHS:
            (folder / "rows.jsonl").write_text(
                "\n".join(json.dumps({"input_ids": [5 + at % 300 for at in range(tokens)]}) for _ in range(4))
            )
            peaks: dict[int, float] = {}
            for size in (1, SHARED_RANKS):
                tree = plan_gpu.recipe_of(plan_gpu.Case("small", tokens, 1, loss="chunked"), "cpu", folder, steps=2)
                tree["model"] |= {"from_config": config}
                tree["data"] |= {"train": [{"path": "rows.jsonl"}], "packing": False, "loss_on": "auto"}
                tree |= {"precision": {"mixed_precision": "no"}, "parallelism": {"sp_size": size}, "output_dir": f"{tokens}-{size}"}
                tree["launch"] |= {"num_processes": SHARED_RANKS}
                (folder / "recipe.yaml").write_text(json.dumps(tree))
                command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "recipe.yaml"]
                done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr)
                peaks[size] = peak_host_gib(folder / f"{tokens}-{size}")
            first = first or peaks
            rises = {size: peak - first[size] for size, peak in peaks.items()}
            yield {
                "name": f"{tokens:,}",
                "own": peaks[1],
                "shared": peaks[SHARED_RANKS],
                "own rise": rises[1],
                "shared rise": rises[SHARED_RANKS],
            }


def peak_host_gib(run: Path) -> float:
    return max(float(line["peak_host_gib"]) for line in map(json.loads, (run / "metrics.jsonl").open()) if "loss" in line)


def shared_planned() -> Iterator[dict[str, Any]]:
    for tokens, size in SHARED_PLANNED:
        keys = {"parallelism.sp_size": size, "training.global_batch_size": 8 // size}
        yield {"name": f"{tokens:,}", "size": size} | plan_of(tokens, "full", "torch_varlen", **keys)


def planned() -> Iterator[dict[str, Any]]:
    for tokens, recomputation in PLANNED:
        row: dict[str, Any] = {"name": f"{tokens:,}", "recomputed": recomputation}
        row["masks"] = mask_gib(tokens, 1 if recomputation == "full" else PLANNED_LAYERS, copy_bytes=2)
        for kernel in KERNELS:
            plan = plan_of(tokens, recomputation, kernel)
            row |= {f"{kernel} {key}": plan[key] for key in ("fits", "peak_allocated_gib", "tokens_per_second_per_device")}
        yield row


def plan_of(tokens: int, recomputation: str, kernel: str, **more: Any) -> dict[str, Any]:
    """Return the plan of the recipe; `more` are further keys of it, with their dots."""
    keys = {
        "data.max_length": tokens,
        "training.per_device_train_batch_size": 1,
        "fsdp.activation_checkpointing": recomputation,
        "model.attn_implementation": kernel,
    } | more
    settings = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    command = ["plan", "--config", "llama8b_lora_8x80gb", "--gpu", "H100-SXM", "--num-gpus", "8", "--no-search", "--json", *settings]
    done = subprocess.run([sys.executable, "-m", "fsdp_tune", *command], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found.get("plan", found)


CPU_COLUMNS = (
    ("name", "tokens of a row", ""),
    ("masks", "mask and copies, GiB", ".2f"),
    ("without", "peak RSS without a mask, GiB", ".2f"),
    ("with", "with the mask, GiB", ".2f"),
    ("difference", "difference, GiB", ".2f"),
)
PLAN_COLUMNS = (
    ("name", "tokens of a row", ""),
    ("recomputed", "recomputed", ""),
    ("masks", "mask and copies, GiB", ".2f"),
    *(
        column
        for kernel in KERNELS
        for column in (
            (f"{kernel} peak_allocated_gib", f"`{kernel}`: allocated GiB", ".1f"),
            (f"{kernel} fits", "fits 80 GB", ""),
            (f"{kernel} tokens_per_second_per_device", "tokens/s/GPU", ",.0f"),
        )
    ),
)


SHARED_CPU_COLUMNS = (
    ("name", "tokens of a row", ""),
    ("own", "`sp_size: 1`: peak RSS of a rank, GiB", ".2f"),
    ("shared", "`sp_size: 2`, GiB", ".2f"),
    ("own rise", "above the first row of this table: `sp_size: 1`", ".2f"),
    ("shared rise", "`sp_size: 2`", ".2f"),
)
SHARED_PLAN_COLUMNS = (
    ("name", "tokens of a row", ""),
    ("size", "`sp_size`", ""),
    ("peak_allocated_gib", "allocated GiB", ".1f"),
    ("peak_reserved_gib", "reserved GiB", ".1f"),
    ("fits", "fits 80 GB", ""),
    ("step_seconds", "seconds a step", ",.1f"),
    ("tokens_per_second_per_device", "tokens/s/GPU", ",.0f"),
)
TABLES = {
    "cpu": (on_cpu, CPU_COLUMNS),
    "shared-cpu": (shared_on_cpu, SHARED_CPU_COLUMNS),
    "plan": (planned, PLAN_COLUMNS),
    "shared-plan": (shared_planned, SHARED_PLAN_COLUMNS),
}


def main(chosen: list[str]) -> None:
    for name, (rows, columns) in TABLES.items():
        if not chosen or name in chosen:
            print("\n".join(table(list(rows()), columns)), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
