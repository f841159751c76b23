"""torch's own variable-length FlashAttention as an attention function of transformers: packed rows need no mask and no flash-attn package.

`torch.nn.attention.varlen` computes on CUDA in bf16 and fp16. It has no dropout, soft-cap, sinks or position bias.

Select the attention kernel of a model on this device, for `model.attn_implementation: auto`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from fsdp_tune.core.errors import Notice, Where, usage_error
from fsdp_tune.core.families import has_attention_dropout, has_attention_soft_cap, layer_types, widest_head
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model.internals.transformers_internals import (
    ATTENTION,
    OWN_FLASH_KERNELS,
    SUPPORTS_FLASH,
    SUPPORTS_INTERFACE,
    SUPPORTS_SDPA,
    attention_of,
)
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.recipe.schema.kinds import SDPA_OR_EAGER, TORCH_VARLEN, is_flash_kernel
from fsdp_tune.recipe.schema.recipe import Recipe

_AMPERE = (8, 0)
_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
_WIDTH_MULTIPLE = 8
"""FlashAttention takes heads whose width is a multiple of this."""


def against_torch_varlen(config: PreTrainedConfig, model_class: Any) -> str | None:
    """Return why torch's variable-length attention cannot run this model here; None if it can.

    Without a GPU, the GPU of a plan is taken to be new enough.
    """
    name = model_class.__name__
    if missing := sorted({"scale", "window_size"} - _OPTIONS):
        return f"torch {torch.__version__} has variable-length attention without `{missing[0]}`"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _AMPERE:
        return "torch's variable-length attention needs an Ampere GPU or a newer one"
    if has_attention_dropout(config.get_text_config()):
        return "torch's variable-length attention has no dropout, and the model's attention uses it"
    if has_attention_soft_cap(config.get_text_config()):
        return f"torch's variable-length attention has no soft-cap, and {name} uses one"
    if not SUPPORTS_SDPA.of(model_class):
        return f"torch's variable-length attention has no sinks and no bias, and {name}, without support for sdpa, may use them"
    if not SUPPORTS_INTERFACE.of(model_class):
        return f"{name} does not pass the lengths of examples to its attention"
    return None


def torch_varlen_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention output [batch, tokens, heads, width] of states [batch, heads, tokens, width], and None for the weights.

    `cu_seq_lens_q` [examples + 1] int32 gives the ends of examples in the batch flattened to batch × tokens, none longer than
    `max_length_q`. Without it, each row is one example; padding at its end is harmless, since attention is causal.

    Raises: ValueError if the model uses something that the kernel does not have.
    """
    batch, heads, tokens, width = query.shape
    used = {"a mask": attention_mask, "dropout": dropout or None, "a soft-cap": softcap, "sinks": s_aux, "a position bias": position_bias}
    used["a cache of keys"] = key if key.shape[2] != tokens else None
    if unsupported := [name for name, given in used.items() if given is not None]:
        raise ValueError(f"`attn_implementation: {TORCH_VARLEN}` does not support {', '.join(unsupported)}")
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        max_length_q = tokens
    options: dict[str, Any] = {"enable_gqa": heads != key.shape[1]} if "enable_gqa" in _OPTIONS else {}
    rows_q, rows_k, rows_v = varlen_rows(query, key, value)
    causal = module.is_causal if is_causal is None else is_causal
    # transformers includes the token itself in the window; the kernel's window is the number of tokens before it, -1 for all.
    window = (-1 if sliding_window is None else sliding_window - 1, 0) if causal else (-1, -1)
    scale = width**-0.5 if scaling is None else scaling
    ends, longest = cu_seq_lens_q, max_length_q
    output = varlen_attn(rows_q, rows_k, rows_v, ends, ends, longest, longest, scale=scale, window_size=window, **options)
    assert isinstance(output, torch.Tensor)
    return output[..., : value.shape[-1]].unflatten(0, (batch, tokens)), None


def varlen_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states [batch, heads, tokens, width] as the kernel takes them, [batch × tokens, heads, width], all in the dtype of values.

    Norms and rotary embeddings may leave queries and keys in fp32; values come from a matrix product.
    """
    if "enable_gqa" not in _OPTIONS and (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    width, dtype = query.shape[-1], value.dtype
    return _flattened(query, width, dtype), _flattened(key, width, dtype), _flattened(value, width, dtype)


def _flattened(states: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return states [batch, heads, tokens, any] as [batch × tokens, heads, `width` rounded up] in `dtype`, filled with zeros.

    Values may be narrower than queries (multi-head latent attention).
    """
    rows = states.transpose(1, 2).flatten(0, 1).to(dtype)
    padding = width + -width % _WIDTH_MULTIPLE - rows.shape[-1]
    return F.pad(rows, (0, padding)) if padding else rows


AttentionInterface.register(TORCH_VARLEN, torch_varlen_attention)
# As for flash-attn: no mask, unless a caller passes one that hides tokens.
AttentionMaskInterface.register(TORCH_VARLEN, AttentionMaskInterface()["flash_attention_2"])


