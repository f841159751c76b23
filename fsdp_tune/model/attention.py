"""`model.attn_implementation: auto`: which attention kernel a model gets on this device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from fsdp_tune.model.choice import WRITTEN, Choice
from fsdp_tune.recipe.schema import Recipe

FLASH = "flash_attention"
"""How transformers' names of the kernels with variable lengths begin."""
_DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attn_dropout")
_MAX_HEAD_WIDTH = 256
_HOPPER = (9, 0)


def choose_attention(recipe: Recipe, config: PreTrainedConfig) -> Choice:
    """FlashAttention 3, else 2, where installed and right for the model; else torch's own kernel, where the model has it."""
    asked = recipe.model.attn_implementation
    if asked != "auto":
        return Choice(asked, WRITTEN)
    found: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)  # type: ignore[attr-defined]
    model_class: Any = found[0] if isinstance(found, tuple) else found
    against = _against_flash(recipe, config, model_class)
    if against is None:
        version, reason = _flash_version(config)
        if version is not None:
            return Choice(f"{FLASH}_{version}", reason)
        against = reason
    if model_class is None:
        return Choice("auto", against)
    kernel = "sdpa" if model_class._supports_sdpa else "eager"
    if kernel == "eager":
        against = f"{model_class.__name__} has no other"
    elif recipe.data.packing:
        against += "; packed rows get a block-diagonal mask"
    return Choice(kernel, against)


def _against_flash(recipe: Recipe, config: PreTrainedConfig, model_class: Any) -> str | None:
    """Why no FlashAttention could be right here, installed or not."""
    if recipe.launch.device != "cuda":
        return f"FlashAttention needs CUDA, and the device is {recipe.launch.device}"
    if recipe.compute_dtype == "fp32":
        return "FlashAttention computes in bf16 and fp16 only"
    if model_class is None:
        return f"what {type(config).__name__}'s model supports is not known: its own default"
    if not model_class._supports_flash_attn:
        return f"{model_class.__name__} does not support FlashAttention"
    if getattr(model_class, "_compatible_flash_implementations", None):
        return f"{model_class.__name__} names flash kernels of its own, which are not chosen unasked"
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if width > _MAX_HEAD_WIDTH:
        return f"FlashAttention takes heads of at most {_MAX_HEAD_WIDTH}, and these are {width} wide"
    return None


def _flash_version(config: PreTrainedConfig) -> tuple[int | None, str]:
    """transformers' own probes: they look for the packages and for a CUDA device."""
    has_dropout = any(getattr(config, field, 0.0) for field in _DROPOUT_FIELDS)
    if is_flash_attn_3_available():
        if has_dropout:
            against_3 = "FlashAttention 3 has no dropout, and the model's attention has"
        elif torch.cuda.get_device_capability() < _HOPPER:
            against_3 = "FlashAttention 3 needs a Hopper GPU"
        else:
            return 3, "FlashAttention 3 is installed"
    else:
        against_3 = "flash-attn-3 is not installed"
    if is_flash_attn_2_available():
        return 2, f"flash-attn is installed; {against_3}"
    return None, "flash-attn is not installed" if against_3.endswith("not installed") else f"flash-attn is not installed; {against_3}"


def has_variable_lengths(kernel: str | None) -> bool:
    """Whether a kernel tells packed examples apart by their lengths, without a mask."""
    return kernel is not None and kernel.startswith(FLASH)
