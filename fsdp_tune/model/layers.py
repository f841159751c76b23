"""Layers of a model by its configuration: attention heads, whose number and width may differ, and routers of experts.

In Gemma 4, full attention has wider heads than sliding windows. transformers raises an error for a field of the configuration that
its layers differ in.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from fsdp_tune.planner.predict.mfu import EXPERT_COUNTS


def widest_head(config: PreTrainedConfig) -> int:
    """Return the largest width of an attention head over all layers; 0 if the configuration declares no heads."""
    return max((width for _, width in heads_by_layer(config)), default=0)


def mean_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Return (heads of a layer, their width) whose product is the mean of all layers; zeros if the configuration declares no heads."""
    layers = heads_by_layer(config)
    if not layers:
        return 0, 0
    heads = max(number for number, _ in layers)
    return heads, round(sum(number * width for number, width in layers) / (heads * len(layers)))


def heads_by_layer(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return (heads, width) of each layer; of a single one if all layers are alike."""
    text: Any = config.get_text_config()
    layers: list[Any] = list(text.per_layer_config) if text.is_heterogeneous else [text]
    found: list[tuple[int, int]] = []
    for layer in layers:
        heads, hidden = (int(getattr(layer, name, None) or 0) for name in ("num_attention_heads", "hidden_size"))
        if heads:
            found.append((heads, int(getattr(layer, "head_dim", None) or hidden // heads)))
    return found


def is_router(config: PreTrainedConfig, linear: nn.Linear) -> bool:
    """Return whether a linear layer of a mixture of experts has one output for each expert."""
    experts = next((count for key in EXPERT_COUNTS if isinstance(count := getattr(config, key, None), int)), None)
    return linear.out_features == experts
