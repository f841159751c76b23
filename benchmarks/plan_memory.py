"""Peak memory: every published measurement that a recipe can express, predicted, against what was measured.

    python benchmarks/plan_memory.py memory_measurements.csv architectures.json [--cache DIR] [--exact] [--write]

A row is planned as the recipe that says the same. What is traced is this package's step, with the loss of the program that was
measured where that is known to differ (`programs`); where the program does something that a recipe cannot say (a fused loss,
compiled layers, an optimizer inside the backward), the row is left out and the reason is printed. No constant is fitted.
`PROGRAMS` holds what the columns do not say, looked up in the launchers of the sources in `LOOKED_UP`, whose figures are
printed apart.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_timing import PER_MACHINE, card, causal_lm, finish, source_of, summary
from programs import logits_kept, logits_kept_in_fp32, logits_shifted_in_fp32, trace_in_child

from fsdp_tune.bridge.tracing import trace_key
from fsdp_tune.plan.fits import CONTEXT_BYTES, NCCL_BYTES, fit, workspace_bytes
from fsdp_tune.plan.hardware import Hardware
from fsdp_tune.plan.memory import Memory, peak_memory
from fsdp_tune.plan.trace_format import Segments, Trace
from fsdp_tune.recipe.resolve import Machine, resolve
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.units import GIB

LOOKED_UP = ("pytorch/torchtitan", "foundation-model-stack/fms-acceleration")
PROGRAMS: dict[str, dict[str, Any]] = {
    "pytorch/torchtitan": {"reduce_dtype": "fp32", "optim": "adamw_torch_fused", "max_grad_norm": 1.0},
    "foundation-model-stack/fms-acceleration": {"reduce_dtype": "bf16", "optim": "adamw_torch", "max_grad_norm": 1.0},
}
_UNKNOWN_PROGRAM = {"reduce_dtype": "auto", "optim": "adamw_torch_fused", "max_grad_norm": 1.0}
# Without `PYTORCH_CUDA_ALLOC_CONF` until this commit's time; torchtitan's launcher sets expandable segments since October 2024.
_BEFORE_EXPANDABLE = ("#165", "@40f8fd0")


_LOSSES = {
    "Lightning-AI/litgpt": logits_kept,
    "foundation-model-stack/fms-acceleration": logits_shifted_in_fp32,
    "LambdaLabsML/distributed-training-guide": logits_shifted_in_fp32,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement and the recipe that expresses it."""

    id: str
    source: str
    metric: str
    measured_gib: float
    hardware: Hardware
    segments: Segments
    recipe: Recipe
    change: Callable[[], None] | None
    """What the program does otherwise in its step."""


