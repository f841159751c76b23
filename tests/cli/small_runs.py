"""Small recipes of runs that are started as users start them, their rows, and what the runs have logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 328,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STREAM: dict[str, Any] = {
    "model": {"from_config": MODEL, "tokenizer": "builtin:arithmetic"},
    "data": {
        "train": [{"path": "rows.jsonl"}],
        "streaming": True,
        "packing": True,
        "max_length": 128,
        "shuffle_buffer_size": 160,
    },
    "training": {
        "global_batch_size": 8,
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
    },
    "merge": {"at_end": False},
    "launch": {"device": "cpu", "num_processes": 2},
}
LORA: dict[str, Any] = {
    "model": {"name_or_path": "base", "tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "builtin:arithmetic", "max_rows": 64}], "max_length": 64},
    "lora": {"r": 4, "alpha": 8, "dropout": 0.1},
    "training": {"max_steps": 6, "save_steps": 3, "logging_steps": 1, "learning_rate": 3e-3, "report_to": []},
    "merge": {"dtype": "fp32"},
    "launch": {"device": "cpu", "num_processes": 2},
    "output_dir": "run",
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_stream(folder: Path, lines: list[str], **data: Any) -> None:
    """Write `rows.jsonl`, and `recipe.yaml`, which streams it unless `data` differs."""
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "recipe.yaml").write_text(json.dumps(STREAM | {"data": STREAM["data"] | data}))


def lines_of(count: int) -> list[str]:
    return [
        json.dumps({"text": f"{number} plus {number % 7} is {number + number % 7}. " * (1 + number % 3)})
        for number in range(count)
    ]


def make_base(folder: Path, seed: int = 0, hidden: int = 32) -> Path:
    """Save a Llama in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(**{**MODEL, "hidden_size": hidden}, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def training_lines(run: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(RunDir(run)) if "loss" in line]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in training_lines(run)]
