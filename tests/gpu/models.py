"""The models of the tests on a GPU."""

from __future__ import annotations

from typing import Any

DRY = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KERNELS = ["sdpa", "eager", "flex_attention", "flash_attention_2", "torch_varlen"]
IN_HALF_PRECISION = ("flash_attention_2", "torch_varlen")
"""Kernels for CUDA alone, which compute in bf16 and fp16."""


def gpt2(*, small: bool) -> dict[str, Any]:
    """More than 100M parameters, or a toy."""
    width = (
        {"n_embd": 32, "n_layer": 2, "n_head": 2} if small else {"n_embd": 768, "n_layer": 16, "n_head": 12}
    )
    return {"model_type": "gpt2", "vocab_size": 384, "n_positions": 64, **width}