def why_not(row: dict[str, str]) -> str | None:
    """What a recipe of this release cannot say, or what the row does not."""
    reasons = {
        "not full fine-tuning": row["method"] != "full",
        "DeepSpeed or Gemini": row["sharding"] == "ZERO3" or "DeepSpeed" in row["notes"],
        "compiled": row["compile"] == "yes",
        "a loss without logits in memory": row["fused_ce_or_liger"] == "yes",
        "checkpointing not stated": row["activation_checkpointing"] == "unknown",
        "optimizer inside the backward": "optimizer_in_bwd" in row["notes"],
        "activations on the host": "activations offloaded" in row["notes"],
        "length is a cap, the longest row unknown": "longest kept sample" in row["notes"] or "seq_len is the cap" in row["notes"],
        "the kind of figure is not stated": row["metric"] == "unspecified",
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def recipe_of(row: dict[str, str], config: dict[str, Any]) -> Recipe:
    """A resolved recipe: same shapes, same layout; rows as long as `seq_len`."""
    gpus, length = int(row["num_gpus"]), int(row["seq_len"])
    program = PROGRAMS.get(source_of(row), _UNKNOWN_PROGRAM)
    accumulation = re.search(r"grad_accum=(\d+)", row["notes"])
    pure = row["mixed_precision"] == "none"
    # FSDP1's offload moves flat parameters in a way that fake tensors refuse; FSDP2's stands for it.
    version = 1 if row["fsdp_version"] == "1" and row["cpu_offload"] != "params" else 2
    # FSDP1's usual policy and torchtitan's first one: the layers are units, and the root holds embedding and head.
    layers_only = row["fsdp_version"] == "1" or any(sign in row["source"] for sign in _BEFORE_EXPANDABLE)
    wrap = {"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": ["model.layers.*"]} if layers_only else {}
    reduce_dtype = ("bf16" if pure else "fp32") if program["reduce_dtype"] == "auto" else program["reduce_dtype"]
    data: dict[str, Any] = {
        "model": {
            "from_config": causal_lm(config, length),
            "tokenizer": "builtin:arithmetic",
            "dtype": row["dtype_params"],
            "attn_implementation": "eager" if row["attn"] == "eager" else "auto",
        },
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": length},
        "fsdp": {
            **wrap,
            "version": version,
            "cpu_ram_efficient_loading": version == 2,
            "sharding_strategy": "NO_SHARD" if row["sharding"] == "none" else row["sharding"],
            "activation_checkpointing": row["activation_checkpointing"],
            "offload_params": row["cpu_offload"] == "params",
        },
        "precision": {"mixed_precision": "no" if pure else row["mixed_precision"], "reduce_dtype": reduce_dtype},
        "training": {
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_accumulation_steps": int(accumulation[1]) if accumulation else 1,
            "optim": program["optim"],
            "max_grad_norm": program["max_grad_norm"],
        },
        "launch": {"num_processes": gpus, "num_machines": math.ceil(gpus / PER_MACHINE), "device": "cuda"},
    }
    return resolve(Recipe.model_validate(data), Machine("cuda", gpus, 8, None), cwd=Path.cwd(), assume="cuda").recipe


def read_rows(measurements: Path, architectures: Path) -> tuple[list[Row], dict[str, list[str]]]:
    configs: dict[str, dict[str, Any]] = json.loads(architectures.read_text(encoding="utf-8"))
    used: list[Row] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    with measurements.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            reason = why_not(row)
            hardware, config = card(row["gpu"]), configs.get(row["model"])
            if reason is not None or hardware is None or config is None:
                left_out[reason or "the card or the model's shape is not known"].append(row["id"])
                continue
            titan = source_of(row) == "pytorch/torchtitan" and not any(sign in row["source"] for sign in _BEFORE_EXPANDABLE)
            change = logits_kept_in_fp32 if any(sign in row["source"] for sign in _BEFORE_EXPANDABLE) else _LOSSES.get(source_of(row))
            segments: Segments = "expandable" if titan else "plain"
            measured = float(row["value_gib"])
            used.append(Row(row["id"], source_of(row), row["metric"], measured, hardware, segments, recipe_of(row, config), change))
    return used, left_out


def traced(rows: Sequence[Row], cache: Path, *, exact: bool) -> dict[str, Trace]:
    """Row → trace; kept in `cache` by recipe, change and code, since several metrics of one run share it."""
    cache.mkdir(parents=True, exist_ok=True)
    found: dict[str, Trace] = {}
    for row in rows:
        key = f"{trace_key(row.recipe, exact=exact, vocabulary=None)}-{row.change.__name__ if row.change else 'ours'}"
        result = trace_in_child(row.recipe, row.change, cache / f"{key}.npz", exact=exact)
        if isinstance(result, Trace):
            found[row.id] = result
        else:
            print(f"{row.id}: not traced: {result}")
    return found


def predicted_gib(row: Row, trace: Trace) -> tuple[float, Memory]:
    """In the row's own metric. A card that fills up gives cached memory back, so the replay knows its size."""
    outside = CONTEXT_BYTES + (NCCL_BYTES if trace.shapes.world_size > 1 else 0)
    capacity = row.hardware.usable_bytes - outside
    memory = peak_memory(trace, segments=row.segments, capacity_bytes=capacity, workspace_bytes=workspace_bytes(row.hardware))
    figures = {"peak_allocated": memory.peak_allocated_bytes, "peak_reserved": memory.peak_reserved_bytes}
    return figures.get(row.metric, memory.peak_reserved_bytes + outside) / GIB, memory


def report(rows: Sequence[Row], errors: dict[str, float]) -> dict[str, Any]:
    """Prints the errors by metric and source; returns what a plan quotes: all rows, since no constant was fitted on any.

    How a program differs (`programs`, units) was looked up knowing which rows were off, so its source is in-sample to that extent.
    """
    quoted: dict[str, Any] = {}
    for metric in ("peak_allocated", "peak_reserved", "nvidia_smi"):
        mine = [row for row in rows if row.metric == metric and row.id in errors]
        for source in sorted({row.source for row in mine}):
            _print(f"{metric} {source}", [errors[row.id] for row in mine if row.source == source])
        for title, kept in (("looked up", True), ("checked on", False)):
            _print(f"{metric} ALL {title}", [errors[row.id] for row in mine if (row.source in LOOKED_UP) == kept])
        _print(f"{metric} ALL", [errors[row.id] for row in mine])
        if metric != "nvidia_smi":
            quoted[f"{metric}_gib"] = summary(errors[row.id] for row in mine)
    return quoted


def _print(title: str, errors: list[float]) -> None:
    if errors:
        print(f"{title:66} {summary(errors)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("architectures", type=Path)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir(), "fsdp-tune-traces"))
    parser.add_argument("--exact", action="store_true", help="trace every decoder layer")
    parser.add_argument("--write", action="store_true", help="put the medians into fsdp_tune/plan/accuracy.json")
    options = parser.parse_args()
    rows, left_out = read_rows(options.measurements, options.architectures)
    traces = traced(rows, options.cache, exact=options.exact)
    errors: dict[str, float] = {}
    wrong: list[str] = []
    for row in rows:
        if row.id not in traces:
            continue
        value, memory = predicted_gib(row, traces[row.id])
        errors[row.id] = 100 * (value / row.measured_gib - 1)
        answer = fit(traces[row.id], row.hardware, segments=row.segments).answer
        if answer == "no":  # it ran
            wrong.append(row.id)
        shape = f"{row.recipe.world_size:4} × {row.hardware.name:10}"
        figures = f"{value:8.2f} {row.measured_gib:8.2f} {errors[row.id]:+7.1f} %"
        print(f"{row.id} {row.source:42} {shape} {row.metric:14} {figures}  {answer:5} {memory.where}")
    print(f"constants fitted: 0; rows that ran and are called `no`: {len(wrong)} {wrong}")
    quoted = report(rows, errors)
    finish(left_out, quoted, write=options.write)


if __name__ == "__main__":
    main()
