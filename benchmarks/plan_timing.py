"""Step time: every published measurement that a recipe can express, predicted, against what was measured.

Sources are divided by a hash of their names (`is_held_out`). Constants may be fitted on one part only; the
figures that a plan quotes are those of the held-out part. Rows that are not used are printed with the reason.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.gpus import Hardware, find_hardware, flops_per_token
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.efficiency import FITTED, Efficiency, efficiency_of
from fsdp_tune.planner.predict.predict import model_size
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import MOST_NARROW_SUMS

CONSTANTS_FITTED_ON = ("mosaicml/llm-foundry", "foundation-model-stack/fms-acceleration")
"""The sources of today's constants. They were chosen before the division by hash, so neither can be held
out."""
PER_MACHINE = 8
TRITON_ATTENTION = (1 / 1.4, 1 / 2)
"""Forward and backward of the first FlashAttention in Triton relative to FlashAttention-2, "around 1.3-1.5×
faster […] in the forward pass and around 2× faster in the backward pass" (arXiv:2307.08691, section 4.1).
llm-foundry's tables were made with it: `--attn_impl` of scripts/train/benchmarking/submit_benchmarks.py is
`triton` by default, and sweep.sh leaves it."""
USES_TRITON = "mosaicml/llm-foundry"
H100_96GB_USABLE_GIB = 95.04
"""`total capacity` of torchtitan's runs."""
H100_96GB_GB_S = 2400
"""HBM2e: "Hardware" in torchtitan's benchmarks/llama3_h100_202412_torchtitan.md."""
H100_96GB_CLOCK = (500 / 700) ** (1 / 3)
"""Relative to an H100 of 700 W: the same document gives a power limit of 500 W, and power grows with the cube
of the clock, since the voltage follows it."""
# The program holds the bf16 weights that it trains beside fp32 ones, or says nothing: the recipe's default.
_STORED = {"fp32": "fp32", "bf16": "bf16", "unknown": "fp32", "bf16 + fp32 master": "fp32"}


@dataclass(frozen=True, slots=True)
class Row:
    """A measurement and the recipe that expresses it."""

    id: str
    source: str
    metric: str
    measured: float
    hardware: Hardware
    recipe: Recipe

    @property
    def part(self) -> str:
        return "held out" if is_held_out(self.source) else "fitted"

    @property
    def kind(self) -> str:
        return "compiled" if self.recipe.kernels.compile else "eager"


def is_held_out(source: str) -> bool:
    """Return whether constants must not be fitted on a source: an odd SHA-256 of its name, unless today's
    were."""
    is_odd = hashlib.sha256(source.encode()).digest()[-1] % 2 == 1
    return is_odd and source not in CONSTANTS_FITTED_ON


def source_of(row: dict[str, str]) -> str:
    return re.split(r"[:@#]", row["source"])[0]


