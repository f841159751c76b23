"""The versions of FlashAttention: on which GPUs each has kernels, and what it lacks."""

from __future__ import annotations

import re
from dataclasses import dataclass

GENERATIONS = {7: "Volta or Turing", 8: "Ampere or Ada", 9: "Hopper", 10: "Blackwell", 12: "RTX Blackwell"}
"""By the major number of the compute capability. Code for one generation does not run on a later one."""
_NAME = re.compile(r"flash[-_]att(?:entio)?n[-_]?([234])(?!\d)")


@dataclass(frozen=True, slots=True)
class FlashAttention:
    """One version, as its package is built for NVIDIA's GPUs."""

    version: int
    package: str
    generations: frozenset[int]
    """Major numbers of the compute capabilities that it has kernels for."""
    has_dropout: bool
    widest_head: int

    def against(self, name: str, capability: tuple[int, int]) -> str | None:
        """Return why it does not run on a GPU of this name and compute capability; None if it does."""
        return without_kernels(f"FlashAttention {self.version}", self.generations, name, capability)


def without_kernels(
    what: str, generations: frozenset[int], name: str, capability: tuple[int, int]
) -> str | None:
    """Return why code for these `generations` does not run on a GPU of this name and compute capability; None
    if it does."""
    major, minor = capability
    if major in generations:
        return None
    wanted = " and ".join(GENERATIONS[each] for each in sorted(generations))
    return f"{what} has kernels for {wanted}, and {name} has compute capability {major}.{minor}"


# Sources: the build lists of github.com/Dao-AILab/flash-attention (setup.py, hopper/setup.py,
# flash_attn/cute) in 2026. transformers checks a lower bound alone, so that FlashAttention 3 on Blackwell
# fails at the first step with "no kernel image".
FLASH_ATTENTION = (
    FlashAttention(3, "flash-attn-3", frozenset({9}), has_dropout=False, widest_head=256),
    FlashAttention(4, "flash-attn-4", frozenset({9, 10}), has_dropout=False, widest_head=128),
    FlashAttention(2, "flash-attn", frozenset({8, 9, 10, 12}), has_dropout=True, widest_head=256),
)
"""The fastest first, of those that run on one GPU."""


def flash_version(kernel: str) -> FlashAttention | None:
    """Return the version that a name of a kernel requests: `flash_attention_3`,
    `kernels-community/vllm-flash-attn3`."""
    found = _NAME.search(kernel)
    return next(
        (each for each in FLASH_ATTENTION if found is not None and each.version == int(found[1])), None
    )
