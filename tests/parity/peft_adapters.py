"""Adapters made by PEFT alone, for runs and references to start from."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fsdp_tune.core.tensors.dtypes import NF4_VALUES


def round_to_nf4(base: Path, scales: str, folder: Path) -> Path:
    """Write the model with the linear layers of its decoder as they are in 4 bits: the nearest of 16 values
    for each weight."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "_proj." in name and parameter.shape[1] % 64 == 0:
            blocks = parameter.data.view(-1, 64)
            largest = blocks.abs().amax(dim=1, keepdim=True)
            largest = largest.bfloat16().float() if scales == "bf16" else largest
            distances = (blocks[..., None] / largest[..., None] - torch.tensor(NF4_VALUES)).abs()
            parameter.data = (torch.tensor(NF4_VALUES)[distances.argmin(dim=-1)] * largest).view(
                parameter.shape
            )
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, lora: dict[str, Any], folder: Path) -> Path:
    """Write an adapter of `lora:`'s keys with values in all of its tensors."""
    torch.manual_seed(3)
    fields = {"target_modules": "all-linear", "lora_alpha": 32}
    fields |= {key: list(value) if isinstance(value, tuple) else value for key, value in lora.items()}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fields["fan_in_fan_out"] = model.config.model_type == "gpt2"
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **fields))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            torch.nn.init.normal_(parameter, std=0.05)
        elif "magnitude" in name:
            parameter.data *= 1.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an adapted embedding is saved too
        model.save_pretrained(folder)
    return folder