def why_not(row: dict[str, str]) -> str | None:
    """Return the reason why no recipe of this release expresses a row."""
    reasons = {
        "not full fine-tuning": row["method"] != "full",
        "DeepSpeed or Gemini": row["sharding"] == "ZERO3" or "DeepSpeed" in row["notes"],
        "a compiler of its own": "graph_trainer" in row["notes"],
        "a fused loss or fused kernels": row["fused_ce_or_liger"] == "yes" and not is_loss_chunked(row),
        "recomputation is not stated": row["activation_checkpointing"] == "unknown",
        "fairscale": row["fsdp_version"] == "fairscale",
        "the profiler was on": "pytorch-distributed" in row["source"],
        "activations in host memory": "activations offloaded" in row["notes"],
        "the optimizer runs inside the backward": "fused into backward" in row["optimizer"],
        "offload: the host is not described": row["cpu_offload"] == "params",
        "the card is not in the table": card(row["gpu"]) is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def is_loss_chunked(row: dict[str, str]) -> bool:
    return "chunked cross-entropy" in row["notes"]


def card(name: str) -> Hardware | None:
    """Return the GPU of a row; None if it is not in the table."""
    if name.startswith(("H100-95GiB", "H100-96GB")):
        return replace(
            find_hardware("H100-SXM"), usable_gib=H100_96GB_USABLE_GIB, bandwidth_gb_s=H100_96GB_GB_S
        )
    for known in ("A100-40GB", "A100-80GB", "H200", "H100-SXM", "RTX3090", "RTX4090"):
        if name.startswith(known.removesuffix("-SXM")):
            return find_hardware(known)
    return None


def recipe_of(row: dict[str, str], config: dict[str, Any]) -> Recipe:
    """A resolved recipe: same shapes, same layout; rows as long as `seq_len`."""
    gpus, length = int(row["num_gpus"]), int(row["seq_len"])
    accumulation = re.search(r"grad_accum=(\d+)", row["notes"])
    steps = int(accumulation[1]) if accumulation else 1
    strategy = {"none": "FULL_SHARD", "unknown": "FULL_SHARD"}.get(row["sharding"], row["sharding"])
    data: dict[str, Any] = {
        "name": row["id"],
        "model": {
            "from_config": causal_lm(config, length),
            "tokenizer": "builtin:arithmetic",
            "dtype": _STORED[row["dtype_params"]],
        },
        "kernels": {
            "loss": "chunked" if is_loss_chunked(row) else "full",
            "compile": row["compile"] == "yes",
        },
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": length},
        "fsdp": {"sharding_strategy": strategy, "activation_checkpointing": row["activation_checkpointing"]},
        "precision": precision_of(row),
        "training": {
            "per_device_train_batch_size": int(row["micro_batch"]),
            "gradient_accumulation_steps": min(MOST_NARROW_SUMS, steps),
        },
        "launch": {"num_processes": gpus, "num_machines": math.ceil(gpus / PER_MACHINE), "device": "cuda"},
    }
    # A recipe may not add the gradients of more micro-batches in bf16, as some of these programs did: set
    # past its rules.
    found = resolve(
        Recipe.model_validate(data), Machine("cuda", gpus, 8, None), cwd=Path.cwd(), assume="cuda"
    ).recipe
    return found.model_copy(
        update={"training": found.training.model_copy(update={"gradient_accumulation_steps": steps})}
    )


def precision_of(row: dict[str, str]) -> dict[str, str]:
    """torchtitan scales whole tensors, and gathers them in fp8, unless it says `rowwise`."""
    mixed = row["mixed_precision"]
    reduced = "bf16" if "reduce in bf16" in row["notes"] or row["dtype_params"] == "bf16" else "fp32"
    if "float8" in mixed:
        return {
            "mixed_precision": "fp8",
            "fp8_recipe": "rowwise" if "rowwise" in mixed else "tensorwise",
            "reduce_dtype": reduced,
        }
    return {"mixed_precision": mixed if mixed in ("bf16", "fp16") else "no", "reduce_dtype": reduced}


def causal_lm(config: dict[str, Any], length: int) -> dict[str, Any]:
    """MPT's shapes as GPT-2 (no other family has its plain MLP, LayerNorm and tied embedding, with flash
    attention)."""
    if config["model_type"] != "mpt":
        longer = (
            {"max_position_embeddings": max(length, 4096)}
            if "hidden_size" in config
            else {"n_positions": max(length, 1024)}
        )
        # A window as long as the row never masks anything; with it set, transformers would make a mask all
        # the same.
        return {**config, **longer} | ({"sliding_window": None} if config["model_type"] == "mistral" else {})
    sizes = {
        "n_embd": config["d_model"],
        "n_layer": config["n_layers"],
        "n_head": config["n_heads"],
        "vocab_size": config["vocab_size"],
    }
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return {
        "model_type": "gpt2",
        **sizes,
        **no_dropout,
        "n_positions": length,
        "activation_function": "gelu",
        "tie_word_embeddings": True,
    }


def read_rows(measurements: Path, architectures: Path) -> tuple[list[Row], dict[str, list[str]]]:
    configs: dict[str, dict[str, Any]] = json.loads(architectures.read_text(encoding="utf-8"))
    used: list[Row] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    with measurements.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            reason = why_not(row)
            hardware, config = card(row["gpu"]), configs.get(row["model"])
            if reason is not None or hardware is None or config is None:
                left_out[reason or "the model's shape is not given"].append(row["id"])
                continue
            used.append(
                Row(
                    row["id"],
                    source_of(row),
                    row["metric"],
                    float(row["value"]),
                    hardware,
                    recipe_of(row, config),
                )
            )
    return used, left_out


def traced(rows: Sequence[Row], cache: Path) -> dict[str, Trace]:
    """Row → trace, from the cache or from a process that traces."""
    from fsdp_tune.planner.tracing import Tracing

    found: dict[str, Trace] = {}
    with Tracing(cache) as tracing:
        results = tracing([row.recipe.model_copy(update={"name": None}) for row in rows])
    for row, result in zip(rows, results, strict=True):
        if isinstance(result, Trace):
            found[row.id] = result
        else:
            print(f"{row.id}: not traced: {result}")
    return found


def predicted(row: Row, trace: Trace) -> float:
    """In the unit of the row's metric."""
    timed = step_time(trace, row.hardware, row.recipe.launch.num_machines, efficiency_for(row))
    shapes = trace.shapes
    tokens = shapes.micro_batch * shapes.accumulation * shapes.tokens
    speed = tokens / timed.step_seconds
    size = model_size(trace)
    flops = flops_per_token(size, shapes.tokens) if size is not None else math.nan
    return {
        "tokens_per_s_per_gpu": speed,
        "step_seconds": timed.step_seconds,
        "samples_per_s": speed * shapes.topology.world_size / shapes.tokens,
        "tflops_per_gpu": speed * flops / 1e12,
        "mfu": speed * flops / (row.hardware.peak_flops("bf16") or math.nan),
    }[row.metric]


def efficiency_for(row: Row) -> Efficiency:
    """Return the constants of a row's GPU and attention kernel."""
    found = efficiency_of(row.hardware)
    forward, backward = TRITON_ATTENTION if row.source == USES_TRITON else (1.0, 1.0)
    clock = H100_96GB_CLOCK if row.hardware.bandwidth_gb_s == H100_96GB_GB_S else 1.0
    return replace(
        found,
        matmul=found.matmul * clock,
        attention_forward=found.attention_forward * forward * clock,
        attention_backward=found.attention_backward * backward * clock,
    )


def error_percent(row: Row, value: float) -> float:
    """Of the time: positive when the prediction is too slow."""
    ratio = value / row.measured if row.metric == "step_seconds" else row.measured / value
    return 100 * (ratio - 1)


def summary(errors: Iterable[float]) -> dict[str, Any]:
    sizes = sorted(abs(error) for error in errors)
    if not sizes:
        return {"median_percent": None, "p90_percent": None, "rows": 0}
    p90 = sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))]
    return {
        "median_percent": round(statistics.median(sizes), 1),
        "p90_percent": round(p90, 1),
        "rows": len(sizes),
    }