@contextmanager
def attention_with_masks(config: PreTrainedConfig) -> Iterator[None]:
    """Within the context, sdpa replaces torch's variable-length attention, which has no padding on the left and no cache of keys."""
    kernel = attention_of(config)
    if kernel == TORCH_VARLEN:
        ATTENTION.set(config, "sdpa")
    try:
        yield
    finally:
        if kernel == TORCH_VARLEN:
            ATTENTION.set(config, kernel)


_KEY = "model.attn_implementation"
_MAX_HEAD_WIDTH = 256
_HOPPER = (9, 0)
_LARGE_MASK_BYTES = 2**30


def choose_attention(recipe: Recipe, config: PreTrainedConfig) -> KernelChoice:
    """Choose a kernel: FlashAttention 3, else 2, if installed; else torch's variable-length attention; else SDPA; else eager.

    Each is chosen only if it suits the model. Raises: usage error if the recipe sets torch's variable-length attention and it does not.
    """
    requested = recipe.model.attn_implementation
    if requested not in ("auto", TORCH_VARLEN, SDPA_OR_EAGER):
        return KernelChoice(requested, WRITTEN)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    model_class: Any = found[0] if isinstance(found, tuple) else found
    is_old = requested == SDPA_OR_EAGER
    against = f"`{_KEY}: {SDPA_OR_EAGER}` excludes FlashAttention" if is_old else _against_flash(recipe, config, model_class)
    if requested == TORCH_VARLEN:
        if reason := against or against_torch_varlen(config, model_class):
            hint = "`auto` chooses a kernel that the model supports"
            raise usage_error("model-refused", f"`{_KEY}: {requested}`: {reason}", where=Where(key=_KEY), hint=hint)
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


def _flash_version(config: PreTrainedConfig) -> tuple[int | None, str]:
    """Return the newest usable version and its reason, by transformers' own checks for packages and a CUDA device."""
    if is_flash_attn_3_available():
        if has_attention_dropout(config.get_text_config()):
            against_3 = "FlashAttention 3 has no dropout, and the model's attention uses it"
        elif torch.cuda.get_device_capability() < _HOPPER:
            against_3 = "FlashAttention 3 needs a Hopper GPU"
        else:
            return 3, "FlashAttention 3 is installed"
    else:
        against_3 = "flash-attn-3 is not installed"
    if is_flash_attn_2_available():
        return 2, f"flash-attn is installed; {against_3}"
    return None, "flash-attn is not installed" if against_3.endswith("not installed") else f"flash-attn is not installed; {against_3}"


def live_attention(recipe: Recipe, model: PreTrainedModel) -> KernelChoice:
    """Return the attention kernel of the built model, which may differ from the chosen one."""
    chosen, live = choose_attention(recipe, model.config), attention_of(model.config)
    if chosen.value in ("auto", live):
        return KernelChoice(live, chosen.reason)
    return KernelChoice(live, f"transformers uses it instead of {chosen.value}")


def large_mask_notices(recipe: Recipe, config: PreTrainedConfig, layers: int, chosen: KernelChoice) -> list[Notice]:
    """Return a notice if the masks of packed rows and their copies take more than `_LARGE_MASK_BYTES` on a GPU.

    transformers makes a boolean mask [rows, 1, tokens, tokens] for each kind of layer; sdpa converts it to the compute dtype in each
    layer, and autograd saves this copy for the backward, in recomputed layers for one layer at a time.
    """
    if not recipe.data.packing or recipe.launch.device != "cuda" or chosen.value != "sdpa":
        return []
    recomputed = 0 if recipe.fsdp.activation_checkpointing == "none" else -(-layers // recipe.fsdp.activation_checkpointing_every)
    copies = layers - recomputed + min(1, recomputed)
    kinds = len(set(layer_types(config) or ["full_attention"]))
    rows, tokens = recipe.training.per_device_train_batch_size, recipe.data.max_length
    per_pair = rows * (kinds + copies * (4 if recipe.compute_dtype == "fp32" else 2))
    if (size := per_pair * tokens**2) <= _LARGE_MASK_BYTES:
        return []
    message = (
        f"the masks of packed rows of {tokens:,} tokens take {format_bytes(size)} on each GPU, with a float copy in {copies} of {layers} "
        f"layers (sdpa: {chosen.reason})"
    )
    longest, limit = math.isqrt(_LARGE_MASK_BYTES // per_pair), format_bytes(_LARGE_MASK_BYTES)
    auto = "leave `model.attn_implementation` at auto, or " if chosen.reason == WRITTEN else ""
    return [Notice("attention-mask-large", message, hint=f"{auto}`--set data.max_length={longest}` keeps them at {limit}")]


def stands_for(live: str, kernel: str) -> bool:
    """Return whether `live` is an allowed replacement of the requested `kernel`.

    transformers may replace a flash kernel: by one from the hub if its package is not installed and `kernels` is, or by the
    model's own (`_check_and_adjust_attn_implementation`).
    """
    return live == kernel or (is_flash_kernel(live) and is_flash_kernel(kernel))


def has_variable_lengths(kernel: str | None) -> bool:
    """Return whether a kernel separates packed examples by their lengths, without a mask."""
    if kernel is None:
        return False
    masks = AttentionMaskInterface()
    return is_flash_kernel(kernel) or masks.get(kernel) is masks["flash_attention_2"]
