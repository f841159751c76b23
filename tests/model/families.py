"""The smallest configuration of each decoder family."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_DECODER = COMMON | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 257,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
    },
    "llama": {"model_type": "llama", **_DECODER},
    "mistral": {"model_type": "mistral", **_DECODER, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **_DECODER},
    "qwen3": {"model_type": "qwen3", **_DECODER, "head_dim": 8, "tie_word_embeddings": True},
    "gemma": {"model_type": "gemma", **_DECODER, "head_dim": 8, "tie_word_embeddings": True},
    "phi": {"model_type": "phi", **_DECODER},
    "gpt_neox": {"model_type": "gpt_neox", **COMMON},
    "bloom": {"model_type": "bloom", "vocab_size": 257, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {"model_type": "mixtral", **_DECODER, "num_local_experts": 4},
    "qwen2_moe": {"model_type": "qwen2_moe", **_DECODER, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "gemma3_text": {"model_type": "gemma3_text", **_DECODER, "head_dim": 8, "sliding_window": 8},
    "opt": {
        "model_type": "opt",
        "vocab_size": 257,
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "max_position_embeddings": 128,
    },
    "falcon": {
        "model_type": "falcon",
        "vocab_size": 257,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "lfm2": {"model_type": "lfm2", **_DECODER, "layer_types": ["conv", "full_attention"]},
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_DECODER,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
    },
}

BART: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 257,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
}
OPENAI_GPT: dict[str, Any] = {
    "model_type": "openai-gpt",
    "vocab_size": 257,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
BERT: dict[str, Any] = {"model_type": "bert", **COMMON}
XLNET: dict[str, Any] = {
    "model_type": "xlnet",
    "vocab_size": 257,
    "d_model": 32,
    "n_layer": 2,
    "n_head": 4,
    "d_inner": 48,
}
