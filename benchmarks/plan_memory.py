"""Peak memory: every published measurement that a recipe can express, predicted, against what was measured.

A row is planned as the recipe that says the same. What is traced is this package's step with what the
measured program is known to do otherwise (`programs`): its loss, keys repeated before attention, fused
kernels. Where the program does something that neither can say (DeepSpeed, float8, an optimizer inside the
backward), the row is left out and the reason is printed. No constant is fitted. What the columns do not say
was looked up in the programs' code, mostly after a first pass had shown which sources were off.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_timing import PER_MACHINE, card, causal_lm, print_left_out, source_of, summary
from programs import (
    Change,
    compiled,
    fp32_kept,
    fp32_shifted,
    fused_layers,
    in_place,
    keys_expanded,
    no_wrapper,
    norm_weight_in_fp32,
    own_dtype_kept,
    trace_in_child,
)

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.memory import (
    CONTEXT_BYTES,
    NCCL_BYTES,
    Memory,
    cublas_workspace_bytes,
    fit,
    peak_memory,
)
from fsdp_tune.planner.trace_format import Segments, Trace
from fsdp_tune.planner.tracing import trace_key
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import MOST_NARROW_SUMS

PROGRAMS: dict[str, dict[str, Any]] = {
    "pytorch/torchtitan": {"reduce_dtype": "fp32", "optim": "adamw_torch_fused", "max_grad_norm": 1.0},
    "foundation-model-stack/fms-acceleration": {
        "reduce_dtype": "bf16",
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
    },
}
_UNKNOWN_PROGRAM = {"reduce_dtype": "auto", "optim": "adamw_torch_fused", "max_grad_norm": 1.0}
# Without `PYTORCH_CUDA_ALLOC_CONF` until this commit's time; torchtitan's launcher sets expandable segments
# since October 2024.
_BEFORE_EXPANDABLE = ("#165", "@40f8fd0")
# torchtitan compiles its loss since August 2025.
_LOSS_COMPILED = ("@d66b72a",)
_REPEAT_KEYS = ("pytorch/torchtitan", "Lightning-AI/litgpt", "pytorch/torchtune")
_SHIFT_LOGITS = ("foundation-model-stack/fms-acceleration", "LambdaLabsML/distributed-training-guide")


def changes_of(row: dict[str, str]) -> tuple[Change, ...]:
    """What the program of a row does otherwise than ours."""
    source, is_compiled = source_of(row), row["compile"] == "yes"
    changes: list[Change] = [no_wrapper] if row["num_gpus"] == "1" else []
    if source in _REPEAT_KEYS:
        changes.append(keys_expanded)
    if source == "Lightning-AI/litgpt":
        changes += [norm_weight_in_fp32, own_dtype_kept]
    elif any(sign in row["source"] for sign in _BEFORE_EXPANDABLE):
        changes.append(fp32_kept)
    elif any(sign in row["source"] for sign in _LOSS_COMPILED) and is_compiled:
        changes.append(compiled)
    elif "foak" in row["notes"] and "liger" not in row["notes"].split("framework_config=")[1].split(";")[0]:
        changes.append(in_place)
    elif source in _SHIFT_LOGITS:
        changes.append(fp32_shifted)
    if is_compiled or "foak" in row["notes"]:
        changes.append(fused_layers)
    return tuple(changes)


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
    changes: tuple[Change, ...]
    """What the program does otherwise in its step."""


METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


def why_not(row: dict[str, str], method: str) -> str | None:
    """What a recipe of this release cannot say, or what the row does not."""
    foak = "framework_config=foak-fast-kernels;" in row["notes"]
    reasons = {
        f"not {METHODS[method]}": row["method"] != method,
        "DeepSpeed or Gemini": row["sharding"] == "ZERO3" or "DeepSpeed" in row["notes"],
        "4 bits by another method": row["method"] == "qlora" and not row["dtype_params"].startswith("nf4"),
        "experts in 4 bits, which are stacked and in 16 bits here": row["method"] == "qlora"
        and "Mixtral" in row["model"],
        "float8": "float8" in row["mixed_precision"],
        "a compiler of its own": "graph_trainer" in row["notes"],
        "optimizer inside the backward": "optimizer_in_bwd" in row["notes"],
        "activations on the host": "activations offloaded" in row["notes"],
        "a loss in slices": row["fused_ce_or_liger"] == "yes" and not foak,
        "checkpointing or loss not stated": "unknown"
        in (row["activation_checkpointing"], row["fused_ce_or_liger"]),
        "length is a cap, the longest row unknown": "longest kept sample" in row["notes"]
        or "seq_len is the cap" in row["notes"],
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
    version = (
        1 if row["fsdp_version"] == "1" and row["cpu_offload"] != "params" and row["method"] == "full" else 2
    )
    # FSDP1's usual policy and torchtitan's first one: the layers are units, and the root holds embedding and
    # head.
    layers_only = row["fsdp_version"] == "1" or any(sign in row["source"] for sign in _BEFORE_EXPANDABLE)
    layers = "model.layers.*" if "hidden_size" in config else "transformer.h.*"
    wrap = {"auto_wrap_policy": "MODULE_NAMES_WRAP", "modules_to_wrap": [layers]} if layers_only else {}
    reduce_dtype = (
        ("bf16" if pure else "fp32") if program["reduce_dtype"] == "auto" else program["reduce_dtype"]
    )
    data: dict[str, Any] = {
        "model": {
            "from_config": causal_lm(config, length),
            "tokenizer": "builtin:arithmetic",
            "dtype": "bf16" if row["method"] == "qlora" else row["dtype_params"],
            "attn_implementation": "eager" if row["attn"] == "eager" else "auto",
        },
        "kernels": {"loss": "full"},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": length},
        "fsdp": {
            **wrap,
            "version": version,
            "cpu_ram_efficient_loading": version == 2,
            "sharding_strategy": "NO_SHARD" if row["sharding"] == "none" else row["sharding"],
            "activation_checkpointing": row["activation_checkpointing"],
            "offload_params": row["cpu_offload"] == "params",
        },
        "precision": {
            "mixed_precision": "no" if pure else row["mixed_precision"],
            "reduce_dtype": reduce_dtype,
        },
        "training": {
            "per_device_train_batch_size": int(row["micro_batch"]),
            # Two micro-batches are traced; a recipe may not add the gradients of more in bf16.
            "gradient_accumulation_steps": min(MOST_NARROW_SUMS, int(accumulation[1])) if accumulation else 1,
            "optim": program["optim"],
            "max_grad_norm": program["max_grad_norm"],
        },
        "launch": {"num_processes": gpus, "num_machines": math.ceil(gpus / PER_MACHINE), "device": "cuda"},
    }
    if row["method"] != "full":
        data["lora"] = lora_of(row)
    if row["method"] == "qlora":
        data["quantization"] = {"load": "nf4"}
    return resolve(
        Recipe.model_validate(data), Machine("cuda", gpus, 8, None), cwd=Path.cwd(), assume="cuda"
    ).recipe


def lora_of(row: dict[str, str]) -> dict[str, Any]:
    rank, targets = re.search(r"lora_r=(\d+)", row["notes"]), re.search(r"targets=([^;]+)", row["notes"])
    assert rank is not None, row["id"]
    assert targets is not None, row["id"]
    names = re.split(r"[ ,]+", targets[1].strip())
    if names == ["all-linear"]:
        return {"r": int(rank[1])}
    short = {"q": "q_proj", "v": "v_proj"}
    return {
        "r": int(rank[1]),
        "target_modules": [short.get(name, name) for name in names if name != "c_attn"],
    }


def read_rows(measurements: Path, architectures: Path, method: str) -> tuple[list[Row], dict[str, list[str]]]:
    configs: dict[str, dict[str, Any]] = json.loads(architectures.read_text(encoding="utf-8"))
    used: list[Row] = []
    left_out: dict[str, list[str]] = defaultdict(list)
    with measurements.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            reason = why_not(row, method)
            hardware, config = card(row["gpu"]), configs.get(row["model"])
            if reason is not None or hardware is None or config is None:
                left_out[reason or "the card or the model's shape is not known"].append(row["id"])
                continue
            titan = source_of(row) == "pytorch/torchtitan" and not any(
                sign in row["source"] for sign in _BEFORE_EXPANDABLE
            )
            segments: Segments = "expandable" if titan else "plain"
            measured = float(row["value_gib"])
            changes = changes_of(row)
            used.append(
                Row(
                    row["id"],
                    source_of(row),
                    row["metric"],
                    measured,
                    hardware,
                    segments,
                    recipe_of(row, config),
                    changes,
                )
            )
    return used, left_out


def traced(rows: Sequence[Row], cache: Path, *, exact: bool) -> dict[str, Trace]:
    """Row → trace; kept in `cache` by recipe, change and code, since several metrics of one run share it."""
    cache.mkdir(parents=True, exist_ok=True)
    found: dict[str, Trace] = {}
    for row in rows:
        program = "-".join(change.__name__ for change in row.changes) or "ours"
        file = cache / f"{trace_key(row.recipe, exact=exact, vocabulary=None)}-{program}.npz"
        result = trace_in_child(row.recipe, row.changes, file, exact=exact)
        if isinstance(result, Trace):
            found[row.id] = result
        else:
            print(f"{row.id}: not traced: {result}")
    return found


def predicted_gib(row: Row, trace: Trace) -> tuple[float, Memory]:
    """In the row's own metric. A card that fills up gives cached memory back, so the replay knows its
    size."""
    outside = CONTEXT_BYTES + (NCCL_BYTES if trace.shapes.topology.world_size > 1 else 0)
    capacity = row.hardware.usable_bytes - outside
    memory = peak_memory(
        trace,
        segments=row.segments,
        capacity_bytes=capacity,
        workspace_bytes=cublas_workspace_bytes(row.hardware),
    )
    figures = {"peak_allocated": memory.peak_allocated_bytes, "peak_reserved": memory.peak_reserved_bytes}
    return figures.get(row.metric, memory.peak_reserved_bytes + outside) / GIB, memory


def report(rows: Sequence[Row], errors: dict[str, float]) -> dict[str, Any]:
    """Prints the errors by metric and source; returns what a plan quotes: all rows, since no constant was
    fitted on any."""
    quoted: dict[str, Any] = {}
    for metric in ("peak_allocated", "peak_reserved", "nvidia_smi"):
        mine = [row for row in rows if row.metric == metric and row.id in errors]
        for source in sorted({row.source for row in mine}):
            _print(f"{metric} {source}", [errors[row.id] for row in mine if row.source == source])
        for title, kept in (("of fused kernels (stand-ins)", True), ("eager", False)):
            _print(
                f"{metric} ALL {title}",
                [errors[row.id] for row in mine if (fused_layers in row.changes) == kept],
            )
        _print(f"{metric} ALL", [errors[row.id] for row in mine])
        if metric != "nvidia_smi":
            quoted[f"{metric}_gib"] = summary(errors[row.id] for row in mine)
    return quoted


def _print(title: str, errors: list[float]) -> None:
    if errors:
        print(f"{title:66} {summary(errors)}  bias {statistics.median(errors):+.1f} %")


def bench(
    measurements: Path, architectures: Path, cache: Path, *, exact: bool = False, method: str = "full"
) -> dict[str, Any]:
    """Prints every row, and the errors by source; returns what a plan quotes, which is of full
    fine-tuning."""
    rows, left_out = read_rows(measurements, architectures, method)
    traces = traced(rows, cache, exact=exact)
    errors: dict[str, float] = {}
    refused: list[str] = []
    for row in rows:
        if row.id not in traces:
            continue
        value, memory = predicted_gib(row, traces[row.id])
        errors[row.id] = 100 * (value / row.measured_gib - 1)
        answer = fit(traces[row.id], row.hardware, segments=row.segments).answer
        if answer == "no":  # it ran
            refused.append(row.id)
        shape = f"{row.recipe.world_size:4} × {row.hardware.name:10}"
        figures = f"{value:8.2f} {row.measured_gib:8.2f} {errors[row.id]:+7.1f} %"
        print(f"{row.id} {row.source:42} {shape} {row.metric:14} {figures}  {answer:5} {memory.where}")
    print("constants fitted: 0")
    print(f"rows that ran and are called `no`: {len(refused)} of {len(errors)} {refused or ''}")
    print("rows that failed for want of memory and are called `yes`: 0 of 0 (none has been published)")
    quoted = report(rows, errors)
    print_left_out(left_out)
    return quoted
