"""A tiny model of every architecture that transformers lists for causal language modelling."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fsdp_tune.core.small_config import HEAD_SIZE, HEADS, HIDDEN_SIZE, scale_down_config

VOCABULARY = 257
MOST_PARAMETERS = 8_000_000
_WITH_PADDING = (
    *(
        "camembert",
        "data2vec-text",
        "emu3",
        "modernbert-decoder",
        "prophetnet",
        "roberta",
        "roberta-prelayernorm",
    ),
    *("xlm-roberta", "xlm-roberta-xl"),
)
_SMALLER: dict[str, dict[str, Any]] = {
    **{name: {"pad_token_id": 0} for name in _WITH_PADDING},
    **{name: {"text_config": {"pad_token_id": 0}} for name in ("gemma4", "gemma4_unified")},
    "xmod": {"pad_token_id": 0, "default_language": "en_XX"},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    **{name: {"head_dim": HEAD_SIZE} for name in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    "nemotron": {"num_key_value_heads": HEADS},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "rwkv": {"attention_hidden_size": HIDDEN_SIZE},
    "xlstm": {"qk_dim_factor": 1.0},
    "xlnet": {"d_head": HEAD_SIZE},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 2 * HIDDEN_SIZE,
        "attention_head_dim": 2 * HEAD_SIZE,
    },
    "zamba2": {
        "mamba_headdim": HEAD_SIZE,
        "attention_hidden_size": 2 * HIDDEN_SIZE,
        "attention_head_dim": 2 * HEAD_SIZE,
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 64,
        "activation_sparsity_pattern": None,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "gemma4_text": {"hidden_size_per_layer_input": 16},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""Fields that a rehearsal keeps, and that make the model large or do not fit the small widths."""
_IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def known(*candidates: str) -> list[str]:
    """Return those that the installed transformers has: its lowest version lacks the newest."""
    have = names()
    return [name for name in candidates if name in have]


def config_of(name: str) -> dict[str, Any]:
    """Return the default configuration with a rehearsal's sizes, a small vocabulary and no dropout."""
    from transformers import AutoConfig

    small = scaled_down(AutoConfig.for_model(name).to_dict()) | _IDS
    for key, value in _SMALLER.get(name, {}).items():
        small[key] = small[key] | value if key.endswith("_config") else value
    if "output_router_logits" in small:
        # The coefficient is a hundred times the usual default, so that a wrong balance shows in the loss of
        # the last step.
        small |= {"output_router_logits": True} | {
            key: 0.1 for key in ("router_aux_loss_coef", "aux_loss_coef") if key in small
        }
    return small | {"model_type": name}


def unreached_limits(config: dict[str, Any], longest_row: int) -> dict[str, int]:
    """Return the fields of a configuration that select among tokens, or divide them, and that no row is long
    enough for.

    Within such a row a sliding window is full attention, and the top-k of an indexer is every token.
    """
    found: dict[str, int] = {}
    for key, value in config.items():
        if _OTHER_MODALITY.search(str(key)):
            continue
        if isinstance(value, dict):
            found |= {
                f"{key}.{inner}": limit for inner, limit in unreached_limits(value, longest_row).items()
            }
        elif _LIMIT.search(str(key)) and isinstance(value, int) and value >= longest_row:
            found[key] = value
    return found


_LIMIT = re.compile(r"(^|_)(topk|window|window_size|chunk_size|local_attention|block_size)$")
_OTHER_MODALITY = re.compile("audio|vision|image|video")


def scaled_down(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with a rehearsal's sizes, those of nested ones included."""
    small = {key: value for key, value in scale_down_config(config).items() if value is not None}
    for key, value in small.items():
        if key.endswith("_config") and isinstance(value, dict):
            small[key] = scaled_down(value) | (_IDS if "vocab_size" in value else {})
        elif key.startswith("vocab_size") and isinstance(value, int):
            small[key] = VOCABULARY
        elif key.endswith(("ffn_dim", "ffn_hidden_size", "lru_width")) and isinstance(value, int):
            small[key] = HIDDEN_SIZE
        elif ("drop" in key or key.endswith("pdrop")) and isinstance(value, float):
            small[key] = 0.0
    return small


def make_model(config: dict[str, Any], folder: Path) -> Path:
    """Write random weights as a model directory, with transformers alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    built = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in AutoModelForCausalLM.from_config(built).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters at the smallest sizes")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(built, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def set_fields(model: Path, **fields: Any) -> None:
    """Change fields of a model directory's `config.json`."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
