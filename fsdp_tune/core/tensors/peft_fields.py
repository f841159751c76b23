"""PEFT's adapter files: their names, the names of their tensors, and the fields of LoraConfig that decide the arithmetic (PEFT 0.21)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fsdp_tune.core.errors import Notice, Where, failed_error

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Of the name of each tensor."""
Value = TypeVar("Value")

# The layer does not compute x·(W + scaling·B·A), or the factors belong elsewhere.
_OTHER_ARITHMETIC = (
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "layer_replication",
)
# What is stored is LoRA, and what trains it is not: other gradients, or a bias of B, which runs of this package do not have.
_OTHER_TRAINING = ("velora_config", "lora_bias")
# Fields that `lora:`, a merge or both read.
_READ = (
    *("peft_type", "base_model_name_or_path", "revision", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "layers_to_transform", "modules_to_save", "bias", "lora_dropout", "init_lora_weights"),
    *("fan_in_fan_out", "ensure_weight_tying"),
)
# Fields without a meaning for the stored tensors: which modules were found is in the names of the tensors, and the rest was used once.
_UNUSED = (
    *("task_type", "auto_mapping", "peft_version", "inference_mode", "exclude_modules", "layers_pattern", "runtime_config"),
    *("megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
)
KNOWN_FIELDS = frozenset((*_OTHER_ARITHMETIC, *_OTHER_TRAINING, *_READ, *_UNUSED))
# Initialisations that subtract something from the base weights when training starts: the factors fit only the remainder.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_TRAINS_OTHERWISE = ("mica",)
"""Initialisations after which B stays frozen."""
_ONLY_VALUES = ("gaussian", "eva", "orthogonal", "true", "false", "none")
INITIALISATIONS = (*_CHANGES_THE_BASE, *_TRAINS_OTHERWISE, *_ONLY_VALUES)


def other_arithmetic(config: Mapping[str, Any]) -> str | None:
    """Return the first field of an `adapter_config.json` that makes it something else than LoRA or DoRA, or None."""
    return next((name for name in _OTHER_ARITHMETIC if config.get(name)), None)


def other_training(config: Mapping[str, Any]) -> str | None:
    """Return what makes the training of an adapter differ from that of LoRA, by its `adapter_config.json`, or None."""
    if str(config.get("init_lora_weights")).lower().startswith(_TRAINS_OTHERWISE):
        return f"init_lora_weights: {config['init_lora_weights']}"
    return next((name for name in _OTHER_TRAINING if config.get(name)), None)


def unknown_field_notices(config: Mapping[str, Any], path: Path) -> list[Notice]:
    """Return a notice about the fields and the initialisation of an `adapter_config.json` that PEFT 0.21 does not have."""
    names = sorted(name for name, value in config.items() if value and name not in KNOWN_FIELDS)
    if not str(config.get("init_lora_weights", True)).lower().startswith(INITIALISATIONS):
        names.append(f"init_lora_weights: {config['init_lora_weights']}")
    if not names:
        return []
    listed = ", ".join(f"`{name}`" for name in names)
    message = f"{listed}: set in the adapter's config, unknown here, and taken for a setting that does not change what the adapter computes"
    return [Notice("adapter-field-unknown", message, where=Where(str(path)), hint="compare the result with PEFT's")]


def initialisation_that_changes_base(config: Mapping[str, Any]) -> str | None:
    """Return `init_lora_weights` of an `adapter_config.json` if it changed the base under the adapter, or None."""
    start = str(config.get("init_lora_weights")).lower()
    return start if start.startswith(_CHANGES_THE_BASE) else None


def pattern_matches(pattern: str, module: str) -> bool:
    """Return whether a key of `rank_pattern` or `alpha_pattern` matches the end of a module name (`get_pattern_key`). Raises: re.error."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def value_for(module: str, patterns: Mapping[str, Value], default: Value) -> Value:
    """Return the value of the first pattern that matches a module's name. Raises: re.error."""
    return next((value for pattern, value in patterns.items() if pattern_matches(pattern, module)), default)


def is_trained_in_full(config: Mapping[str, Any], weight: str) -> bool:
    """Return whether a weight of the base belongs to a module of `modules_to_save`, by the `adapter_config.json`."""
    saved: Any = config.get("modules_to_save") or []
    module = weight.rpartition(".")[0]
    return any(module == each or module.endswith(f".{each}") for each in saved if isinstance(each, str))


def without_copies(names: Iterable[str]) -> dict[str, str]:
    """Return {the name that PEFT reads: name} of the tensors of an adapter's file.

    With `save_embedding_layers` PEFT writes the wrapper of an embedding or head of `modules_to_save` too: the frozen original, which is
    left out here, and the trained weight for a second time.
    """
    found: dict[str, str] = {}
    copies: dict[str, str] = {}
    for name in names:
        module, _, rest = name.rpartition(".")
        if module.endswith(".modules_to_save"):
            copies[f"{module.removesuffix('.modules_to_save')}.{rest}"] = name
        elif not module.endswith(".original_module"):
            found[name] = name
    return copies | found


def tensor_name(module: str, part: str) -> str:
    """`lora_B.bias` of `M` → `base_model.model.M.lora_B.bias`; the tensors of embeddings and DoRA's magnitudes have no `.weight`."""
    has_no_end = part.startswith(("lora_embedding", "lora_magnitude")) or part.endswith(".bias")
    return f"{PREFIX}{module}.{part}{'' if has_no_end else '.weight'}"


# ---- Names of tensors, read from `get_peft_model_state_dict` and `BaseTuner._remove_adapter_name_from_key`.
# Inside a model (the names of its state dict, as a sharded checkpoint holds them) the adapter's name stands before the last part:
# `base_model.model.M.lora_A.default.weight`; the file of an adapter is without it. M is the module in the base model.

MAGNITUDE = ".lora_magnitude_vector"
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_[AB])(\.(?P<adapter>[^.]+))?\.(?P<what>weight|bias)")
_EMBEDDING = re.compile(r"(?P<module>.+)\.(?P<part>lora_embedding_[AB])(\.(?P<adapter>[^.]+))?")
_OTHER = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_magnitude_vector|token_adapter\.trainable_tokens_\w+)(\.(?P<adapter>[^.]+?))?(\.weight)?"
)
_SAVED = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_COPY = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<rest>[^.]+)")
"""In an adapter's own file: `save_embedding_layers` writes the wrapper of a trained embedding too, without the adapter's name."""
_ORIGINAL = re.compile(r".+\.(original_module|token_adapter\.base_layer)\..+")
_OF_TRAINING = re.compile(r"\.lora_velora_\w+(\.|$)")
"""VeLoRA's projection of activations, which only the backward uses."""
_BASE_LAYER = re.compile(r"(?P<module>.+)\.base_layer\.(?P<rest>[^.]+)")


