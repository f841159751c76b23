"""Fields of PEFT's LoraConfig under which the factors of an adapter are not added to the base as they are (read from PEFT 0.21)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The layer does not compute x·(W + scaling·B·A), or the factors belong elsewhere.
_OTHER_ARITHMETIC = (
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
    "alora_invocation_tokens",
    "trainable_token_indices",
    "target_parameters",
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
