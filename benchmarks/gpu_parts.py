"""The parts of a GPU day, in order of worth: what each measures, and its rows. A part yields a row as soon as
it has one.

A row has `name` and figures; `reason` says why there is none. Rows that `Bench.done` names are left out. On
an emulated GPU every model is a toy, and figures only show that a part can run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_tests
import plan_gpu
from gpu_bench import Bench
from gpu_runs import TimeIsUp, resolved
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


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    what: str
    """One sentence for the report."""
    budget_seconds: float
    rows: Callable[[Bench], Iterator[Row]]
    columns: tuple[tuple[str, str, str], ...]
    """Key of a row, heading, format: see `gpu_report.cell`."""
    has_plans: bool = False
    """Its rows are compared with `plan`."""


def best_recipes(bench: Bench) -> Iterator[Row]:
    models = {"Llama 8B": None} | ({} if bench.tiny else {"Qwen3 8B": QWEN3_8B})
    for name, config in bench.remaining(models.items()):
        if "changes" not in (found := bench.plans.get(name) or best_recipe(bench, name, config)):
            yield found
            continue
        yield {
            **found,
            "name": name,
            **bench.run(bench.changed(of_model(bench, config), found["changes"])).row(),
        }


def of_model(bench: Bench, config: dict[str, Any] | None) -> dict[str, Any]:
    """The recipe that a search starts from."""
    tree = bench.large(
        "fp32", kernels={"loss": "auto"}, training={"gradient_accumulation_steps": GLOBAL_ROWS}
    )
    tree["training"] |= {"max_steps": 8, "logging_steps": 2}
    return tree if config is None else bench.changed(tree, {"model": {"from_config": config}})


def best_recipe(bench: Bench, name: str, config: dict[str, Any] | None) -> Row:
    """Return the plan and the keys (`changes`) of the fastest recipe: fp32 weights if one fits without
    offload, else bf16 ones."""
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.planner.search.alternatives import least_state_bytes
    from fsdp_tune.planner.search.search import rank_recipes

    for dtype, inside in (("fp32", "bf16"), ("bf16", "no")):
        changes: dict[str, dict[str, Any]] = {
            "model": {"dtype": dtype},
            "precision": {"mixed_precision": inside},
        }
        tree = bench.changed(of_model(bench, config), changes)
        base = resolved(tree, bench.run.folder / "base.json", bench.run.device_name)
        (trace,) = bench.tracing([base])
        if isinstance(trace, FsdpTuneError):
            return {"name": name, "reason": trace.problems[0].message}
        if least_state_bytes(base, trace.counts) > bench.hardware.usable_bytes:
            continue  # nothing to search: not even parameters, gradients and moments have room
        ranking = rank_recipes(searching(bench), base, trace, "fastest")
        first = ranking.ranked[0]
        if first.plan.fits == "yes" and not first.recipe.fsdp.offload_params:
            for key, value in first.plan.recipe_changes.items():
                section, field = key.split(".")
                changes.setdefault(section, {})[field] = value
            described = f"{dtype} weights, {words_of(first.recipe)}"
            return {
                "name": name,
                "changes": changes,
                "recipe": described,
                "because": ranking.because,
                **plan_gpu.of_plan(first.plan),
            }
    return {"name": name, "reason": "plan finds no recipe that fits without offload"}


def words_of(recipe: Any) -> str:
    micro, accumulation = (
        recipe.training.per_device_train_batch_size,
        recipe.training.gradient_accumulation_steps,
    )
    fsdp = recipe.fsdp
    rows = f"{micro} × {accumulation} rows"
    return (
        f"{fsdp.sharding_strategy}, {rows}, recomputed {fsdp.activation_checkpointing}, loss "
        f"{recipe.kernels.loss}"
    )


def searching(bench: Bench) -> Any:
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.planner.search.candidates import Search

    def traced(recipes: Any) -> Iterator[Any]:
        found = [bench.tracing.result(key) for key in bench.tracing.request(recipes)]
        return iter([None if isinstance(each, FsdpTuneError) else each for each in found])

    return Search(bench.hardware, traced)


def memory(bench: Bench) -> Iterator[Row]:
    cases = plan_gpu.SMALL if bench.tiny else plan_gpu.CASES
    for name, case in bench.remaining((case.name, case) for case in cases):
        yield bench.measure(name, plan_gpu.recipe_of(case, bench.run.folder))


def switches(bench: Bench) -> Iterator[Row]:
    """One row of 4,096 tokens a step, bf16 weights, everything recomputed: fits every GPU that holds the
    model."""
    base = bench.large("bf16", kernels={"liger": False, "loss": "full"})
    fp8, compiled, chunked = {"precision": {"mixed_precision": "fp8"}}, {"compile": True}, {"loss": "chunked"}
    sections: dict[str, dict[str, dict[str, Any]]] = {
        "loss in slices": {"kernels": chunked},
        "compiled": {"kernels": compiled | chunked},
        "fp8, compiled": fp8 | {"kernels": compiled | chunked},
        "Liger": {"kernels": {"liger": True, "loss": "liger"}},
        "whole logits": {},
        "fp8": fp8 | {"kernels": chunked},
        BY_HAND: {},
    }
    for name, keys in bench.remaining(sections.items()):
        yield (
            by_hand(bench, name, base) if name == BY_HAND else bench.measure(name, bench.changed(base, keys))
        )


BY_HAND = "the loop by hand"


def by_hand(bench: Bench, name: str, tree: dict[str, Any], *, lora: dict[str, Any] | None = None) -> Row:
    """`step_ranks.bare` with the same model, rows, recomputation and dtypes; with `lora` on a base in
    bf16."""
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
    rate = (
        {"tokens_per_second": task["batch"] * tokens / found["step_seconds"]}
        if "step_seconds" in found
        else {}
    )
    return {"name": name, **found, **rate}


def adapters(bench: Bench) -> Iterator[Row]:
    """LoRA and QLoRA of the 8B Llama: a frozen base in bf16 or in 4 bits, adapters in fp32."""
    base = bench.changed(bench.large("fp32"), {"kernels": {"loss": "chunked"}})
    compiled, four_bits = {"kernels": {"loss": "chunked", "compile": True}}, {"quantization": {"load": "nf4"}}
    sections: dict[str, dict[str, dict[str, Any]]] = {
        "LoRA": {},
        "QLoRA": four_bits,
        "LoRA, compiled": compiled,
        "QLoRA, compiled": four_bits | compiled,
        BY_HAND: {},
        "LoRA, recomputed selective, compiled": {"fsdp": {"activation_checkpointing": "selective"}}
        | compiled,
        "LoRA, nothing recomputed, compiled": {"fsdp": {"activation_checkpointing": "none"}} | compiled,
    }
    for name, keys in bench.remaining(sections.items()):
        if name == BY_HAND:
            yield by_hand(bench, name, base, lora=LORA)
        else:
            yield bench.measure(name, bench.with_lora(bench.changed(base, keys)))


def beside_bare(bench: Bench) -> Iterator[Row]:
    """`step.py`: both live on the device and run in turns."""
    import json
    import statistics

    from fsdp_tune.core.parent_death import ends_with_parent

    if "ours" in bench.done:
        return
    result = bench.run.folder / "step.json"
    rounds, steps, size = ("2", "3", "gpu-tiny") if bench.tiny else ("7", "8", "gpu")
    command = [
        sys.executable,
        str(STEP_BENCHMARK),
        size,
        "--rounds",
        rounds,
        "--steps",
        steps,
        "--json",
        str(result),
    ]
    try:
        done = subprocess.run(
            ends_with_parent(command), capture_output=True, text=True, check=False, timeout=bench.run.left()
        )
    except subprocess.TimeoutExpired:
        raise TimeIsUp("the time of the part was up before its rounds had ended") from None
    if done.returncode != 0:
        yield {
            "name": "ours",
            "reason": (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1],
            "message": done.stderr[-4000:],
        }
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


def long_rows(bench: Bench) -> Iterator[Row]:
    """One packed row of four examples a step by each attention kernel. The mask of 128k tokens comes last,
    since it may not fit."""
    lengths = (64,) if bench.tiny else (8192, 32768, 131072)
    cases = {
        f"{kernel}, {tokens:,} tokens": (kernel, tokens)
        for kernel in ("torch_varlen", "flash_attention_2", "sdpa")
        for tokens in lengths
    }
    for name, (kernel, tokens) in bench.remaining(cases.items()):
        tree = bench.shrunk(plan_gpu.Case("1B", tokens, 1, recomputation="full", loss="chunked"), steps=4)
        config = tree["model"]["from_config"] | {"max_position_embeddings": max(lengths)}
        tree = bench.changed(tree, {"model": {"from_config": config, "attn_implementation": kernel}})
        yield bench.measure(name, tree, examples=4, rows=8)


def offload(bench: Bench) -> Iterator[Row]:
    case = plan_gpu.Case("1B", 8192, 2, recomputation="full", loss="chunked")
    inputs = {"fsdp": {"activation_checkpointing_offload": True}}
    sections: dict[str, dict[str, dict[str, Any]]] = {
        "nothing offloaded": {},
        "inputs of layers on the host": inputs,
        "parameters, gradients and optimizer on the host": {"fsdp": {"offload_params": True}},
        "inputs of layers on the host, compiled": inputs | {"kernels": {"compile": True}},
    }
    base = bench.shrunk(case, steps=6)
    for name, keys in bench.remaining(sections.items()):
        yield bench.measure(name, bench.changed(base, keys))


def ceilings(bench: Bench) -> Iterator[Row]:
    if bench.done:
        return
    found = bench.run.job(
        "ceilings", size=512 if bench.tiny else 8192, copied=1 << (22 if bench.tiny else 30)
    )
    if "reason" in found:
        yield {"name": "ceilings", **found}
        return
    size = found["size"]
    yield {"name": f"product of {size} × {size} matrices, TFLOP/s", "value": found["product_tflops"]}
    yield {"name": "copy, GB/s read and written", "value": found["copy_gb_s"]}


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
    Part(
        "recipe",
        "8B models, rows of 4,096 tokens, four an optimizer step, by the fastest recipe that `plan` "
        "finds for this GPU.",
        90,
        best_recipes,
        (
            *_NAME,
            ("recipe", "recipe", ""),
            ("fits", "plan: fits", ""),
            *_TIME,
            ("predicted_mfu", "plan: MFU", ".1%"),
            *_MEMORY,
        ),
        has_plans=True,
    ),
    Part(
        "memory",
        "Runs of 0.1 to 8B parameters against their plans; bf16 over fp32 weights unless said.",
        90,
        memory,
        (*_NAME, ("fits", "plan: fits", ""), *_TIME, *_MEMORY),
        has_plans=True,
    ),
    Part(
        "switches",
        "8B Llama, one row of 4,096 tokens a step, weights stored in bf16, every layer recomputed. "
        "The loop by hand has whole logits.",
        90,
        switches,
        (*_NAME, *_TIME, ("compile_seconds", "compiling, s", ".0f"), ("graphs", "graphs", "d"), *_MEMORY),
        has_plans=True,
    ),
    Part(
        "adapters",
        "LoRA adapters of rank 16 on all linear layers of the 8B Llama, one row of 4,096 tokens a step, "
        "loss in slices, every layer recomputed unless said. The loop by hand has whole logits.",
        90,
        adapters,
        (*_NAME, ("fits", "plan: fits", ""), *_TIME, ("compile_seconds", "compiling, s", ".0f"), *_MEMORY),
        has_plans=True,
    ),
    Part(
        "bare",
        "Ours and the loop by hand in turns on one GPU, 0.95B parameters, 4,096 tokens, bf16 over "
        "fp32 weights, nothing recomputed.",
        60,
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
        "unexplained",
        "Tests that failed on an H100, and whose messages were lost.",
        75,
        gpu_tests.unexplained,
        gpu_tests.COLUMNS,
    ),
    Part(
        "long rows",
        "1B Llama, one packed row of four examples a step, every layer recomputed, loss in slices: torch's "
        "variable-length attention, flash-attn, and sdpa with a mask.",
        90,
        long_rows,
        (*_NAME, ("fits", "plan: fits", ""), *_TIME, *_MEMORY),
        has_plans=True,
    ),
    Part(
        "offload",
        "1B Llama, two rows of 8,192 tokens, recomputed, loss in slices: what offload saves and costs.",
        60,
        offload,
        (*_NAME, *_TIME, ("host_gib", "host GiB", ".1f"), *_MEMORY),
        has_plans=True,
    ),
    Part("ceilings", "What the device reaches at best.", 15, ceilings, (*_NAME, ("value", "", ",.1f"))),
    Part(
        "kernels",
        "Kernels and the device's own code give right numbers.",
        90,
        gpu_tests.kernels,
        gpu_tests.COLUMNS,
    ),
    Part(
        "parity",
        "Runs of one rank follow a plain loop on the CPU: strategies, packing, compilation, fp8, 4 "
        "bits, adapters, optimizers.",
        90,
        gpu_tests.parity,
        gpu_tests.COLUMNS,
    ),
)
"""A part that its time does not suffice for continues in the next call."""
