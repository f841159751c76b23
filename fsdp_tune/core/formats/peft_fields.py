"""PEFT's adapter files: their names, the names of their tensors, and the fields of LoraConfig that decide the arithmetic (PEFT 0.21)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

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
# Initialisations that subtract something from the base weights when training starts: the factors fit only the remainder.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


def other_arithmetic(config: Mapping[str, Any]) -> str | None:
    """Return the first field of an `adapter_config.json` that makes it something else than LoRA or DoRA, or None."""
    return next((name for name in _OTHER_ARITHMETIC if config.get(name)), None)


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
