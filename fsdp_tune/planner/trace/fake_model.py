"""The recipe's model for a trace: on the meta device with every layer, then on the fake device."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.model.internals.transformers_internals import SUPPORTS_FLASH
from fsdp_tune.model.kernels.attention import has_variable_lengths
from fsdp_tune.model.loading.construct import attention, build_empty
from fsdp_tune.model.positions import beyond_table_of_positions
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.recipe.schema import Recipe


def build_traced(recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None) -> tuple[Recipe, PreTrainedModel]:
    """Return the recipe to trace and its model on the meta device.

    A FlashAttention package is replaced by torch's own kernel, which allocates the same: a planning machine rarely has the package.
    Raises: FsdpTuneError (exit 2) for a model that does not support FlashAttention, whose positions do not cover the recipe's rows, or that
    computes its attention in compiled code.
    """
    recipe, model = _build(recipe, config, vocabulary)
    if (problem := beyond_table_of_positions(recipe, model)) is not None:  # indexing a fake tensor does not check bounds
        raise FsdpTuneError(problem)
    return recipe, model


def _build(recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None) -> tuple[Recipe, PreTrainedModel]:
    kernel = attention(recipe, config)
    if kernel == "flex_attention":
        message = f"`model.attn_implementation: {kernel}` computes only in compiled code, which is not traced"
        raise usage_error("trace-failed", message, hint="with `sdpa` the step is predicted, with a mask where rows are packed")
    if not has_variable_lengths(kernel):
        return recipe, build_empty(recipe, config, vocabulary=vocabulary)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"attn_implementation": "sdpa"})})
    model = build_empty(recipe, config, vocabulary=vocabulary)
    if not SUPPORTS_FLASH.of(model):
        message = f"`model.attn_implementation`: {type(model).__name__} does not support FlashAttention"
        raise usage_error("model-refused", message, hint="--set model.attn_implementation=auto")
    return recipe, model


def attention_windows(recipe: Recipe, model: PreTrainedModel) -> list[int | None]:
    """Return the sliding window of each decoder layer, as transformers passes it to a flash kernel; None for full attention."""
    default = getattr(model.config, "sliding_window", None)
    windows: list[int | None] = []
    for _, layer in decoder_layers(model, recipe.layer_classes):
        own = [module.sliding_window for module in layer.modules() if hasattr(module, "sliding_window")]
        found = own[0] if own else default
        windows.append(found if isinstance(found, int) else None)
    return windows


def on_fake_device(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Give every parameter and buffer of a meta model fake storage on `device`, in place; ties are kept. Needs a FakeTensorMode."""
    made: dict[int, Any] = {}

    def materialised(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            fake: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            made[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
        return made[id(tensor)]

    for module in model.modules():
        own = [module.named_parameters(recurse=False, remove_duplicate=False), module.named_buffers(recurse=False, remove_duplicate=False)]
        for name, tensor in [*itertools.chain(*own)]:
            setattr(module, name, materialised(tensor))
    return model
