"""`plan` against one GPU of our own: memory and step time of real runs of 0.1 to 8B parameters, predicted and measured.

    python benchmarks/plan_gpu.py [--gpu NAME] [--only WORD] [--steps 6]        rows for docs/evidence/measurements.md, as they come
    python benchmarks/plan_gpu.py --device cpu                                  the same played small: that it can run

Each row is a run of the worker with random weights and rows that are full, planned before it. `gpu.py` runs these rows among others.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_runs import Runner, find_device, resolved, warm_up

if TYPE_CHECKING:
    from fsdp_tune.core.gpus import Hardware
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.planner.tracing import Tracing

FIGURES = (
    ("peak_allocated_gib", "allocated_gib", "GiB allocated"),
    ("peak_reserved_gib", "reserved_gib", "GiB reserved"),
    ("step_seconds", "step_seconds", "s a step"),
)
"""In a plan, of a run, and what it is."""


def llama(width: int, inner: int, layers: int, heads: int, shared: int, vocabulary: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {
        "model_type": "llama",
        **sizes,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": width < 4096,
    }


MODELS = {
    "0.1B": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_positions": 1024,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "0.5B": llama(1024, 4096, 24, 16, 4, 128256),
    "1B": llama(2048, 8192, 16, 32, 8, 128256),
    "3B": llama(3072, 8192, 28, 24, 8, 128256),
    "8B": llama(4096, 14336, 32, 32, 8, 128256),
    "small": llama(64, 128, 2, 4, 2, 384),
}


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    tokens: int
    rows: int
    recomputation: str = "none"
    loss: str = "full"
    dtype: str = "fp32"
    accumulation: int = 1

    @property
    def name(self) -> str:
        stored = "" if self.dtype == "fp32" else f", {self.dtype} weights"
        repeated = "" if self.accumulation == 1 else f" × {self.accumulation}"
        shape = f"{self.rows} × {self.tokens:,}{repeated}"
        return f"{self.model}, {shape}, recomputed {self.recomputation}, loss {self.loss}{stored}"


CASES = (
    Case("1B", 4096, 2, recomputation="full"),
    Case("1B", 4096, 2, recomputation="selective"),
    Case("1B", 4096, 2),
    Case("1B", 4096, 2, recomputation="full", loss="chunked"),
    Case("0.1B", 1024, 8),
    Case("0.1B", 1024, 8, recomputation="full"),
    Case("0.5B", 1024, 8),
    Case("0.5B", 2048, 4, loss="chunked"),
    Case("3B", 2048, 2, recomputation="full"),
    Case("8B", 4096, 1, recomputation="full", dtype="bf16"),
    Case("8B", 2048, 1, recomputation="full", loss="chunked", dtype="bf16"),
    Case("1B", 16384, 1, recomputation="full", loss="chunked"),
    Case("1B", 32768, 1, recomputation="full", loss="chunked"),
    Case("3B", 8192, 1, recomputation="full", loss="chunked"),
    Case("1B", 1024, 4),
    Case("1B", 4096, 2, recomputation="full", loss="chunked", accumulation=2),
)
"""The most telling ones first: time may be up before the last."""
SMALL = (
    Case("small", 64, 2),
    Case("small", 64, 2, recomputation="full", loss="chunked"),
    Case("small", 128, 1, recomputation="full", accumulation=2),
)


def recipe_of(case: Case, device: str, cache: Path, steps: int = 6) -> dict[str, Any]:
    return {
        "output_dir": str(cache / "unused"),
        "model": {"from_config": MODELS[case.model], "tokenizer": "builtin:arithmetic", "dtype": case.dtype},
        "data": {
            "train": [{"path": "builtin:arithmetic"}],
            "max_length": case.tokens,
            "packing": True,
            "loss_on": "all",
            "cache_dir": str(cache),
        },
        "fsdp": {"activation_checkpointing": case.recomputation},
        "precision": {"mixed_precision": "bf16" if case.dtype == "fp32" else "no"},
        "kernels": {"loss": case.loss},
        "training": {
            "per_device_train_batch_size": case.rows,
            "gradient_accumulation_steps": case.accumulation,
            "max_steps": steps,
            "logging_steps": max(1, steps // 3),
            "save_strategy": "no",
            "report_to": [],
        },
        "checkpoint": {"probe": False},
        "merge": {"at_end": False},
        "launch": {"device": device, "num_processes": 1},
    }


def rows(run: Runner, tracing: Tracing, hardware: Hardware, cases: Sequence[Case], steps: int = 6) -> Iterator[dict[str, Any]]:
    """One row a case. All are traced from the start on, beside the runs."""
    trees = [recipe_of(case, run.device, run.folder, steps) for case in cases]
    recipes = [resolved(tree, run.folder / "case.json", run.device, run.device_name) for tree in trees]
    keys = tracing.request(recipes)
    for case, tree, recipe, key in zip(cases, trees, recipes, keys, strict=True):
        found = run(tree)
        yield {"name": case.name, **predicted(recipe, hardware, tracing.result(key)), **outcome(found)}


def predicted(recipe: Any, hardware: Hardware, trace: Any) -> dict[str, Any]:
    """What `plan` says of a resolved recipe, under the names that `against` reads."""
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.planner.predict.predict import plan

    if isinstance(trace, FsdpTuneError):
        return {"fits": "unknown", "plan_failed": trace.problems[0].message}
    return of_plan(plan(recipe, hardware, trace))


def of_plan(made: Plan) -> dict[str, Any]:
    return {"fits": made.fits, "predicted_mfu": made.mfu, **{f"predicted_{real}": getattr(made, name) for name, real, _ in FIGURES}}


def outcome(found: Any) -> dict[str, Any]:
    return {"reason": found} if isinstance(found, str) else found.figures()


def error(row: dict[str, Any], figure: str) -> float | None:
    """(predicted / measured − 1), where both are there."""
    guess, real = row.get(f"predicted_{figure}"), row.get(figure)
    return None if guess is None or not real else guess / real - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="as `plan --gpu` takes it; default: this machine's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    from fsdp_tune.core.gpus import detect, find_hardware
    from fsdp_tune.planner.tracing import Tracing

    on_cpu = options.device == "cpu"
    warm_up()
    with tempfile.TemporaryDirectory(prefix="plan-gpu-") as place:
        folder = Path(place)
        facts, forks = ({"name": None}, True) if on_cpu else find_device(folder)
        hardware = find_hardware(options.gpu) if options.gpu else detect(facts["name"]) or find_hardware("A100-80GB")
        run = Runner(folder, options.device, facts["name"], forks, left=lambda: 3600.0)
        print(f"planned for {hardware.name}, run on {facts['name'] or 'the CPU'}")
        print("| | fits | " + " | ".join(f"{unit}: predicted | measured | error" for _, _, unit in FIGURES) + " |")
        print("| --- | --- |" + " --- |" * 3 * len(FIGURES))
        made: list[dict[str, Any]] = []
        with Tracing(folder / "traces") as tracing:
            for row in rows(run, tracing, hardware, [c for c in (SMALL if on_cpu else CASES) if options.only in c.name], options.steps):
                made.append(row)
                cells = [row["name"], row["fits"]]
                for _, real, _ in FIGURES:
                    off = None if on_cpu else error(row, real)
                    figures = (row.get(f"predicted_{real}"), row.get(real))
                    cells += [*("" if value is None else f"{value:.3g}" for value in figures), "" if off is None else f"{off:+.1%}"]
                print("| " + " | ".join(cells) + " |", row.get("reason", ""), flush=True)
    for _, real, unit in FIGURES:
        if not on_cpu and (found := [abs(off) for row in made if (off := error(row, real)) is not None]):
            print(f"{unit}: median {statistics.median(found):.1%}, worst {max(found):.1%}, of {len(found)}")


if __name__ == "__main__":
    main()
