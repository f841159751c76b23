"""Trace the operators of one micro-batch, forward and backward, collectives included, and report their
dtypes."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from typing import Any, Self

import torch

from fsdp_tune.model.internals.torch_internals import OBSERVING_MODE, observing_mode
from fsdp_tune.model.nested_tensors import tensors_in
from fsdp_tune.model.shard.local import multiplied_as
from fsdp_tune.recipe.rules.training import rounds_stochastically
from fsdp_tune.recipe.schema.recipe import Recipe

# Operator name → its part of the step. Only operators that determine numerics are listed; the rest is
# elementwise.
_KINDS = {
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "_grouped_mm": "matmul",
    "grouped_mm_fallback": "matmul",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_cudnn_attention": "attention",
    "_scaled_dot_product_attention_math": "attention",
    "_varlen_attn": "attention",
    "_softmax": "attention",
    "native_layer_norm": "norm",
    "_fused_rms_norm": "norm",
    "rsqrt": "norm",  # the norms that transformers writes out: x * rsqrt(mean(x²) + ε)
    "_log_softmax": "loss",
    "nll_loss_forward": "loss",
    "linear_cross_entropy": "loss",
    "_reduce_scatter_base_": "reduce",
    "reduce_scatter_": "reduce",
    "reduce_scatter_tensor": "reduce",
    "allreduce_": "reduce",
    "all_reduce": "reduce",
    "_allgather_base_": "gather",
    "all_gather_into_tensor": "gather",
}


LOW = ("bfloat16", "float16")


MANY_RANKS = 64
"""From here on the rounding of a bf16 sum over ranks is as large as the gradient noise of a usual batch:
2**-8 per addition."""


class DtypeAudit:
    """Counts floating-point dtypes by kind of operator while it is active. Nothing is compiled in it.

    The compiler marks a function that it first meets under a dispatch mode as one to skip, permanently and
    without a message: the layers of `kernels.compile: true` would stay uncompiled in every later step too.
    With a `reason` not to audit, nothing is counted.
    """

    def __init__(self, reason: str | None = None) -> None:
        self._is_on = reason is None
        self._seen: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._observing = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if not self._is_on:
            return self
        self._observing.enter_context(torch.compiler.set_stance("force_eager"))
        self._observing.enter_context(observing_mode(self._see))
        return self

    def __exit__(self, *_: object) -> None:
        self._observing.close()

    def _see(self, func: Any, args: tuple[object, ...]) -> None:
        kind = _KINDS.get(func.overloadpacket.__name__)
        if kind is not None:
            for tensor in tensors_in(args):
                # a unit of several dtypes
                if tensor.is_floating_point() or (kind == "gather" and tensor.dtype == torch.uint8):
                    self._seen[kind][str(multiplied_as(tensor)).removeprefix("torch.")] += 1
                    break

    def report(self) -> dict[str, dict[str, int]]:
        """kind → dtype → number of calls."""
        return {kind: dict(sorted(counts.items())) for kind, counts in sorted(self._seen.items())}


def why_not_audited(recipe: Recipe) -> str | None:
    """Return why the operations of a micro-batch cannot be observed; None if they can."""
    if not OBSERVING_MODE.exists():
        return str(OBSERVING_MODE.refused())
    # As single operations it would hold the scores of all tokens, and under a dispatch mode torch refuses it.
    if recipe.model.attn_implementation == "flex_attention":
        return "`flex_attention` computes only in compiled code"
    return None


def warnings_of(recipe: Recipe, report: dict[str, dict[str, int]]) -> list[str]:
    """Return warnings for operations in the trace that lose precision unexpectedly."""
    found: list[str] = []
    if (reason := why_not_audited(recipe)) is not None:
        found.append(f"the dtypes in which operations ran are not known: {reason}")
    if recipe.model.dtype == "bf16" and not rounds_stochastically(recipe):
        found.append(
            "master weights are bf16: updates smaller than about 1/256 of a weight are lost "
            "(model.dtype: fp32 keeps them)"
        )
    for kind, what in (("norm", "norms"), ("loss", "the loss")):
        low = [dtype for dtype in report.get(kind, {}) if dtype in LOW]
        if low:
            found.append(f"{what} ran in {low[0]}")
    low = [dtype for dtype in report.get("reduce", {}) if dtype in LOW]
    if low and recipe.world_size >= MANY_RANKS:
        found.append(
            f"gradients of {recipe.world_size} ranks were summed in {low[0]} (precision.reduce_dtype: fp32 "
            "costs twice the traffic)"
        )
    return found
