"""Model FLOPs utilisation, by the convention of PaLM (arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    active_parameters: int
    """Parameters that process a token: all of them, except in a mixture of experts."""
    trained_parameters: int
    """Of all parameters; a frozen one takes part in two of the three multiplications of a training step."""
    layers: int
    heads: int
    head_dim: int


def attended_length(lengths: Iterable[int]) -> float:
    """Tokens that a token attends to, over examples of these lengths: Σ length² / Σ length; 0 for none.

    A packed row counts as its examples, since no token attends across them; padding does not count.
    """
    total = squares = 0
    for length in lengths:
        total, squares = total + length, squares + length * length
    return squares / total if total else 0.0


def flops_per_token(model: ModelDimensions, length: float) -> float:
    """Return 6 N + 12 L H Q T: forward and backward with attention, not halved for causal masks, without recomputation.

    N is the number of active parameters; `length` is T: the length of the sequences, or `attended_length` if it varies. A frozen
    parameter counts 4: forward and the gradient of its input, but no gradient of its own.
    """
    frozen = max(0, model.active_parameters - model.trained_parameters)
    return 6.0 * model.active_parameters - 2.0 * frozen + 12.0 * model.layers * model.heads * model.head_dim * length


def mfu(model: ModelDimensions, length: float, tokens_per_second_per_device: float, peak_flops: float | None) -> float | None:
    """Return the share of one device's dense bf16 peak; None if the peak is unknown."""
    return None if peak_flops is None else flops_per_token(model, length) * tokens_per_second_per_device / peak_flops
