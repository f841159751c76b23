"""Names of attention kernels, and what a name says of its kernel."""

from __future__ import annotations

TORCH_VARLEN = "torch_varlen"
"""This package's name of the kernel `torch.nn.attention.varlen`."""
SDPA_OR_EAGER = "sdpa_or_eager"
"""The kernel that `auto` chooses on a GPU without FlashAttention: SDPA, or eager for a model class without it
(GPT-OSS has sinks)."""


def is_flash_kernel(attn_implementation: str) -> bool:
    """Return whether `attn_implementation` is a flash kernel, by transformers' rule
    (`is_flash_attention_requested`).

    Examples: `flash_attention_2`, `kernels-community/flash-attn2@main`.
    """
    return "flash" in attn_implementation


def needs_cuda(attn_implementation: str) -> bool:
    """Return whether an attention kernel is CUDA code without a version for the CPU."""
    return is_flash_kernel(attn_implementation) or attn_implementation == TORCH_VARLEN
