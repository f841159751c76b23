"""torch's own variable-length FlashAttention as an attention function of transformers: packed rows need no
mask and no flash-attn package.

`torch.nn.attention.varlen` computes on CUDA in bf16 and fp16. It has no dropout, soft-cap, sinks or position
bias.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from fsdp_tune.core.families import has_attention_dropout, has_attention_soft_cap
from fsdp_tune.model.internals.transformers_internals import (
    ATTENTION,
    SUPPORTS_INTERFACE,
    SUPPORTS_SDPA,
    attention_of,
)
from fsdp_tune.recipe.schema.attention_kernels import TORCH_VARLEN

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
        return (
            f"torch's variable-length attention has no sinks and no bias, and {name}, without support "
            "for sdpa, may use them"
        )
    if not SUPPORTS_INTERFACE.of(model_class):
        return f"{name} does not pass the lengths of examples to its attention"
    return None


def torch_varlen_attention(
    module: nn.Module,
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
    """Return the attention output [batch, tokens, heads, width] of states [batch, heads, tokens, width], and
    None for the weights.

    `cu_seq_lens_q` [examples + 1] int32 gives the ends of examples in the batch flattened to batch × tokens,
    none longer than `max_length_q`. Without it, each row is one example; padding at its end is harmless,
    since attention is causal.

    Raises: ValueError if the model uses something that the kernel does not have.
    """
    batch, heads, tokens, width = query.shape
    used = {
        "a mask": attention_mask,
        "dropout": dropout or None,
        "a soft-cap": softcap,
        "sinks": s_aux,
        "a position bias": position_bias,
    }
    used["a cache of keys"] = key if key.shape[2] != tokens else None
    if unsupported := [name for name, given in used.items() if given is not None]:
        raise ValueError(f"`attn_implementation: {TORCH_VARLEN}` does not support {', '.join(unsupported)}")
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        max_length_q = tokens
    options: dict[str, Any] = {"enable_gqa": heads != key.shape[1]} if "enable_gqa" in _OPTIONS else {}
    rows_q, rows_k, rows_v = varlen_rows(query, key, value)
    causal = module.is_causal if is_causal is None else is_causal
    # transformers includes the token itself in the window; the kernel's window is the number of tokens before
    # it, -1 for all.
    window = (-1 if sliding_window is None else sliding_window - 1, 0) if causal else (-1, -1)
    scale = width**-0.5 if scaling is None else scaling
    ends, longest = cu_seq_lens_q, max_length_q
    output = varlen_attn(
        rows_q, rows_k, rows_v, ends, ends, longest, longest, scale=scale, window_size=window, **options
    )
    assert isinstance(output, torch.Tensor)
    return output[..., : value.shape[-1]].unflatten(0, (batch, tokens)), None


def varlen_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states [batch, heads, tokens, width] as the kernel takes them, [batch × tokens, heads, width],
    all in the dtype of values.

    Norms and rotary embeddings may leave queries and keys in fp32; values come from a matrix product.
    """
    if "enable_gqa" not in _OPTIONS and (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    width, dtype = query.shape[-1], value.dtype
    return _flattened(query, width, dtype), _flattened(key, width, dtype), _flattened(value, width, dtype)


def _flattened(states: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return states [batch, heads, tokens, any] as [batch × tokens, heads, `width` rounded up] in `dtype`,
    filled with zeros.

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
    """Within the context, sdpa replaces torch's variable-length attention, which has no padding on the left
    and no cache of keys."""
    kernel = attention_of(config)
    if kernel == TORCH_VARLEN:
        ATTENTION.set(config, "sdpa")
    try:
        yield
    finally:
        if kernel == TORCH_VARLEN:
            ATTENTION.set(config, kernel)
