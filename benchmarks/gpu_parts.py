"""The parts of `gpu.py`: what each measures, and its rows. A part yields a row as soon as it has one.

A row has `name` and figures; `reason` says why there is none. On a CPU every model is a toy, and figures only show that a part can run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plan_gpu
from gpu_bench import Bench
from gpu_numbers import curve_rows, dropout_rows, isolation_rows
from gpu_runs import resolved
from step_inputs import LORA

Row = dict[str, Any]
STEP_BENCHMARK = Path(__file__).with_name("step.py")
GLOBAL_ROWS = 4
"""Sequences of an optimizer step of the large models."""
QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SMALL_QWEN3 = QWEN3_8B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 384,
}


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    what: str
    """One sentence for the report."""
    budget_seconds: float
    rows: Callable[[Bench], Iterator[Row]]
    columns: tuple[tuple[str, str, str], ...]
    """Key of a row, heading, format: see `gpu_report.cell`."""


# ---- Ceilings


def ceilings(bench: Bench) -> Iterator[Row]:
    found = bench.run.job("ceilings", size=512 if bench.tiny else 8192, copied=1 << (22 if bench.tiny else 30))
    if isinstance(found, str):
        yield {"name": "ceilings", "reason": found}
        return
    size = found["size"]
    yield {"name": f"product of {size} × {size} matrices, TFLOP/s", "value": found["product_tflops"]}
    yield {"name": "copy, GB/s read and written", "value": found["copy_gb_s"]}


# ---- The recipe that plan finds


def best_recipes(bench: Bench) -> Iterator[Row]:
    for name, config in (("Llama 8B", None), ("Qwen3 8B", SMALL_QWEN3 if bench.tiny else QWEN3_8B)):
        yield from best_recipe(bench, name, config)


def best_recipe(bench: Bench, name: str, config: dict[str, Any] | None) -> Iterator[Row]:
    """fp32 weights where plan finds a recipe that fits without offload, else bf16 ones."""
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.planner.search.alternatives import least_state_bytes
    from fsdp_tune.planner.search.search import rank_recipes

    for dtype in ("fp32", "bf16"):
        tree = bench.large(dtype, kernels={"loss": "auto"}, training={"gradient_accumulation_steps": GLOBAL_ROWS})
        if config is not None:
            tree["model"] = tree["model"] | {"from_config": config}
        tree["training"] |= {"max_steps": 8, "logging_steps": 2}
        base = resolved(tree, bench.run.folder / "base.json", bench.run.device, bench.run.device_name)
        (trace,) = bench.tracing([base])
        if isinstance(trace, FsdpTuneError):
            yield {"name": name, "reason": trace.problems[0].message}
            return
        if least_state_bytes(base, trace.counts) > bench.hardware.usable_bytes:
            continue  # nothing to search: not even parameters, gradients and moments have room
        ranking = rank_recipes(searching(bench), base, trace, "fastest")
        first = ranking.ranked[0]
        if first.plan.fits == "yes" and not first.recipe.fsdp.offload_params:
            yield of_the_best(bench, name, dtype, tree, ranking)
            return
    yield {"name": name, "reason": "plan finds no recipe that fits without offload"}


def of_the_best(bench: Bench, name: str, dtype: str, tree: dict[str, Any], ranking: Any) -> Row:
    first = ranking.ranked[0]
    for key, value in first.plan.recipe_changes.items():
        section, field = key.split(".")
        tree = bench.changed(tree, {section: {field: value}})
    micro, accumulation = first.recipe.training.per_device_train_batch_size, first.recipe.training.gradient_accumulation_steps
    fsdp, loss = first.recipe.fsdp, first.recipe.kernels.loss
    words = f"{fsdp.sharding_strategy}, {micro} × {accumulation} rows, recomputed {fsdp.activation_checkpointing}, loss {loss}"
    made = plan_gpu.of_plan(first.plan)
    found = plan_gpu.outcome(bench.run(tree))
    return {"name": name, "recipe": f"{dtype} weights, {words}", "because": ranking.because, **made, **found}


def searching(bench: Bench) -> Any:
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.planner.search.candidates import Search

    def traced(recipes: Any) -> Iterator[Any]:
        found = [bench.tracing.result(key) for key in bench.tracing.request(recipes)]
        return iter([None if isinstance(each, FsdpTuneError) else each for each in found])

    return Search(bench.hardware, traced)


# ---- Beside the loop by hand


def beside_bare(bench: Bench) -> Iterator[Row]:
    """`step.py`: both live on the device and run in turns."""
    import json
    import statistics

    result = bench.run.folder / "step.json"
    rounds, steps = ("2", "3") if bench.tiny else ("9", "10")
    size = f"gpu-tiny-{bench.run.device}" if bench.tiny else "gpu"
    command = [sys.executable, str(STEP_BENCHMARK), size, "--rounds", rounds, "--steps", steps, "--json", str(result)]
    from fsdp_tune.core.processes import ends_with_parent

    try:
        done = subprocess.run(ends_with_parent(command), capture_output=True, text=True, check=False, timeout=max(5.0, bench.run.left()))
    except subprocess.TimeoutExpired:
        yield {"name": "in turns", "reason": "not run: the time was up"}
        return
    if done.returncode != 0:
        yield {"name": "in turns", "reason": (done.stderr.strip().splitlines() or ["step.py said nothing"])[-1]}
        return
    found = json.loads(result.read_text(encoding="utf-8"))
    for name, one in found.items():
        seconds, bare = one["wall_seconds"], found["bare"]["wall_seconds"]
        ratios = [other / own for own, other in zip(seconds, bare, strict=True)]
        yield {
            "name": name,
            "step_seconds": statistics.median(seconds),
            "cpu_seconds": statistics.median(one["cpu_seconds"]),
            "tokens_per_second": one["tokens_per_step"] / statistics.median(seconds),
            "speed_over_bare": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }


# ---- Switches of the large model


def switches(bench: Bench) -> Iterator[Row]:
    """One row of 4,096 tokens a step, bf16 weights, everything recomputed: fits every card that holds the model."""
    base = bench.large("bf16")
    fp8 = {"mixed_precision": "fp8"}
    asked: list[tuple[str, dict[str, dict[str, Any]]]] = [
        ("whole logits", {}),
        ("the loop by hand", {}),
        ("loss in slices", {"kernels": {"loss": "chunked"}}),
        ("compiled", {"kernels": {"compile": True, "loss": "chunked"}}),
        ("fp8", {"precision": fp8, "kernels": {"loss": "chunked"}}),
        ("fp8, compiled", {"precision": fp8, "kernels": {"compile": True, "loss": "chunked"}}),
    ]
    speeds: dict[str, float] = {}
    for name, sections in asked:
        if name == "the loop by hand":
            row = {"name": name, **by_hand(bench, base)}
        else:
            tree = bench.changed(base, sections)
            row = {"name": name, **bench.planned(tree), **plan_gpu.outcome(bench.run(tree))}
        if row.get("tokens_per_second"):
            speeds[name] = row["tokens_per_second"]
            first = "whole logits" if name == "the loop by hand" else "loss in slices"
            row |= {"speed": speeds[name] / speeds[first]} if first in speeds else {}
        yield row


def by_hand(bench: Bench, tree: dict[str, Any], *, lora: dict[str, Any] | None = None) -> Row:
    """`step_ranks.bare` with the same model, rows, recomputation and dtypes; with `lora` on a base in bf16."""
    import json

    import numpy as np

    config, tokens = tree["model"]["from_config"], tree["data"]["max_length"]
    rows_file, vocabulary = bench.run.folder / "by-hand.jsonl", config["vocab_size"]
    draw = np.random.default_rng(0)
    lines = [json.dumps({"input_ids": draw.integers(0, vocabulary, tokens).tolist()}) for _ in range(8)]
    rows_file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    stored = "bfloat16" if lora or tree["model"]["dtype"] == "bf16" else "float32"
    task = {
        "model": config,
        "lora": lora,
        "world_size": 1,
        "dtype": stored,
        "compute_dtype": stored,
        "recompute": True,
        "batch": tree["training"]["per_device_train_batch_size"],
        "logging_steps": 1_000,
        "rows": str(rows_file),
        "rendezvous": str(bench.run.folder / f"by-hand-{bench.run.count}.meeting"),
        "steps": 2 if bench.tiny else 6,
        "warm_up_steps": 1 if bench.tiny else 3,
    }
    found = bench.run.job("bare", **task)
    if isinstance(found, str):
        return {"reason": found}
    return {**found, "tokens_per_second": task["batch"] * tokens / found["step_seconds"]}


# ---- Adapters


def adapters(bench: Bench) -> Iterator[Row]:
    """LoRA and QLoRA of the 8B Llama: a frozen base in bf16 or in 4 bits, adapters in fp32."""
    base = bench.changed(bench.large("fp32"), {"kernels": {"loss": "chunked"}})
    compiled, four_bits = {"kernels": {"compile": True}}, {"quantization": {"load": "nf4"}}
    for name, sections in (
        ("LoRA", {}),
        ("LoRA, compiled", compiled),
        ("QLoRA", four_bits),
        ("QLoRA, compiled", four_bits | compiled),
        ("LoRA, recomputed selective, compiled", {"fsdp": {"activation_checkpointing": "selective"}} | compiled),
        ("LoRA, nothing recomputed, compiled", {"fsdp": {"activation_checkpointing": "none"}} | compiled),
    ):
        tree = bench.with_lora(bench.changed(base, sections))
        yield {"name": name, **bench.planned(tree), **plan_gpu.outcome(bench.run(tree))}
    yield {"name": "LoRA, the loop by hand", **by_hand(bench, base, lora=LORA)}


# ---- Long packed rows


def long_rows(bench: Bench) -> Iterator[Row]:
    """One packed row of four examples a step by each attention kernel. The mask of 128k tokens comes last, since it may not fit."""
    lengths = (64,) if bench.tiny else (4096, 8192, 32768, 131072)
    for kernel in ("torch_varlen", "flash_attention_2", "sdpa"):
        for tokens in lengths:
            case = plan_gpu.Case("1B", tokens, 1, recomputation="full", loss="chunked")
            tree = bench.shrunk(case, steps=4)
            tree = bench.changed(tree, {"model": tree["model"] | {"attn_implementation": kernel}})
            found = plan_gpu.outcome(bench.run(tree, examples=4, rows=8))
            yield {"name": f"{kernel}, {tokens:,} tokens", **bench.planned(tree), **found}


# ---- plan against runs


def memory(bench: Bench) -> Iterator[Row]:
    cases = plan_gpu.SMALL if bench.tiny else plan_gpu.CASES
    yield from plan_gpu.rows(bench.run, bench.tracing, bench.hardware, cases)


# ---- Offload


def offload(bench: Bench) -> Iterator[Row]:
    case = plan_gpu.Case("1B", 8192, 2, recomputation="full", loss="chunked")
    for name, sections in (
        ("nothing offloaded", {}),
        ("inputs of layers on the host", {"fsdp": {"activation_checkpointing_offload": True}}),
        ("the same, compiled", {"fsdp": {"activation_checkpointing_offload": True}, "kernels": {"compile": True}}),
        ("parameters, gradients and optimizer on the host", {"fsdp": {"offload_params": True}}),
    ):
        tree = bench.changed(bench.shrunk(case, steps=6), sections)
        yield {"name": name, **bench.planned(tree), **plan_gpu.outcome(bench.run(tree))}


# ---- All of them

_MEMORY = (
    ("predicted_allocated_gib", "plan: allocated GiB", ".2f"),
    ("allocated_gib", "allocated GiB", ".2f"),
    ("error_allocated_gib", "off", "+.1%"),
    ("predicted_reserved_gib", "plan: reserved GiB", ".2f"),
    ("reserved_gib", "reserved GiB", ".2f"),
    ("error_reserved_gib", "off", "+.1%"),
)
_TIME = (
    ("predicted_step_seconds", "plan: s a step", ".3f"),
    ("step_seconds", "s a step", ".3f"),
    ("error_step_seconds", "off", "+.1%"),
    ("tokens_per_second", "tokens/s", ",.0f"),
    ("mfu", "MFU", ".1%"),
)
_NAME = (("name", "", ""),)

PARTS = (
    Part("ceilings", "What the device reaches at best.", 20, ceilings, (*_NAME, ("value", "", ",.1f"))),
    Part(
        "recipe",
        "8B models, rows of 4,096 tokens, four an optimizer step, by the fastest recipe that `plan` finds for this card.",
        150,
        best_recipes,
        (*_NAME, ("recipe", "recipe", ""), ("fits", "plan: fits", ""), *_TIME, ("predicted_mfu", "plan: MFU", ".1%"), *_MEMORY),
    ),
    Part(
        "bare",
        "Ours and the loop by hand in turns on one device, 0.95B parameters, 4,096 tokens, bf16 over fp32 weights, nothing recomputed.",
        90,
        beside_bare,
        (
            *_NAME,
            ("step_seconds", "s a step", ".4f"),
            ("cpu_seconds", "CPU s a step", ".4f"),
            ("tokens_per_second", "tokens/s", ",.0f"),
            ("speed_over_bare", "speed / bare", ".3f"),
            ("lowest", "lowest round", ".3f"),
            ("highest", "highest round", ".3f"),
        ),
    ),
    Part(
        "switches",
        "8B Llama, one row of 4,096 tokens a step, weights stored in bf16, every layer recomputed. The loop by hand is compared with "
        "whole logits, all others with the loss in slices.",
        170,
        switches,
        (
            *_NAME,
            *_TIME,
            ("speed", "speed, relative", ".3f"),
            ("compile_seconds", "compiling, s", ".0f"),
            ("graphs", "graphs", "d"),
            *_MEMORY,
        ),
    ),
    Part(
        "adapters",
        "LoRA adapters of rank 16 on all linear layers of the 8B Llama, one row of 4,096 tokens a step, loss in slices, every layer "
        "recomputed unless said. The loop by hand has whole logits.",
        150,
        adapters,
        (*_NAME, ("fits", "plan: fits", ""), *_TIME, ("compile_seconds", "compiling, s", ".0f"), *_MEMORY),
    ),
    Part(
        "long rows",
        "1B Llama, one packed row of four examples a step, every layer recomputed, loss in slices: sdpa with a mask, torch's "
        "variable-length attention, flash-attn.",
        150,
        long_rows,
        (*_NAME, ("fits", "plan: fits", ""), *_TIME, *_MEMORY),
    ),
    Part(
        "memory",
        "Runs of 0.1 to 8B parameters, 1k to 32k tokens, against their plans; bf16 over fp32 weights unless said.",
        170,
        memory,
        (*_NAME, ("fits", "plan: fits", ""), *_TIME, *_MEMORY),
    ),
    Part(
        "isolation",
        "How far the logits of a packed example move, relative to their norm, when every token of the example before it changes.",
        70,
        isolation_rows,
        (*_NAME, ("precision", "precision", ""), ("packing_deviation", "moves by", ".1e"), ("step_seconds", "s a step", ".4f")),
    ),
    Part(
        "dropout",
        "Loss and gradient norm of four steps with dropout, recomputed against not: largest relative difference.",
        50,
        dropout_rows,
        (*_NAME, ("loss_deviation", "loss", ".1e"), ("norm_deviation", "gradient norm", ".1e")),
    ),
    Part(
        "curve",
        "A GPT-2 of more than 100M parameters for 200 steps in bf16 against fp32, the same rows in the same order.",
        70,
        curve_rows,
        (
            *_NAME,
            ("parameters", "parameters", ",d"),
            ("steps", "steps", "d"),
            ("first_loss", "first loss", ".4f"),
            ("last_loss", "last loss", ".4f"),
            ("scatter", "root mean square of loss / fp32 − 1", ".1e"),
            ("drift", "its mean", "+.1e"),
        ),
    ),
    Part(
        "offload",
        "1B Llama, two rows of 8,192 tokens, recomputed, loss in slices: what offload saves and costs.",
        70,
        offload,
        (*_NAME, *_TIME, ("host_gib", "host GiB", ".1f"), *_MEMORY),
    ),
)