@dataclass(slots=True)
class PeftNames:
    """The keys of a checkpoint by what they are; modules and weights by their names in the base model.

    `factors`: {module: {"lora_A" | "lora_B" | "lora_B.bias" | "lora_embedding_A" | "lora_embedding_B": key}};
    `weights`: {name: key} of what stands for a tensor of the base model, trained or not; `wrapped`: those names among them that
    were found under an adapter's layer; `saved`: those that come from `modules_to_save`;
    `others`: {name in the adapter's file: key} of what is no plain LoRA, such as the magnitudes of DoRA.
    """

    factors: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    weights: dict[str, str] = field(default_factory=dict[str, str])
    wrapped: set[str] = field(default_factory=set[str])
    saved: set[str] = field(default_factory=set[str])
    others: dict[str, str] = field(default_factory=dict[str, str])
    adapters: set[str] = field(default_factory=set[str])
    twice: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    copies: dict[str, str] = field(default_factory=dict[str, str])
    """{name: key} of trained weights that the file usually holds under their own name too, which PEFT reads."""


def sort_names(keys: Iterable[str], where: Where) -> PeftNames:
    """Classify keys. Raises: FailedError for two adapters in one checkpoint, and for two keys with the same name."""
    found = PeftNames()
    for key in keys:
        _sort(found, key, key.removeprefix(PREFIX))
    for name, key in found.copies.items():
        found.saved.add(name)
        found.weights.setdefault(name, key)
    if len(found.adapters) > 1:
        raise failed_error(
            "merge-adapter-several",
            f"the checkpoint holds several adapters: {', '.join(sorted(found.adapters))}",
            where=where,
            hint="save one of them with PEFT (`selected_adapters`) and merge that",
        )
    for one, other in found.twice:
        raise failed_error(
            "merge-adapter-damaged",
            f"`{one}` and `{other}` are the same tensor of the model",
            where=where,
            hint="save the adapter again from where it was trained",
        )
    return found


def unwrapped(module: str) -> str:
    """`M.base_layer` → `M`: PEFT nests the layers of several adapted parameters of one module."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return module


def _sort(found: PeftNames, key: str, name: str) -> None:
    if _ORIGINAL.fullmatch(name) or _OF_TRAINING.search(name):
        return
    if match := _FACTOR.fullmatch(name):
        part = match["part"] if match["what"] == "weight" else f"{match['part']}.bias"
        taken = found.factors.setdefault(match["module"], {}).setdefault(part, key)
    elif match := _EMBEDDING.fullmatch(name):
        taken = found.factors.setdefault(match["module"], {}).setdefault(match["part"], key)
    elif match := _OTHER.fullmatch(name):
        taken = found.others.setdefault(f"{match['module']}.{match['part']}", key)
    elif match := _SAVED.fullmatch(name):
        base_name = f"{match['module']}.{match['rest']}"
        found.saved.add(base_name)
        taken = found.weights.setdefault(base_name, key)
    elif match := _COPY.fullmatch(name):
        taken = found.copies.setdefault(f"{match['module']}.{match['rest']}", key)
    elif match := _BASE_LAYER.fullmatch(name):
        base_name = f"{match['module']}.{match['rest']}"
        found.wrapped.add(base_name)
        taken = found.weights.setdefault(base_name, key)
    elif ".lora_" in name:
        taken = found.others.setdefault(name, key)
    else:
        taken = found.weights.setdefault(name, key)
    if match and match.groupdict().get("adapter") is not None:
        found.adapters.add(match["adapter"])
    if taken != key:
        found.twice.append((taken, key))
