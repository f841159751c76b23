"""Write a small Llama with the arithmetic tokenizer as a GGUF file, for llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    gguf: Any, folder: Path, file: Path, *, template: str | None = None, adds_bos: bool = False
) -> None:
    """Convert a model directory, in fp32. `gguf`: the package."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    heads = config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(0)
    plain: dict[str, int] = tokenizer["model"]["vocab"]
    special = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    tokens = sorted(plain | special, key=(plain | special).__getitem__)
    writer.add_tokenizer_model("gpt2")
    # words of the vocabulary are tokens without merges, as in this tokenizer
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_eot_token_id(special["<|end|>"])
    writer.add_add_bos_token(adds_bos)
    writer.add_chat_template(template or (folder / "chat_template.jinja").read_text())
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(_name(name), _interleaved(name, tensor, heads).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, *rest, _ = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest)]}.weight"


def _interleaved(name: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return queries and keys with the pairs of their rotation next to each other, as llama.cpp has them."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    return (
        tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        .swapaxes(1, 2)
        .reshape(tensor.shape)
        .contiguous()
    )
