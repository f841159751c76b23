"""What differs by model family: the names under which configurations, files and models hold a fact, and the families with a quirk.

Everything that reads one of these facts reads it here: planner, ranks, rehearsal, merge and the rules of a recipe. Most entries are names,
not families, so a new family works without an entry if it uses the names of another one. Needs no torch: a configuration is a `config.json`
or an object of transformers.

Also the fields of config.json of which transformers 4 and 5 spell one fact differently, and the names of the files next to the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from fsdp_tune.core.values import as_mapping


@dataclass(frozen=True, slots=True)
class Fields:
    """The names of one number in the configurations of different families, in the order in which they are looked up."""

    names: tuple[str, ...]

    def of(self, config: object) -> int | None:
        """Return the number; None if the configuration has it under none of the names."""
        return next((value for value in _values(config, self.names) if isinstance(value, int)), None)


def _values(config: object, names: Sequence[str]) -> Iterator[Any]:
    for name in names:
        yield cast("Mapping[str, object]", config).get(name) if isinstance(config, Mapping) else getattr(config, name, None)


# ---- Sizes

LAYERS = Fields(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_blocks"))
HIDDEN_SIZE = Fields(("hidden_size", "n_embd", "d_model", "embedding_dim"))
INNER_SIZE = Fields(
    (
        *("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"),
        *("shared_expert_intermediate_size", "intermediate_size_mlp"),
    )
)
HEADS = Fields(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads"))
KV_HEADS = Fields(("num_key_value_heads", "num_kv_heads"))
HEAD_WIDTH = Fields(("head_dim", "v_head_dim", "global_head_dim", "query_pre_attn_scalar", "qk_head_dim"))
ROTARY_WIDTH = Fields(("rotary_dim",))
LATENT_RANK = Fields(("q_lora_rank", "kv_lora_rank"))
"""Multi-head latent attention: rank of the compressed projections."""
LATENT_POSITIONS = "qk_rope_head_dim"
"""Its part of a head with positions. Where `head_dim` has the same value, DeepSeek's rotary embedding reads it in its place."""
LATENT_WIDTH = Fields((LATENT_POSITIONS, "qk_nope_head_dim"))
"""Its parts of a head, with and without positions."""
STATE_SPACE = (("num_heads", "head_dim", "expand"), ("mamba_n_heads", "mamba_d_head", "mamba_expand"))
"""Number of heads, width of a head and expansion, where models require heads × width = hidden size × expansion."""
STATE_DECAY = "A_log"
"""Matrix of a state-space layer (Mamba, Jamba) with the decay rate of each channel, which no matrix product uses."""
UNDECLARED = frozenset({"head_dim"})
"""Fields that models read although their configuration classes do not declare them (Qwen3-MoE)."""


def layer_types(config: object) -> list[str]:
    """Return the type of each layer; empty if the configuration does not list them."""
    return list(next(_values(config, ("layer_types",))) or ())


# ---- Attention heads. Layers may differ: in Gemma 4, full attention has wider heads than sliding windows.