def report(rows: Sequence[Row], errors: dict[str, float]) -> dict[str, Any]:
    """Print the errors by part, layout and source, and those of eager and compiled rows; return the figures
    that a plan quotes."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.id in errors:
            groups[row.part, layout(row), row.source].append(errors[row.id])
    quoted: dict[str, Any] = {}
    for where, key in (
        ("one machine", "step_seconds_on_one_machine"),
        ("over machines", "step_seconds_over_machines"),
    ):
        for part in ("fitted", "held out"):
            matching = {source: found for (p, w, source), found in groups.items() if (p, w) == (part, where)}
            for source, found in matching.items():
                print(f"  {part:10}{where:15}{source:44}{_described(found)}")
            total = [error for found in matching.values() for error in found]
            print(f"  {part:10}{where:15}{'ALL':44}{_described(total)}")
            if part == "held out":
                quoted[key] = summary(total)
    for part in ("fitted", "held out"):
        for kind in ("eager", "compiled"):
            found = [
                errors[row.id] for row in rows if (row.part, row.kind) == (part, kind) and row.id in errors
            ]
            print(f"  {part:10}{kind:15}{'ALL':44}{_described(found)}")
    return quoted


def layout(row: Row) -> str:
    return "over machines" if row.recipe.launch.num_machines > 1 else "one machine"


def _described(errors: Sequence[float]) -> str:
    return f"{summary(errors)}  bias {statistics.median(errors):+.1f} %" if errors else "no row"


def bench(measurements: Path, architectures: Path, cache: Path) -> dict[str, Any]:
    """Print every row, and the errors by part and source; return the figures that a plan quotes."""
    rows, left_out = read_rows(measurements, architectures)
    traces = traced(rows, cache)
    errors: dict[str, float] = {}
    for row in rows:
        if row.id not in traces:
            continue
        value = predicted(row, traces[row.id])
        errors[row.id] = error_percent(row, value)
        shape = f"{row.recipe.world_size:4} × {row.hardware.name:10}"
        figures = f"{value:12.4g} {row.measured:12.4g} {errors[row.id]:+7.1f} %"
        print(f"{row.id} {row.source:42} {row.part:8} {row.kind:8} {shape} {row.metric:22} {figures}")
    print(f"constants fitted: {len(FITTED)} ({', '.join(FITTED)}), on {', '.join(CONSTANTS_FITTED_ON)}")
    quoted = report(rows, errors)
    print_left_out(left_out)
    return quoted


def print_left_out(left_out: dict[str, list[str]]) -> None:
    """What was not used, and why."""
    print("not used:")
    for reason, ids in sorted(left_out.items(), key=lambda item: -len(item[1])):
        print(f"  {len(ids):3}  {reason}")
