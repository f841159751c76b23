"""What differs by model family: the names under which configurations and models hold a fact, and the
families with a quirk.

Everything that reads one of these facts reads it here: planner, ranks, rehearsal, merge and the rules of a
recipe. Most entries are names, not families, so a new family works without an entry if it uses the names of
another one. Needs no torch: a configuration is a `config.json` or an object of transformers.

The names of tensors and modules are in `core.expert_names` and `core.model_parts`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of one number in the configurations of different families, in the order in which they are
    looked up."""

    names: tuple[str, ...]

    def of(self, config: object) -> int | None:
        """Return the number; None if the configuration has it under none of the names."""
        return next((value for value in _values(config, self.names) if isinstance(value, int)), None)


def _values(config: object, names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        yield (
            cast("Mapping[str, object]", config).get(name)
            if isinstance(config, Mapping)
            else getattr(config, name, None)
        )


LAYERS = Fields(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_blocks"))
HIDDEN_SIZE = Fields(("hidden_size", "n_embd", "d_model", "embedding_dim"))
INNER_SIZE = Fields(
    (
        *("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "intermediate_size_mlp"),
    )
)
HEADS = Fields(
    (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
    )
)
KV_HEADS = Fields(("num_key_value_heads", "num_kv_heads"))
HEAD_WIDTH = Fields(("head_dim", "v_head_dim", "global_head_dim", "query_pre_attn_scalar", "qk_head_dim"))
ROTARY_WIDTH = Fields(("rotary_dim",))
LATENT_RANK = Fields(("q_lora_rank", "kv_lora_rank"))
"""Multi-head latent attention: rank of the compressed projections."""
LATENT_POSITIONS = "qk_rope_head_dim"
"""Its part of a head with positions. Where `head_dim` has the same value, DeepSeek's rotary embedding reads
it in its place."""
LATENT_WIDTH = Fields((LATENT_POSITIONS, "qk_nope_head_dim"))
"""Its parts of a head, with and without positions."""
STATE_SPACE = (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand"))
"""Number of heads, width of a head and expansion, where models require heads × width = hidden size ×
expansion."""
STATE_DECAY = "A_log"
"""Matrix of a state-space layer (Mamba, Jamba) with the decay rate of each channel, which no matrix product
uses."""
UNDECLARED = frozenset({"head_dim"})
"""Fields that models read although their configuration classes do not declare them (Qwen3-MoE)."""


def layer_types(config: object) -> list[str]:
    """Return the type of each layer; empty if the configuration does not list them."""
    return list(next(_values(config, ("layer_types",))) or ())


def heads_by_layer(config: Any) -> list[tuple[int, int]]:
    """Return (heads, width) of each layer; of a single one if all layers are alike. `config` is an object of
    transformers.

    Layers may differ: in Gemma 4, full attention has wider heads than sliding windows. transformers raises an
    error for a field of the configuration that its layers differ in.
    """
    text = config.get_text_config()
    found: list[tuple[int, int]] = []
    for layer in text.per_layer_config if text.is_heterogeneous else [text]:
        heads, hidden, width = _values(layer, ("num_attention_heads", "hidden_size", "head_dim"))
        if heads:
            found.append((int(heads), int(width or int(hidden or 0) // int(heads))))
    return found


def widest_head(config: object) -> int:
    """Return the largest width of an attention head over all layers; 0 if the configuration declares no
    heads."""
    return max((width for _, width in heads_by_layer(config)), default=0)


def mean_heads(config: object) -> tuple[int, int]:
    """Return (heads of a layer, their width) whose product is the mean of all layers; zeros if the
    configuration declares no heads."""
    layers = heads_by_layer(config)
    if not layers:
        return 0, 0
    heads = max(number for number, _ in layers)
    return heads, round(sum(number * width for number, width in layers) / (heads * len(layers)))


_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout")
_DROPOUT_WORDS = ("dropout", "pdrop", "layerdrop", "jitter")
_DROPOUT_OF_OTHER_HEADS = ("classifier", "summary")
SINKS = ("s_aux", "sinks")
"""One number a head: the argument of attention kernels, and the attribute of the module that gpt-oss's eager
kernel reads instead."""
CAUSAL_SWITCHES = ("is_decoder", "causal")
"""Fields that give a bidirectional model a causal mask."""


def has_attention_dropout(config: object) -> bool:
    """Return whether the attention of a text model drops weights in training."""
    return any(_values(config, _ATTENTION_DROPOUT))


def has_attention_soft_cap(config: object) -> bool:
    """Return whether the attention of a text model caps its logits (Gemma 2)."""
    return next(_values(config, ("attn_logit_softcapping",))) is not None


def dropout_fields(config: Mapping[str, object]) -> list[str]:
    """Return the fields of a `config.json` that make the model's forward random in training, sorted."""
    rates = (name for name, value in config.items() if isinstance(value, float) and value > 0)
    return sorted(
        name
        for name in rates
        if any(word in name for word in _DROPOUT_WORDS) and not name.startswith(_DROPOUT_OF_OTHER_HEADS)
    )


CACHE_ARGUMENTS = frozenset(
    {"cache", "cache_params", "past_key_values", "past_key_value", "state", "use_cache"}
)
"""Arguments of the forward of a module that needs earlier tokens when it generates: attention, a convolution
or a recurrence."""
EXAMPLE_LENGTHS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Arguments of a model's forward that name the examples of packed rows."""

_LIMIT = re.compile(
    r"(^|_)(topk|topk_blocks|window|window_size|chunk_size|block_size|local_attention|floor_scale|n_floor)$"
)
"""Numbers of tokens or blocks that divide a row, that a token sees, or from which on its position changes a
scale."""


def limits_within(config: Mapping[str, object], tokens: int) -> list[str]:
    """Return the fields with a limit below `tokens`: rows of so many tokens show what a model does at it, and
    shorter ones do not."""
    found = [
        name
        for name, value in config.items()
        if type(value) is int and 0 < value < tokens and _LIMIT.search(name)
    ]
    return [name for name in found if name not in CHOSEN_EXPERTS.names]


POSITIONS = Fields(("max_position_embeddings",))
OLD_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Fields of transformers 4 that `rope_parameters` replaced. transformers 5 reads `rope_scaling` first if both
are there."""
OLD_LOCAL_ROPE = "rope_local_base_freq"
"""The same for layers with a sliding window (Gemma 3)."""
SLIDING = "sliding_attention"
SCALED_FIELDS = ("rope_parameters", "rope_scaling", *POSITIONS.names)
"""Fields that scaling the positions changes."""
ORIGINAL_POSITIONS = "original_max_position_embeddings"
"""In `rope_parameters`; Phi-3's configuration has it as a field of its own, which takes precedence."""
ROW_SCALES = ("short_mscale", "long_mscale")
"""Fields of `rope_parameters` by which Phi-3.5-MoE scales short and long rows in its own forward."""


def max_positions(config: object) -> int | None:
    """Return the positions that the configuration declares, or None if it declares no limit (XLNet's -1)."""
    positions = POSITIONS.of(config)
    return positions if positions is not None and positions > 0 else None


EXPERTS = Fields(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
"""Experts in a layer."""
CHOSEN_EXPERTS = Fields(
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
)
"""Experts that a token uses."""
EMPTY_EXPERTS = Fields(("zero_expert_num",))
"""Further outputs of the router, for experts without weights that return their input (LongCat)."""
EXPERT_GROUPS = Fields(("n_group", "num_expert_group", "topk_group"))
DENSE_FIRST = Fields(("first_k_dense_replace",))
"""Number of layers without experts at the start."""
DENSE_LAYERS = "mlp_only_layers"
"""List of layers without experts."""
BALANCE_WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of models with the coefficient of the load-balancing loss."""


def expert_count(config: object) -> int:
    """Return the number of experts in a layer; 1 for a dense model. Configurations that have it under two
    names have it once (`attribute_map` of transformers), so the first name decides."""
    return EXPERTS.of(config) or 1


def is_nested(name: str, value: object) -> bool:
    """Return whether a field of a config.json holds a configuration of its own."""
    return name.endswith("_config") and isinstance(value, dict)


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type has for itself. Renamed fields are {new: old}."""

    old_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Fields that transformers 5 writes under another name than transformers 4 reads."""
    old_rope_names: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names that the family had instead of `OLD_ROPE` and `OLD_LOCAL_ROPE`."""
    reads_padding: bool = False
    """Recurrent layers take padding on the left for text."""
    has_conv1d: bool = False
    """Layers are `Conv1D`s of transformers, whose weights are [in, out]."""


_GPT_NEOX = Family(old_rope_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"})
_MODERNBERT = Family(old_rope_names={"rope_theta": "global_rope_theta", OLD_LOCAL_ROPE: "local_rope_theta"})
_READS_PADDING = Family(reads_padding=True)
_CONV1D = Family(has_conv1d=True)
_FAMILIES = {
    **dict.fromkeys(("gpt2", "openai-gpt", "imagegpt", "decision_transformer"), _CONV1D),
    "gpt_neox": _GPT_NEOX,
    "gpt_neox_japanese": _GPT_NEOX,
    "minimax": _READS_PADDING,
    "modernbert": _MODERNBERT,
    "modernbert-decoder": _MODERNBERT,
    "qwen3_moe": Family(old_names={"num_local_experts": "num_experts"}),
    "recurrent_gemma": _READS_PADDING,
    "rwkv": _READS_PADDING,
    "xlm": Family(
        old_names={"bos_token_id": "bos_index", "eos_token_id": "eos_index", "pad_token_id": "pad_index"}
    ),
    "xlstm": _READS_PADDING,
}
"""By `model_type` of the configuration."""


def family_of(model_type: object) -> Family:
    """Return the quirks of a model type; those of an unknown type are none."""
    return _FAMILIES.get(str(model_type), Family())