def heads_by_layer(config: Any) -> list[tuple[int, int]]:
    """Return (heads, width) of each layer; of a single one if all layers are alike. `config` is an object of transformers.

    transformers raises an error for a field of the configuration that its layers differ in.
    """
    text = config.get_text_config()
    found: list[tuple[int, int]] = []
    for layer in text.per_layer_config if text.is_heterogeneous else [text]:
        heads, hidden, width = _values(layer, ("num_attention_heads", "hidden_size", "head_dim"))
        if heads:
            found.append((int(heads), int(width or int(hidden or 0) // int(heads))))
    return found


def widest_head(config: object) -> int:
    """Return the largest width of an attention head over all layers; 0 if the configuration declares no heads."""
    return max((width for _, width in heads_by_layer(config)), default=0)


def mean_heads(config: object) -> tuple[int, int]:
    """Return (heads of a layer, their width) whose product is the mean of all layers; zeros if the configuration declares no heads."""
    layers = heads_by_layer(config)
    if not layers:
        return 0, 0
    heads = max(number for number, _ in layers)
    return heads, round(sum(number * width for number, width in layers) / (heads * len(layers)))


# ---- Attention: what kernels may not have, and masks

_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attn_dropout")
_DROPOUT_WORDS = ("dropout", "pdrop", "layerdrop", "jitter")
_DROPOUT_OF_OTHER_HEADS = ("classifier", "summary")
SINKS = ("s_aux", "sinks")
"""One number a head: the argument of attention kernels, and the attribute of the module that gpt-oss's eager kernel reads instead."""
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
    return sorted(name for name in rates if any(word in name for word in _DROPOUT_WORDS) and not name.startswith(_DROPOUT_OF_OTHER_HEADS))


CACHE_ARGUMENTS = frozenset({"cache", "cache_params", "past_key_values", "past_key_value", "state", "use_cache"})
"""Arguments of the forward of a module that needs earlier tokens when it generates: attention, a convolution or a recurrence."""
EXAMPLE_LENGTHS = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"})
"""Arguments of a model's forward that name the examples of packed rows."""


# ---- Limits inside of a row

_LIMIT = re.compile(r"(^|_)(topk|topk_blocks|window|window_size|chunk_size|block_size|local_attention|floor_scale|n_floor)$")
"""Numbers of tokens or blocks that divide a row, that a token sees, or from which on its position changes a scale."""


def limits_within(config: Mapping[str, object], tokens: int) -> list[str]:
    """Return the fields with a limit below `tokens`: rows of so many tokens show what a model does at it, and shorter ones do not."""
    found = [name for name, value in config.items() if type(value) is int and 0 < value < tokens and _LIMIT.search(name)]
    return [name for name in found if name not in CHOSEN_EXPERTS.names]


# ---- Positions

POSITIONS = Fields(("max_position_embeddings",))
OLD_ROPE = ("rope_theta", "rope_scaling", "partial_rotary_factor")
"""Fields of transformers 4 that `rope_parameters` replaced. transformers 5 reads `rope_scaling` first if both are there."""
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


# ---- Mixtures of experts

EXPERTS = Fields(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
"""Experts in a layer."""
CHOSEN_EXPERTS = Fields(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"))
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
EXPERT_INDEX_ARGUMENTS = ("top_k_index", "router_indices")
"""Arguments [tokens, chosen] of the forward of stacked experts with the indices of the chosen experts."""
EXPERT_PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Stacked parameter → names of the tensors of one expert in files, whose rows follow each other in the stack."""
EXPERT_MODULES = ((".mlp.", ".mlp."), (".mlp.", ".block_sparse_moe."))
"""Module in the model → module in the files: Mixtral's kept its name from before transformers 5."""
_IN_EXPERTS = ".experts."
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROUTER_IN_EXPERTS = ".router."
_SHARED = "shared"


def expert_count(config: object) -> int:
    """Return the number of experts in a layer; 1 for a dense model. Configurations that have it under two names have it once
    (`attribute_map` of transformers), so the first name decides."""
    return EXPERTS.of(config) or 1


def dim_inside(shape: Sequence[int], ranks: int) -> int | None:
    """Return the dimension in which `ranks` with the same experts shard a stack of them: the first after that of the experts which they
    divide, since FSDP2 shards it evenly or not at all; None if there is none."""
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)


def is_in_experts(name: str) -> bool:
    """Return whether a module or a parameter is below `experts`. JetMoE's routers are, and some of its stacks are not."""
    return _IN_EXPERTS in name


def number_of_expert(name: str) -> int | None:
    """Return which expert a parameter belongs to; None if experts are stacked, or it belongs to none."""
    return int(found[1]) if (found := _EXPERT.search(name)) else None


def stack_of(name: str) -> str | None:
    """Return the module that holds the experts of a layer, of a name of one of them that may be stacked in it; None for other names."""
    return name[: found.start(1) - 1] if (found := _EXPERT.search(name)) else None


def is_router_in_experts(name: str) -> bool:
    """Return whether a parameter of `is_in_experts` is one of a router (JetMoE)."""
    return _ROUTER_IN_EXPERTS in name


def is_shared_expert(name: str) -> bool:
    """Return whether a parameter belongs to an expert that every token uses."""
    return _SHARED in name


def are_stacked_experts(module: str) -> bool:
    """Return whether a module of this name may hold stacked experts."""
    return module.endswith("experts")


def have_experts(modules: Iterable[str]) -> bool:
    """Return whether a model with modules of these names has experts or routers of its own kind."""
    return any("expert" in name for name in modules)


def is_router(config: object, outputs: int) -> bool:
    """Return whether a linear layer with this number of outputs has one for each expert of a mixture."""
    experts = expert_count(config)
    return experts > 1 and outputs == experts + (EMPTY_EXPERTS.of(config) or 0)


# ---- Embeddings and heads. The left and right sides of `_tied_weights_keys` of transformers' causal language models; a test reads them.

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_projection|lm_loss|proj_out|generator_lm_head|head|output|decoder|proj)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|w|tokens_embed|embed_in|embeddings|word_embeddings?|tok_embeddings)\.weight$")
OLD_HEADS = {"lm_head.weight": "embed_out.weight"}
"""Head in the model → head in files of transformers 4 (GPT-NeoX)."""
TIE_KEY = "tie_word_embeddings"


def is_head(name: str) -> bool:
    return _HEAD.search(name) is not None and not is_embedding(name)


def is_embedding(name: str) -> bool:
    return _EMBEDDING.search(name) is not None


def tie_setting(config: Mapping[str, object]) -> bool | None:
    """Return whether a `config.json` ties head and embedding; None if it is left to the model class."""
    settings = (config.get(TIE_KEY), as_mapping(config.get("text_config")).get(TIE_KEY))
    return next((each for each in settings if isinstance(each, bool)), None)


NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers", "num_mtp_modules")
"""Fields of a configuration with the number of layers that predict further tokens, which no class of transformers trains."""
_NEXT_TOKEN = re.compile(r"(^|\.)(mtp|nextn)[^.]*\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_WRAPPERS = ("model", "language_model", "transformer")


def part_of(name: str, layers: int) -> str:
    """Return the part of a model that a tensor of its files is in, as a user names it: `mtp`, `visual`, `vision_tower`.

    `layers`: those of the language model; one beyond them predicts further tokens (DeepSeek V3, GLM), and is part of `mtp`.
    """
    layer = _LAYER.search(name)
    if _NEXT_TOKEN.search(name) or (layer is not None and layers and int(layer[2]) >= layers):
        return "mtp"
    parts = name.split(".")
    while len(parts) > 2 and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return parts[0]


def without_next_token_layers(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json without the layers of `NEXT_TOKEN_LAYERS`, nested configurations included."""
    return {
        name: without_next_token_layers(as_mapping(value))
        if _is_nested(name, value)
        else 0
        if name in NEXT_TOKEN_LAYERS and isinstance(value, int)
        else value
        for name, value in config.items()
    }


def tied_candidates(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return {head: embedding} by name and shape."""
    embeddings = [name for name, shape in shapes.items() if is_embedding(name) and len(shape) == 2]
    pairs: dict[str, str] = {}
    for head, shape in shapes.items():
        if is_head(head):
            for embedding in embeddings:
                if shapes[embedding] == shape:
                    pairs.setdefault(head, embedding)
    return pairs


# ---- Families with a quirk


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
    "xlm": Family(old_names={"bos_token_id": "bos_index", "eos_token_id": "eos_index", "pad_token_id": "pad_index"}),
    "xlstm": _READS_PADDING,
}
"""By `model_type` of the configuration."""


def family_of(model_type: object) -> Family:
    """Return the quirks of a model type; those of an unknown type are none."""
    return _FAMILIES.get(str(model_type), Family())


# ---- Files next to the weights, and fields of config.json: which ones differ, and the spellings of transformers 4 and 5 for one fact

COMPANION = re.compile(
    r"generation_config\.json|tokenizer\.json|tokenizer_config\.json|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|[\w.-]+\.(model|tiktoken)|chat_template\.(jinja|json)|additional_chat_templates/[\w.-]+\.jinja|(video_)?(pre)?processor_config\.json"
)
CODE = re.compile(r"[\w-]+\.py")


def is_of_tokenizer(name: str) -> bool:
    """Return whether a file is the vocabulary or the configuration of a tokenizer."""
    return name.startswith("tokenizer") or name.endswith((".model", ".tiktoken"))


_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""How transformers 5 writes these values, `{"__float__": "Infinity"}`; transformers 4 writes and reads the bare word."""


def changed_fields(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a config.json that differ from those of another one; of nested configurations their differing fields."""
    changed: dict[str, object] = {}
    for name, value in after.items():
        old = before.get(name)
        if _is_nested(name, old) and _is_nested(name, value):
            changed |= {name: inner} if (inner := changed_fields(old, value)) else {}  # type: ignore[arg-type]
        elif old != value:
            changed[name] = value
    return changed


VOCABULARY_KEY, TEXT_KEY = "vocab_size", "text_config"


def vocabulary_of(config: Mapping[str, object]) -> int | None:
    """Return the size of the vocabulary of a config.json; of a model of several modalities, that of its text."""
    text = as_mapping(config.get(TEXT_KEY))
    found = text.get(VOCABULARY_KEY, config.get(VOCABULARY_KEY))
    return found if isinstance(found, int) else None


def vocabulary_changes(config: Mapping[str, object], size: int) -> dict[str, object]:
    """Return the fields of `with_changes` for a vocabulary of another size."""
    has_text = VOCABULARY_KEY in as_mapping(config.get(TEXT_KEY))
    changes: dict[str, object] = {TEXT_KEY: {VOCABULARY_KEY: size}} if has_text else {}
    return changes if has_text and VOCABULARY_KEY not in config else {**changes, VOCABULARY_KEY: size}


def with_changes(config: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json with the fields of `changed_fields`, rotary positions in both spellings."""
    merged = {name: value for name, value in config.items() if "rope_parameters" not in changes or name not in (*OLD_ROPE, OLD_LOCAL_ROPE)}
    for name, value in changes.items():
        inner = config.get(name)
        is_nested = _is_nested(name, inner) and _is_nested(name, value)
        merged[name] = with_changes(inner, value) if is_nested else value  # type: ignore[arg-type]
    return merged | (_old_rope_fields_of(merged) if "rope_parameters" in changes else {}) | old_names(config, changes)


def with_old_spellings(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config.json of transformers 5 that transformers 4 reads too, nested configurations included."""
    old: dict[str, object] = {
        name: with_old_spellings(as_mapping(value)) if _is_nested(name, value) else with_floats(value) for name, value in config.items()
    }
    return old | _old_rope_fields_of(config) | old_names(config, config)


def with_floats(value: Any) -> Any:
    """Return a value of a config.json with the infinities and NaN that transformers 5 tags as floats."""
    match value:
        case {"__float__": str(word), **rest} if not rest and word in _TAGGED:
            return _TAGGED[word]
        case dict():
            return {name: with_floats(inner) for name, inner in cast("dict[str, Any]", value).items()}
        case list():
            return [with_floats(inner) for inner in cast("list[Any]", value)]
        case _:
            return value


def _old_rope_fields_of(config: Mapping[str, object]) -> dict[str, object]:
    fields = old_rope_fields(config.get("rope_parameters"))
    names = family_of(config.get("model_type")).old_rope_names
    return fields | {old: fields[name] for name, old in names.items() if name in fields}


def old_names(config: Mapping[str, object], fields: Mapping[str, object]) -> dict[str, object]:
    """Return those of `fields` that transformers 4 reads under another name for the model type of `config`, by that name."""
    return {old: fields[name] for name, old in family_of(config.get("model_type")).old_names.items() if name in fields}


def old_rope_fields(parameters: object) -> dict[str, object]:
    """Return `rope_parameters` in the fields of transformers 4; empty if they had no spelling there.

    Parameters by layer type had one for the two types of Gemma 3 and its relatives, whose sliding layers are not scaled.
    """
    if not isinstance(parameters, dict) or not parameters:
        return {}
    fields = cast("dict[str, Any]", parameters)
    if not any(isinstance(value, dict) for value in fields.values()):
        return _flat(fields)
    if set(fields) != {"full_attention", SLIDING} or not all(isinstance(value, dict) for value in fields.values()):
        return {}
    local = _flat(fields[SLIDING])
    if local["rope_scaling"] is not None or "rope_theta" not in local:
        return {}
    return _flat(fields["full_attention"]) | {OLD_LOCAL_ROPE: local["rope_theta"]}


def _flat(parameters: Mapping[str, object]) -> dict[str, object]:
    own = ("rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in parameters.items() if name not in own}
    is_scaled = scaling.get("rope_type", "default") != "default"
    return {name: parameters[name] for name in own if name in parameters} | {"rope_scaling": scaling if is_scaled else None}


def _is_nested(name: str, value: object) -> bool:
    return name.endswith("_config") and isinstance(value, dict)
