"""Tiny models of every family that the matrix covers; widths and vocabulary that 2 and 4 ranks do not
divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.parity.store import VOCABULARY

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 30,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "intermediate_size": 50,
}
_DECODER = _COMMON | _ATTENTION | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
_EXPERTS: dict[str, Any] = {
    "hidden_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 56,
}
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": VOCABULARY,
    "n_embd": 30,
    "n_layer": 3,
    "n_head": 3,
    "n_positions": 128,
}
_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2
    | _NO_DROPOUT
    | {"bos_token_id": 0, "eos_token_id": 1},  # tied embedding, learned positions, Conv1D
    "gpt2-dropout": _GPT2 | {"bos_token_id": 0, "eos_token_id": 1},
    "llama": {"model_type": "llama", **_DECODER},  # one key/value head for three queries, untied
    "qwen3": {"model_type": "qwen3", **_DECODER, "tie_word_embeddings": True},  # norms on queries and keys
    # scaled embedding, norm weights around zero
    "gemma": {
        "model_type": "gemma",
        **_DECODER,
        "tie_word_embeddings": True,
    },
    # The widths are as odd as torch's grouped product takes them (rows of 16 bytes); three experts divide by
    # no world.
    "mixtral": {
        "model_type": "mixtral",
        **_DECODER,
        **_EXPERTS,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    # The coefficient is a hundred times the default, so that a wrong balance shows in the trajectory.
    "mixtral-balanced": {
        "model_type": "mixtral",
        **_DECODER,
        **_EXPERTS,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    # Experts that 2 and 4 ranks divide, each with widths that 2 ranks divide.
    "mixtral-divided": {
        "model_type": "mixtral",
        **_DECODER,
        **_EXPERTS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "gpt-oss-divided": {  # experts with biases, stored transposed, gated by a function of their own
        "model_type": "gpt_oss",
        **_DECODER,
        **_EXPERTS,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "qwen2-moe-divided": {  # a shared expert, which is added with a gate of its own after the others
        "model_type": "qwen2_moe",
        **_DECODER,
        **_EXPERTS,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    },
    "deepseek-divided": {  # a dense layer first, a shared expert, experts chosen in groups
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        **_DECODER,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    # Every Linear of its layers can compute in fp8, on one, two and four ranks.
    "llama-16": {
        "model_type": "llama",
        **_DECODER,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
    },
    "mixtral-16": {
        "model_type": "mixtral",
        **_DECODER,
        **_EXPERTS,
        "hidden_size": 64,
        "head_dim": 16,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    # Rows of 64 weights for blocks of 4 bits; 130 rows, which 4 ranks do not divide; the 130 columns of its
    # down_proj are not blocks.
    "llama-blocks": {
        "model_type": "llama",
        **_DECODER,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "intermediate_size": 130,
    },
    # Its MLPs are large enough for blocks of 8-bit state on two ranks and too small on four, its heads too
    # small on any; its embedding has whole blocks on the second rank alone.
    "llama-64": {
        "model_type": "llama",
        **_DECODER,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
}


def make_model(name: str, folder: Path, *, seed: int = 7, vocabulary: int | None = None) -> Path:
    """Random weights as an ordinary model directory, by transformers alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(ARCHITECTURES[name])
    if vocabulary is not None:
        fields["vocab_size"] = vocabulary
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def resized(source: Path, folder: Path, vocabulary: int, *, seed: int) -> Path:
    """The same model with a larger embedding, by transformers alone; it draws the new rows."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.resize_token_embeddings(vocabulary)
    model.save_pretrained(folder)
    return folder
