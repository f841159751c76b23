"""Select the attention kernel of a model on this device, for `model.attn_implementation: auto`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from fsdp_tune.core.errors import Notice, Where, usage_error
from fsdp_tune.core.families import has_attention_dropout, layer_types, widest_head
from fsdp_tune.core.flash_kernels import FLASH_ATTENTION, FlashAttention
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model.internals.transformers_internals import (
    OWN_FLASH_KERNELS,
    SUPPORTS_FLASH,
    SUPPORTS_SDPA,
    attention_of,
)
from fsdp_tune.model.kernels.varlen import against_torch_varlen
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.recipe.schema.attention_kernels import SDPA_OR_EAGER, TORCH_VARLEN, is_flash_kernel
from fsdp_tune.recipe.schema.recipe import Recipe

_KEY = "model.attn_implementation"
_MAX_HEAD_WIDTH = max(each.widest_head for each in FLASH_ATTENTION)
_LARGE_MASK_BYTES = 2**30


def choose_attention(recipe: Recipe, config: PreTrainedConfig) -> KernelChoice:
    """Choose a kernel: the fastest FlashAttention that is installed and runs on this GPU, else torch's
    variable-length attention, else SDPA, else eager.

    Each is chosen only if it suits the model. Raises: usage error if the recipe sets torch's variable-length
    attention and it does not.
    """
    requested = recipe.model.attn_implementation
    if requested not in ("auto", TORCH_VARLEN, SDPA_OR_EAGER):
        return KernelChoice(requested, WRITTEN)
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    model_class: Any = found[0] if isinstance(found, tuple) else found
    is_old = requested == SDPA_OR_EAGER
    against = (
        f"`{_KEY}: {SDPA_OR_EAGER}` excludes FlashAttention"
        if is_old
        else _against_flash(recipe, config, model_class)
    )
    if requested == TORCH_VARLEN:
        if reason := against or against_torch_varlen(config, model_class):
            hint = "`auto` chooses a kernel that the model supports"
            raise usage_error(
                "model-refused", f"`{_KEY}: {requested}`: {reason}", where=Where(key=_KEY), hint=hint
            )
        return KernelChoice(requested, WRITTEN)
    if against is None:
        version, against = _flash_version(config)
        if version is not None:
            return KernelChoice(f"flash_attention_{version}", against)
        against_varlen = against_torch_varlen(config, model_class)
        if against_varlen is None:
            return KernelChoice(TORCH_VARLEN, against)
        against = f"{against}; {against_varlen}"
    if model_class is None:
        return KernelChoice("auto", against)
    kernel = "sdpa" if SUPPORTS_SDPA.of(model_class) else "eager"
    if kernel == "eager":
        against = f"{model_class.__name__} has no other"
    elif recipe.data.packing:
        against += "; packed rows get a block-diagonal mask"
    return KernelChoice(kernel, against)


def _against_flash(recipe: Recipe, config: PreTrainedConfig, model_class: Any) -> str | None:
    """Return why FlashAttention is not suitable here, whether installed or not; None if it is."""
    if recipe.launch.device != "cuda":
        return f"FlashAttention needs CUDA, and the device is {recipe.launch.device}"
    if recipe.compute_dtype == "fp32":
        return "FlashAttention computes in bf16 and fp16 only"
    if model_class is None:
        return f"the kernels of {type(config).__name__}'s model are unknown, so its default is used"
    if not SUPPORTS_FLASH.of(model_class):
        return f"{model_class.__name__} does not support FlashAttention"
    if OWN_FLASH_KERNELS.of(model_class):
        return f"{model_class.__name__} declares its own flash kernels, which auto does not choose"
    if (width := widest_head(config)) > _MAX_HEAD_WIDTH:
        return f"FlashAttention takes heads of width {_MAX_HEAD_WIDTH} at most, and the model's have {width}"
    return None


def _is_installed(flash: FlashAttention) -> bool:
    """Return whether the package is installed for a CUDA device, by transformers' own checks."""
    checks: dict[int, Callable[[], bool]] = {
        2: is_flash_attn_2_available,
        3: is_flash_attn_3_available,
        4: is_flash_attn_4_available,
    }
    return bool(checks[flash.version]())


