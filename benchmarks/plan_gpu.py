"""The runs of 0.1 to 8B parameters that a GPU day compares with their plans: models, cases, recipes, and what
`plan` predicts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_tune.core.gpus import Hardware
    from fsdp_tune.planner.predict.predict import Plan

FIGURES = (
    ("peak_allocated_gib", "allocated_gib"),
    ("peak_reserved_gib", "reserved_gib"),
    ("step_seconds", "step_seconds"),
)
"""Names in a plan and of a run."""


def llama(width: int, inner: int, layers: int, heads: int, shared: int, vocabulary: int) -> dict[str, Any]:
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
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
    Case("1B", 4096, 2, recomputation="full", loss="chunked"),
    Case("8B", 4096, 1, recomputation="full", dtype="bf16"),
    Case("0.1B", 1024, 8),
    Case("1B", 4096, 2),
    Case("3B", 2048, 2, recomputation="full"),
    Case("1B", 4096, 2, recomputation="selective"),
    Case("0.5B", 2048, 4, loss="chunked"),
    Case("8B", 2048, 1, recomputation="full", loss="chunked", dtype="bf16"),
)
"""The most telling ones first: time may be up before the last."""
SMALL = (
    Case("small", 64, 2),
    Case("small", 64, 2, recomputation="full", loss="chunked"),
    Case("small", 128, 1, recomputation="full", accumulation=2),
)


def recipe_of(case: Case, cache: Path, steps: int = 6) -> dict[str, Any]:
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
        "launch": {"device": "cuda", "num_processes": 1},
    }


def predicted(recipe: Any, hardware: Hardware, trace: Any) -> dict[str, Any]:
    """What `plan` predicts for a resolved recipe, under the names of a row."""
    from fsdp_tune.core.errors import FsdpTuneError
    from fsdp_tune.planner.predict.predict import plan

    if isinstance(trace, FsdpTuneError):
        return {"fits": "unknown", "plan_failed": trace.problems[0].message}
    return of_plan(plan(recipe, hardware, trace))


def of_plan(made: Plan) -> dict[str, Any]:
    return {
        "fits": made.fits,
        "predicted_mfu": made.mfu,
        **{f"predicted_{real}": getattr(made, name) for name, real in FIGURES},
    }
