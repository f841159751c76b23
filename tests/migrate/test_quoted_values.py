"""A number or a boolean in quotes is one where the tool converts it, and a question where it stays text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.migrate.imports import from_text, questions, values

TRL = """\
model_name_or_path: m
dataset_name: d
learning_rate: "1e-4"
packing: "true"
per_device_train_batch_size: "4"
gradient_checkpointing: "false"
use_peft: "true"
lora_r: "8"
run_name: "false"
model_revision: "1.0"
dataset_config: "20220301"
"""
AXOLOTL = """\
base_model: m
datasets: [{path: a, type: alpaca}]
learning_rate: "1e-4"
sample_packing: "true"
micro_batch_size: "4"
num_epochs: "3"
saves_per_epoch: "2"
adapter: lora
lora_r: "8"
val_set_size: "0.1"
special_tokens: {pad_token: "0"}
"""
CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL": (
        TRL,
        {
            "training.learning_rate": 1e-4,
            "data.packing": True,
            "training.per_device_train_batch_size": 4,
            "lora.r": 8,
            "fsdp.activation_checkpointing": "none",
            "name": "false",
            "model.revision": "1.0",
        },
    ),
    "axolotl": (
        AXOLOTL,
        {
            "training.learning_rate": 1e-4,
            "data.packing": True,
            "training.per_device_train_batch_size": 4,
            "lora.r": 8,
            "training.num_train_epochs": 3,
            "training.save_steps": 0.166667,
            "model.tokens.pad": "0",
        },
    ),
}


@pytest.mark.parametrize("tool", CONVERTED)
def test_tool_that_converts_text_has_numbers(tool: str, tmp_path: Path) -> None:
    text, expected = CONVERTED[tool]
    result = from_text(tmp_path, text)
    assert result.tool == tool
    found = values(result)
    assert {key: found[key] for key in expected} == expected
    assert questions(result) == []


def test_tool_that_keeps_text_has_questions(tmp_path: Path) -> None:
    factory = (
        "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nlearning_rate: {0}\npure_bf16: "
        "{1}\nuse_dft_loss: {1}\nlora_rank: {2}\n"
    )
    numbers = ["learning_rate", "pure_bf16", "use_dft_loss", "lora_rank"]
    assert questions(from_text(tmp_path, factory.format('"1e-4"', '"false"', '"8"'))) == numbers
    assert questions(from_text(tmp_path, factory.format("1e-4", "false", "8"))) == []

    tune = (
        "checkpointer: {{checkpoint_dir: m}}\nmodel: {{_component_: "
        "torchtune.models.llama3.lora_llama3_8b, apply_lora_to_mlp: {}}}\n"
    )
    tune += "dataset: {{_component_: torchtune.datasets.alpaca_dataset, subset: '2024'}}\ncompile: {}\n"
    assert questions(from_text(tmp_path, tune.format("'false'", "'false'"))) == [
        "model.apply_lora_to_mlp",
        "compile",
    ]
    assert questions(from_text(tmp_path, tune.format("false", "false"))) == []
