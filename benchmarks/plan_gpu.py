"""`plan` against one GPU of our own: memory and step time of real runs of 0.1 to 8B parameters, predicted and measured.

    python benchmarks/plan_gpu.py [--gpu NAME] [--only WORD] [--steps 6]        rows for docs/measurements.md, as they come
    python benchmarks/plan_gpu.py --device cpu                                  the same played small: that it can run

Each row is a `train` with random weights and rows that are full; the recipe is planned by `plan --no-search` before it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIGURES = (("peak_allocated_gib", "GiB allocated"), ("peak_reserved_gib", "GiB reserved"), ("step_seconds", "s a step"))


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
    "0.1B": {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
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
    Case("0.1B", 1024, 8),
    Case("0.1B", 1024, 8, recomputation="full"),
    Case("0.5B", 1024, 8),
    Case("0.5B", 2048, 4, loss="chunked"),
    Case("1B", 1024, 4),
    Case("1B", 4096, 2, recomputation="full"),
    Case("1B", 4096, 2, recomputation="selective"),
    Case("1B", 4096, 2, recomputation="full", loss="chunked", accumulation=2),
    Case("1B", 16384, 1, recomputation="full", loss="chunked"),
    Case("1B", 32768, 1, recomputation="full", loss="chunked"),
    Case("3B", 2048, 2, recomputation="full"),
    Case("3B", 8192, 1, recomputation="full", loss="chunked"),
    Case("8B", 2048, 1, recomputation="full", loss="chunked", dtype="bf16"),
    Case("8B", 4096, 1, recomputation="full", dtype="bf16"),
)
SMALL = (Case("small", 64, 2), Case("small", 128, 1, recomputation="full", accumulation=2))


def recipe_of(case: Case, folder: Path, device: str, steps: int) -> Path:
    recipe: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "model": {"from_config": MODELS[case.model], "tokenizer": "builtin:arithmetic", "dtype": case.dtype},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": case.tokens, "packing": True, "loss_on": "all"},
        "fsdp": {"activation_checkpointing": case.recomputation},
        "precision": {"mixed_precision": "bf16" if case.dtype == "fp32" else "no"},
        "kernels": {"loss": case.loss},
        "training": {
            "per_device_train_batch_size": case.rows,
            "gradient_accumulation_steps": case.accumulation,
            "max_steps": steps,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
        },
        "checkpoint": {"probe": False},
        "merge": {"at_end": False},
        "launch": {"device": device, "num_processes": 1},
    }
    file = folder / "recipe.json"
    file.write_text(json.dumps(recipe), encoding="utf-8")
    return file


def called(*words: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "fsdp_tune", *words, "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measured(run: Path) -> dict[str, float | None]:
    """Peaks of the whole run; the median step without the first two, which warm up."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line]
    times = [line["step_seconds"] for line in steps][2:]
    peaks = {name: max((line[name] for line in steps if line.get(name) is not None), default=None) for name, _ in FIGURES[:2]}
    return peaks | {"step_seconds": statistics.median(times) if times else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="as `plan --gpu` takes it; default: this machine's")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    gpu = ["--gpu", options.gpu or "A100-80GB"] if options.gpu or options.device == "cpu" else []
    errors: dict[str, list[float]] = {name: [] for name, _ in FIGURES}
    print("| | fits | " + " | ".join(f"{unit}: predicted | measured | error" for _, unit in FIGURES) + " |")
    print("| --- | --- |" + " --- |" * 3 * len(FIGURES))
    for case in SMALL if options.device == "cpu" else CASES:
        if options.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            recipe = recipe_of(case, Path(folder), options.device, options.steps)
            plan = called("plan", "--config", str(recipe), "--num-gpus", "1", "--no-search", *gpu)
            called("train", "--config", str(recipe), *(["--ignore-plan"] if options.device == "cuda" else []))
            found = measured(Path(folder, "run"))
        cells = [case.name, plan["fits"]]
        for name, _ in FIGURES:
            value, real = plan[name], found[name]
            error = None if value is None or not real or options.device == "cpu" else 100 * (value / real - 1)
            errors[name] += [] if error is None else [error]
            cells += [
                f"{value:.3g}" if value is not None else "",
                f"{real:.3g}" if real else "",
                "" if error is None else f"{error:+.1f} %",
            ]
        print("| " + " | ".join(cells) + " |", flush=True)
    for name, found in errors.items():
        if found:
            print(f"{name}: median {statistics.median(map(abs, found)):.1f} %, worst {max(map(abs, found)):.1f} %, of {len(found)}")


if __name__ == "__main__":
    main()
