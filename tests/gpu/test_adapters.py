"""Adapters on a device: weights in 4 bits have the values that the CPU computes, and compiled layers train to
the same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fsdp_tune.model.adapters.nf4 import dequantise, quantise
from tests.gpu.conftest import DEVICE, Train, loss_lines
from tests.gpu.models import LLAMA

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_weights_in_4_bits_are_bitwise_those_of_the_cpu(scale_dtype: torch.dtype) -> None:
    rows = torch.randn(300, 1024, generator=torch.Generator().manual_seed(0))
    rows[7] = 0.0
    on_cpu, on_device = quantise(rows, scale_dtype), quantise(rows.to(DEVICE), scale_dtype)
    assert all(torch.equal(other.cpu(), one) for one, other in zip(on_cpu, on_device, strict=True))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantise(*on_device, dtype).cpu(), dequantise(*on_cpu, dtype))


@pytest.mark.parametrize("sections", [{}, {"quantization": {"load": "nf4"}}], ids=["LoRA", "QLoRA"])
def test_compiled_layers_with_adapters_have_the_same_losses(
    sections: dict[str, Any], train: Train, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    ).save_pretrained(base)
    model, training = {"name_or_path": str(base)}, {"max_steps": 6, "learning_rate": 1e-2}
    plain, compiled = (
        [
            line["loss"]
            for line in loss_lines(
                train(
                    model=model, training=training, lora={"r": 8}, kernels={"compile": compiles}, **sections
                )
            )
        ]
        for compiles in (False, True)
    )
    assert compiled == pytest.approx(plain, rel=1e-4)
    assert plain[-1] < plain[0]
