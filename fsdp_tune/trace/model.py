"""The recipe's model on the fake device, wrapped by the worker's own code, with as many decoder layers as asked for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.model.build import attention, build_empty
from fsdp_tune.recipe.schema import Recipe

# Packages of their own, which the planning machine rarely has; their memory is that of torch's flash attention.
_FLASH = {"flash_attention_2", "flash_attention_3", "flash_attention_4"}


def truncated(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The same model with its first `layers` decoder layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = kinds[:layers]
    return config


def period(recipe: Recipe, config: PreTrainedConfig) -> int:
    """After how many decoder layers the pattern repeats: kinds of attention, and which layers are recomputed."""
    kinds: list[str] = list(getattr(config, "layer_types", None) or [])
    length = next((n for n in range(1, len(kinds) + 1) if all(kinds[i] == kinds[i - n] for i in range(n, len(kinds)))), 1)
    every = recipe.fsdp.activation_checkpointing_every if recipe.fsdp.activation_checkpointing != "none" else 1
    return length * every if length % every else length


def on_fake_device(recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None, device: torch.device) -> PreTrainedModel:
    """Call under a FakeTensorMode: every parameter and buffer gets a fake storage on `device`; ties stay ties."""
    if attention(recipe, config) in _FLASH:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attn_implementation": "sdpa"})})
    model = build_empty(recipe, config, vocabulary=vocabulary)
    made: dict[int, Any] = {}

    def materialised(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            fake: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        return made[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = materialised(tensor)
    return model
