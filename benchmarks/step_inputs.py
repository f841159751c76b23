"""What the contenders of `step.py` are given: sizes, rows, a tokenizer, and the recipe that says the same to
ours."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

LOGGING_STEPS = 10
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
"""As a section of the recipe and as PEFT's arguments."""
BITSANDBYTES = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
"""As arguments of BitsAndBytesConfig."""


@dataclass(frozen=True, slots=True)
class Size:
    model: dict[str, Any]
    batch: int
    max_length: int
    contenders: tuple[str, ...]
    packing: bool = False
    rows: int = 512
    """Made ones, all of `max_length` tokens; GSM8K has its own."""
    world_size: int = 2
    device: str = "cpu"
    precision: str = "no"
    """Of fp32 weights: `no` or `bf16`."""
    accumulation: int = 1
    """Micro-batches of a step; of ours alone."""

    @property
    def rows_per_step(self) -> int:
        return self.batch * self.world_size * self.accumulation


def _llama(hidden: int, layers: int, vocabulary: int, positions: int, head_dim: int = 32) -> dict[str, Any]:
    heads = hidden // head_dim
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    sizes = {
        "intermediate_size": hidden * 11 // 4,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }
    return {"model_type": "llama", **shape, **sizes, "tie_word_embeddings": False}


SIZES = {
    "overhead": Size(_llama(64, 16, 512, 128), 2, 64, ("ours", "bare", "hf", "trl")),
    "compute": Size(_llama(512, 8, 8192, 512), 1, 512, ("ours", "bare", "hf", "trl")),
    "accumulated": Size(
        _llama(512, 8, 8192, 512),
        1,
        128,
        ("ours", "ours-kept", "ours-grad-op", "ours-grad-op-kept"),
        accumulation=4,
    ),
    "gpu": Size(
        _llama(2048, 16, 32000, 4096, 128),
        1,
        4096,
        ("ours", "bare"),
        rows=64,
        world_size=1,
        device="cuda",
        precision="bf16",
    ),
    "gpu-tiny": Size(
        _llama(64, 2, 512, 128), 1, 64, ("ours", "bare"), world_size=1, device="cuda", precision="bf16"
    ),
    "gsm8k": Size(_llama(256, 4, 8192, 512), 2, 512, ("ours", "padding", "trl"), packing=True),
}


_KEPT = {"reshard_after_backward": False}
_GRAD_OP = {"sharding_strategy": "SHARD_GRAD_OP"}
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours-kept": _KEPT,
    "ours-grad-op": _GRAD_OP,
    "ours-grad-op-kept": _GRAD_OP | _KEPT,
}
"""Contenders that are ours, with their keys of `fsdp:`."""


def write_rows(size: Size, gsm8k: Path | None, folder: Path) -> float:
    """`rows.jsonl` with `input_ids`, and a tokenizer's directory beside it; returns the tokens of a row, cut
    at `max_length`."""
    vocabulary = size.model["vocab_size"]
    if gsm8k is None:
        write_tokenizer(
            folder / "tokenizer",
            Tokenizer(models.WordLevel({f"<{number}>": number for number in range(vocabulary)}, "<0>")),
        )
        draw = np.random.default_rng(0)
        rows = [[*draw.integers(3, vocabulary, size.max_length - 1).tolist(), 0] for _ in range(size.rows)]
    else:
        tokenizer, texts = learn_tokenizer(gsm8k, vocabulary)
        write_tokenizer(folder / "tokenizer", tokenizer)
        rows = [[*encoded.ids, 0] for encoded in tokenizer.encode_batch(texts)]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8"
    )
    return statistics.mean(min(len(row), size.max_length) for row in rows)


def write_base(size: Size, directory: Path) -> None:
    """Write the model that every contender draws, for ours, which adapts a model directory."""
    from step_ranks import new_model

    new_model({"model": size.model, "device": "cpu", "dtype": "float32"}).save_pretrained(directory)


def learn_tokenizer(gsm8k: Path, vocabulary: int) -> tuple[Tokenizer, list[str]]:
    """A byte-level BPE trained on the very file, and the file's texts: question and answer."""
    found = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").splitlines()]
    texts = [f"{row['question']}\n{row['answer']}" for row in found]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=["<0>"], initial_alphabet=alphabet)
    )
    return tokenizer, texts


def write_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    """A directory as transformers reads it; token 0 ends a text and pads."""
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<0>", "pad_token": "<0>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def recipe_of(
    size: Size, inputs: Path, output: Path, *, lora: bool, in_4_bits: bool = False
) -> dict[str, Any]:
    base = {"name_or_path": str(inputs / "base")} if lora else {"from_config": size.model}
    return {
        "model": {**base, "tokenizer": str(inputs / "tokenizer"), "attn_implementation": "sdpa"},
        **({"lora": LORA} if lora else {}),
        **({"quantization": {"load": "nf4"}} if in_4_bits else {}),
        "data": {
            "train": [{"path": str(inputs / "rows.jsonl")}],
            "format": "tokenized",
            "max_length": size.max_length,
            "overlong": "truncate",
            "packing": size.packing,
            "cache_dir": str(output.parent / "cache"),
        },
        "precision": {"mixed_precision": size.precision},
        "kernels": {"loss": "full"},
        "training": {
            "per_device_train_batch_size": size.batch,
            "gradient_accumulation_steps": size.accumulation,
            "max_steps": 1_000_000,
            "learning_rate": 1.0e-4,
            "weight_decay": 0.1,
            "logging_steps": LOGGING_STEPS,
            "save_strategy": "no",
            "report_to": [],
        },
        "checkpoint": {"probe": False},
        "launch": {"device": size.device, "num_processes": size.world_size, "num_cpu_threads_per_process": 1},
        "output_dir": str(output),
    }
