"""Files of a PEFT adapter, and the fields of its `adapter_config.json` that decide the arithmetic (PEFT
0.21)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from fsdp_tune.core.errors import Notice, Where

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
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
# What is stored is LoRA, and what trains it is not: other gradients, or a bias of B, which runs of this
# package do not have.
_OTHER_TRAINING = ("velora_config", "lora_bias")
# Fields that `lora:`, a merge or both read.
_READ = (
    *(
        "peft_type",
        "base_model_name_or_path",
        "revision",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
    ),
    *(
        "target_modules",
        "target_parameters",
        "layers_to_transform",
        "modules_to_save",
        "bias",
        "lora_dropout",
        "init_lora_weights",
    ),
    *("fan_in_fan_out", "ensure_weight_tying"),
)
# Fields without a meaning for the stored tensors: which modules were found is in the names of the tensors,
# and the rest was used once.
_UNUSED = (
    *(
        "task_type",
        "auto_mapping",
        "peft_version",
        "inference_mode",
        "exclude_modules",
        "layers_pattern",
        "runtime_config",
    ),
    *(
        "megatron_config",
        "megatron_core",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        "qalora_group_size",
    ),
)
KNOWN_FIELDS = frozenset((*_OTHER_ARITHMETIC, *_OTHER_TRAINING, *_READ, *_UNUSED))
# Initialisations that subtract something from the base weights when training starts: the factors fit only the
# remainder.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
_TRAINS_OTHERWISE = ("mica",)
"""Initialisations after which B stays frozen."""
_ONLY_VALUES = ("gaussian", "eva", "orthogonal", "true", "false", "none")
INITIALISATIONS = (*_CHANGES_THE_BASE, *_TRAINS_OTHERWISE, *_ONLY_VALUES)


def other_arithmetic(config: Mapping[str, object]) -> str | None:
    """Return the first field of an `adapter_config.json` that makes it something else than LoRA or DoRA, or
    None."""
    return next((name for name in _OTHER_ARITHMETIC if config.get(name)), None)


def other_training(config: Mapping[str, object]) -> str | None:
    """Return what makes the training of an adapter differ from that of LoRA, by its `adapter_config.json`, or
    None."""
    if str(config.get("init_lora_weights")).lower().startswith(_TRAINS_OTHERWISE):
        return f"init_lora_weights: {config['init_lora_weights']}"
    return next((name for name in _OTHER_TRAINING if config.get(name)), None)


def unknown_field_notices(config: Mapping[str, object], path: Path) -> list[Notice]:
    """Return a notice about the fields and the initialisation of an `adapter_config.json` that PEFT 0.21 does
    not have."""
    names = sorted(name for name, value in config.items() if value and name not in KNOWN_FIELDS)
    if not str(config.get("init_lora_weights", True)).lower().startswith(INITIALISATIONS):
        names.append(f"init_lora_weights: {config['init_lora_weights']}")
    if not names:
        return []
    listed = ", ".join(f"`{name}`" for name in names)
    message = (
        f"{listed}: set in the adapter's config, unknown here, and taken for a setting that does not "
        "change what the adapter computes"
    )
    return [
        Notice(
            "adapter-field-unknown", message, where=Where(str(path)), hint="compare the result with PEFT's"
        )
    ]


def initialisation_that_changes_base(config: Mapping[str, object]) -> str | None:
    """Return `init_lora_weights` of an `adapter_config.json` if it changed the base under the adapter, or
    None."""
    start = str(config.get("init_lora_weights")).lower()
    return start if start.startswith(_CHANGES_THE_BASE) else None


def pattern_matches(pattern: str, module: str) -> bool:
    """Return whether a key of `rank_pattern` or `alpha_pattern` matches the end of a module name
    (`get_pattern_key`). Raises: re.error."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def value_for(module: str, patterns: Mapping[str, Value], default: Value) -> Value:
    """Return the value of the first pattern that matches a module's name. Raises: re.error."""
    return next((value for pattern, value in patterns.items() if pattern_matches(pattern, module)), default)


def is_trained_in_full(config: Mapping[str, object], weight: str) -> bool:
    """Return whether a weight of the base belongs to a module of `modules_to_save`, by the
    `adapter_config.json`."""
    saved: Any = config.get("modules_to_save") or []
    module = weight.rpartition(".")[0]
    return any(module == each or module.endswith(f".{each}") for each in saved if isinstance(each, str))
