"""The numeric parts of `gpu.py`: bf16 beside fp32, recomputation with dropout, packed examples in each attention kernel.

The models are those of `tests/gpu`, which asks the same of the whole command and judges; here the figures are kept.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tests.gpu.models import DRY, IN_HALF_PRECISION, KERNELS, LLAMA, gpt2

if TYPE_CHECKING:
    from gpu_bench import Bench

Row = dict[str, Any]


def recipe_of(bench: Bench, model: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "output_dir": str(bench.run.folder / "unused"),
        "model": {"tokenizer": "builtin:arithmetic"} | model,
        "data": {
            "train": [{"path": "builtin:arithmetic"}],
            "max_length": 64,
            "packing": True,
            "loss_on": "all",
            "cache_dir": str(bench.run.folder),
        },
        "precision": {"mixed_precision": "no"},
        "training": {"max_steps": 4, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no", "report_to": []},
        "checkpoint": {"probe": False},
        "merge": {"at_end": False},
        "launch": {"device": bench.run.device, "num_processes": 1},
    }
    return bench.changed(tree, sections)


def curve_rows(bench: Bench) -> Iterator[Row]:
    steps = 20 if bench.tiny else 200
    training = {"max_steps": steps, "per_device_train_batch_size": 16, "warmup_steps": 10, "learning_rate": 3e-4}
    true: list[float] = []
    for precision in ("no", "bf16"):
        model = {"from_config": gpt2(small=bench.tiny) | DRY}
        found = bench.run(recipe_of(bench, model, precision={"mixed_precision": precision}, training=training), draw=False, rows=512)
        name = {"no": "fp32", "bf16": "bf16"}[precision]
        if isinstance(found, str):
            yield {"name": name, "reason": found}
            return
        losses = [line["loss"] for line in found.lines]
        row = {
            "name": name,
            "parameters": found.readback["parameters"],
            "steps": len(losses),
            "first_loss": losses[0],
            "last_loss": losses[-1],
        }
        if true:
            off = [b / a - 1.0 for a, b in zip(true, losses, strict=True)]
            row |= {"scatter": math.sqrt(sum(x * x for x in off) / len(off)), "drift": sum(off) / len(off)}
        true = true or losses
        yield row


def dropout_rows(bench: Bench) -> Iterator[Row]:
    training = {"per_device_train_batch_size": 4, "full_determinism": True}
    true: list[dict[str, Any]] = []
    for kind in ("none", "full", "selective"):
        tree = recipe_of(bench, {"from_config": gpt2(small=bench.tiny) | {"n_layer": 2}}, training=training)
        found = bench.run(bench.changed(tree, {"fsdp": {"activation_checkpointing": kind}}), draw=False)
        if isinstance(found, str):
            yield {"name": f"recomputed {kind}", "reason": found}
        elif not true:
            true = found.lines
        else:
            pairs = list(zip(true, found.lines, strict=True))
            loss, norm = (max(abs(b[key] / a[key] - 1.0) for a, b in pairs) for key in ("loss", "grad_norm"))
            yield {"name": f"recomputed {kind}", "loss_deviation": loss, "norm_deviation": norm}


def isolation_rows(bench: Bench) -> Iterator[Row]:
    for kernel in KERNELS:
        precision = "bf16" if kernel in IN_HALF_PRECISION else "no"
        row: Row = {"name": kernel, "precision": {"no": "fp32", "bf16": "bf16"}[precision]}
        if kernel == "flex_attention" and bench.run.device == "cpu":
            yield {**row, "reason": "not available: torch has no backward pass of it on the CPU"}
            continue
        if kernel in IN_HALF_PRECISION and bench.run.device == "cpu":
            yield {**row, "reason": "not available: it needs CUDA"}
            continue
        if kernel == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
            yield {**row, "reason": "not available: flash-attn is not installed"}
            continue
        model = {"from_config": LLAMA, "attn_implementation": kernel}
        found = bench.run(recipe_of(bench, model, precision={"mixed_precision": precision}), draw=False, examples=3)
        if isinstance(found, str):
            yield {**row, "reason": found}
        elif found.readback["attention"] != kernel:
            yield {**row, "reason": f"it ran {found.readback['attention']}"}
        else:
            yield {**row, "packing_deviation": found.readback["packing_deviation"], **found.figures()}
