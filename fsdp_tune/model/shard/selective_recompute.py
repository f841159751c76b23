"""What `fsdp.activation_checkpointing: selective` saves of a layer's forward: attention, and every second
matrix product. The rest is recomputed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_tune.model.internals.torch_internals import ATTENTION_OPERATORS, SCALED_MM, SCHEMA

aten = torch.ops.aten


# Attention and matrix products have most of a layer's FLOPs; the other operations are cheap to recompute.
@functools.cache
def _attention_operators() -> frozenset[object]:
    return frozenset(name.get() for name in ATTENTION_OPERATORS)


# Unlike in torchtitan, top-k is not saved: transformers' routers divide its values in place, and saved values
# must not change.
@functools.cache
def products() -> frozenset[object]:
    """Return the operators that multiply matrices."""
    return frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, SCALED_MM.get()})


def is_attention(op: object) -> bool:
    """Return whether an operator is torch's attention, variable-length or not, or the forward of a flash-attn
    package (`flash_attn::_flash_attn_varlen_forward`, `flash_attn_3::fwd` and similar)."""
    if op in _attention_operators():
        return True
    namespace, _, name = str(op).partition(".")  # `flash_attn._flash_attn_varlen_forward.default`
    name = name.partition(".")[0]
    is_varlen = (namespace, name) == ("torch_attn", "_varlen_attn")
    return is_varlen or (namespace.startswith("flash_attn") and name.endswith(("forward", "fwd")))


_DROPOUT = frozenset({"dropout_p", "p_dropout"})
"""The argument in torch's operators and in those of the flash-attn packages."""


def _draws(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Return whether an attention operator draws a dropout mask. If its saved result were used instead, it
    would not advance the random generator when recomputing, and all later masks of the layer would differ
    from those of the forward."""
    for index, argument in enumerate(SCHEMA.of(op).arguments):
        if argument.name in _DROPOUT:
            return bool(
                args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            )
    return False


class _SaveAttentionAndEverySecondMatmul:
    """Save attention without dropout, and every second matrix product. Stateful, so one per forward; torch
    calls it in the same order when recomputing."""

    def __init__(self) -> None:
        self.matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        if is_attention(op):
            return (
                CheckpointPolicy.PREFER_RECOMPUTE if _draws(op, args, kwargs) else CheckpointPolicy.MUST_SAVE
            )
        if op in products():
            self.matmuls[context.is_recompute] += 1
            if self.matmuls[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    """Return the contexts of a forward and of its recomputation (`context_fn` of torch's `checkpoint`)."""
    return create_selective_checkpoint_contexts(_SaveAttentionAndEverySecondMatmul())
