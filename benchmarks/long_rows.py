"""Memory of packed rows with the mask of sdpa and without: on a CPU rank, and for H100s by `plan`; tables of docs/evidence/long-rows.md.

python benchmarks/long_rows.py            both tables, in about three minutes
python benchmarks/long_rows.py cpu        one of them (cpu or plan)
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


def planned() -> Iterator[dict[str, Any]]:
    for tokens, recomputation in PLANNED:
        row: dict[str, Any] = {"name": f"{tokens:,}", "recomputed": recomputation}
        row["masks"] = mask_gib(tokens, 1 if recomputation == "full" else PLANNED_LAYERS, copy_bytes=2)
        for kernel in KERNELS:
            plan = plan_of(tokens, recomputation, kernel)
            row |= {f"{kernel} {key}": plan[key] for key in ("fits", "peak_allocated_gib", "tokens_per_second_per_device")}
        yield row


def plan_of(tokens: int, recomputation: str, kernel: str) -> dict[str, Any]:
    keys = {
        "data.max_length": tokens,
        "training.per_device_train_batch_size": 1,
        "fsdp.activation_checkpointing": recomputation,
        "model.attn_implementation": kernel,
    }
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


def main(chosen: list[str]) -> None:
    for name, rows, columns in (("cpu", on_cpu, CPU_COLUMNS), ("plan", planned, PLAN_COLUMNS)):
        if not chosen or name in chosen:
            print("\n".join(table(list(rows()), columns)), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