def _flash_version(config: PreTrainedConfig) -> tuple[int | None, str]:
    """Return the fastest usable version and why it is not a faster one; None and why there is none."""
    against: list[str] = []
    for flash in FLASH_ATTENTION:
        if not _is_installed(flash):
            continue
        reason = _against_version(flash, config)
        if reason is None:
            return flash.version, "; ".join([f"{flash.package} is installed", *against])
        against.append(reason)
    return None, "; ".join(against) or "flash-attn is not installed"


def _against_version(flash: FlashAttention, config: PreTrainedConfig) -> str | None:
    """Return why an installed version cannot compute this model on this GPU."""
    if torch.version.hip is not None:
        return None if flash.version == 2 else f"FlashAttention {flash.version} has no kernels for AMD"
    if reason := flash.against(torch.cuda.get_device_name(), torch.cuda.get_device_capability()):
        return reason
    if not flash.has_dropout and has_attention_dropout(config.get_text_config()):
        return f"FlashAttention {flash.version} has no dropout, and the model's attention uses it"
    if (width := widest_head(config)) > flash.widest_head:
        return (
            f"FlashAttention {flash.version} takes heads of width {flash.widest_head} at most, and the "
            f"model's have {width}"
        )
    return None


def live_attention(recipe: Recipe, model: PreTrainedModel) -> KernelChoice:
    """Return the attention kernel of the built model, which may differ from the chosen one."""
    chosen, live = choose_attention(recipe, model.config), attention_of(model.config)
    if chosen.value in ("auto", live):
        return KernelChoice(live, chosen.reason)
    return KernelChoice(live, f"transformers uses it instead of {chosen.value}")


def large_mask_notices(
    recipe: Recipe, config: PreTrainedConfig, layers: int, chosen: KernelChoice
) -> list[Notice]:
    """Return a notice if the masks of packed rows and their copies take more than `_LARGE_MASK_BYTES` on a
    GPU.

    transformers makes a boolean mask [rows, 1, tokens, tokens] for each kind of layer; sdpa converts it to
    the compute dtype in each layer, and autograd saves this copy for the backward, in recomputed layers for
    one layer at a time.
    """
    if not recipe.data.packing or recipe.launch.device != "cuda" or chosen.value != "sdpa":
        return []
    recomputed = (
        0
        if recipe.fsdp.activation_checkpointing == "none"
        else -(-layers // recipe.fsdp.activation_checkpointing_every)
    )
    copies = layers - recomputed + min(1, recomputed)
    kinds = len(set(layer_types(config) or ["full_attention"]))
    rows, tokens = recipe.training.per_device_train_batch_size, recipe.data.max_length
    per_pair = rows * (kinds + copies * (4 if recipe.compute_dtype == "fp32" else 2))
    if (size := per_pair * tokens**2) <= _LARGE_MASK_BYTES:
        return []
    message = (
        f"the masks of packed rows of {tokens:,} tokens take {format_bytes(size)} on each GPU, with a float "
        f"copy in {copies} of {layers} layers (sdpa: {chosen.reason})"
    )
    longest, limit = math.isqrt(_LARGE_MASK_BYTES // per_pair), format_bytes(_LARGE_MASK_BYTES)
    auto = "leave `model.attn_implementation` at auto, or " if chosen.reason == WRITTEN else ""
    return [
        Notice(
            "attention-mask-large",
            message,
            hint=f"{auto}`--set data.max_length={longest}` keeps them at {limit}",
        )
    ]


def stands_for(live: str, kernel: str) -> bool:
    """Return whether `live` is an allowed replacement of the requested `kernel`.

    transformers may replace a flash kernel: by one from the hub if its package is not installed and `kernels`
    is, or by the model's own (`_check_and_adjust_attn_implementation`).
    """
    return live == kernel or (is_flash_kernel(live) and is_flash_kernel(kernel))


def has_variable_lengths(kernel: str | None) -> bool:
    """Return whether a kernel separates packed examples by their lengths, without a mask."""
    if kernel is None:
        return False
    masks = AttentionMaskInterface()
    return is_flash_kernel(kernel) or masks.get(kernel) is masks["flash_attention_2"]
