"""Activation checkpointing of decoder layers with preserved random state, so that dropout draws the same mask
twice.

Accelerate's FSDP2 path recomputes with `preserve_rng_state=False`: with dropout, the gradients are then not
those of the loss. A layer's `forward` is replaced inside FSDP's hooks, so that the unit is gathered once for
recomputation and backward, and parameter names do not change.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)
from transformers import PreTrainedModel

from fsdp_tune.model.internals.torch_internals import (
    ATTENTION_OPERATORS,
    FORWARD_PREFETCH,
    FSDP_STATE,
    SCALED_MM,
    SCHEMA,
    observing_mode,
)
from fsdp_tune.model.shard.expert_parallel import divided_experts
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.model.shard.host_copies import HostCopies
from fsdp_tune.model.shard.routed_once import RoutedOnce
from fsdp_tune.recipe.schema.recipe import Recipe

aten = torch.ops.aten


# Attention and matrix products have most of a layer's FLOPs; the other operations are cheap to recompute.
@functools.cache
def _attention_operators() -> frozenset[object]:
    return frozenset(name.get() for name in ATTENTION_OPERATORS)


# Unlike in torchtitan, top-k is not saved: transformers' routers divide its values in place, and saved values
# must not change.
@functools.cache
def _products() -> frozenset[object]:
    return frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, SCALED_MM.get()})


def _is_attention(op: object) -> bool:
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
        if _is_attention(op):
            return (
                CheckpointPolicy.PREFER_RECOMPUTE if _draws(op, args, kwargs) else CheckpointPolicy.MUST_SAVE
            )
        if op in _products():
            self.matmuls[context.is_recompute] += 1
            if self.matmuls[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_SaveAttentionAndEverySecondMatmul())


# ---- Whether a layer computes again what its forward computed

_SAMPLED_ALONG_DIMENSION = 16


_ALLOWED = {torch.float32: 1e-3, torch.float64: 1e-3}


_ALLOWED_IN_HALF_PRECISION = 5e-2
"""Relative, of sampled values of a product. The same operands in the same kernel: only one that adds in any
order gives a difference."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some values of a product or of attention, in fp32."""

    name: str
    values: torch.Tensor
    allowed: float

    @classmethod
    def of(cls, op: Any, output: torch.Tensor) -> _Sample:
        some = tuple(slice(None, None, max(1, size // _SAMPLED_ALONG_DIMENSION)) for size in output.shape)
        allowed = _ALLOWED.get(output.dtype, _ALLOWED_IN_HALF_PRECISION)
        return cls(op.overloadpacket.__name__, output[some].to(torch.float32, copy=True), allowed)


def _sampling(samples: list[_Sample]) -> contextlib.AbstractContextManager[object]:
    """Take samples of the matrix products and attention that run in the context, or are answered by a mode
    around it."""

    def see(op: object, result: object) -> None:
        if op in _products() or _is_attention(op):
            output = result[0] if isinstance(result, tuple | list) else result
            if type(output) is torch.Tensor:
                samples.append(_Sample.of(op, output.detach()))

    return observing_mode(see_result=see)


class RecomputationCheck:
    """While it is entered, compares matrix products and attention of recomputed layers with those of their
    forward.

    A difference means that gradients are not those of the loss: a kernel wrote over a value that is kept for
    the backward (autograd counts no writes of Triton), a dropout mask was drawn differently, or an input had
    changed before it came back from the host.
    """

    entered: ClassVar[RecomputationCheck | None] = None

    def __init__(self) -> None:
        self._layers: list[tuple[str, list[_Sample], list[_Sample]]] = []

    def __enter__(self) -> Self:
        RecomputationCheck.entered = self
        return self

    def __exit__(self, *_: object) -> None:
        RecomputationCheck.entered = None

    def contexts(self, layer: str, inner: Callable[[], tuple[object, object]]) -> tuple[object, object]:
        """Return contexts of one forward of a layer and of its recomputation, within those of `inner`."""
        samples: tuple[list[_Sample], list[_Sample]] = [], []
        self._layers.append((layer, *samples))
        return tuple(
            _nested(context, _sampling(found)) for context, found in zip(inner(), samples, strict=True)
        )  # type: ignore[return-value]

    def differences(self) -> list[str]:
        """Return a sentence for each product that differs. Waits for the device once."""
        # it may end earlier
        pairs = [
            (layer, *pair) for layer, first, again in self._layers for pair in zip(first, again, strict=False)
        ]
        if not pairs:
            return []
        shares = torch.stack([_distance(one.values, other.values) for _, one, other in pairs]).tolist()
        return [
            f"`{layer}`: `{one.name}` is {share:.0%} off when the layer is recomputed"
            for (layer, one, _), share in zip(pairs, shares, strict=True)
            if share > one.allowed
        ]


@contextlib.contextmanager
def _nested(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


def _distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the distance relative to the norm; 1 for other shapes, NaN where a value is not finite."""
    if one.shape != other.shape:
        return one.new_ones(())
    return (other - one).norm() / one.norm().clamp_min(torch.finfo(torch.float32).tiny)


def checkpointed_layers(recipe: Recipe, model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the decoder layers that the recipe recomputes: every n-th, regardless of the wrap policy."""
    if recipe.fsdp.activation_checkpointing == "none":
        return []
    return decoder_layers(model, recipe.layer_classes)[:: recipe.fsdp.activation_checkpointing_every]


def recompute_activations(recipe: Recipe, model: PreTrainedModel) -> None:
    """Make the recomputed layers drop their activations in the forward. Call it before wrapping."""
    layers = checkpointed_layers(recipe, model)
    copies = HostCopies() if recipe.fsdp.activation_checkpointing_offload else None
    for name, layer in layers:
        layer.forward = _checkpointed(  # type: ignore[method-assign]
            name,
            layer,
            contexts=_contexts(recipe, name, layer),
            copies=copies,
            is_uppermost=layer is layers[-1][1],
        )
        layer.recomputes = recipe.fsdp.activation_checkpointing  # type: ignore[assignment]  # for the read-back


def _contexts(recipe: Recipe, name: str, layer: nn.Module) -> Callable[[], tuple[Any, Any]] | None:
    """Return what makes the contexts of a layer's forward and of its recomputation; None if it needs none."""
    contexts: Callable[[], tuple[Any, Any]] | None = None
    if divided_experts(recipe, layer):
        contexts = lambda: RoutedOnce(name).contexts()  # noqa: E731
    elif recipe.fsdp.activation_checkpointing == "selective":
        contexts = _selective_contexts
    if recipe.is_sharded and recipe.fsdp.version == 2 and recipe.fsdp.forward_prefetch:
        return functools.partial(_prefetching_once, layer, contexts or noop_context_fn)
    return contexts


def _prefetching_once(layer: nn.Module, inner: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the contexts of `inner`, where the recomputation does not prefetch what follows the layer in a
    forward.

    A unit inside of the layer (divided experts, wrapping by size) runs its forward again in the backward. It
    would gather the next layer, whose backward has ended, and which would stay gathered until all backwards
    have.
    """
    first, again = inner()
    return first, _nested(_without_forward_prefetch(layer), again)


@contextlib.contextmanager
def _without_forward_prefetch(layer: nn.Module) -> Iterator[None]:
    states = [FSDP_STATE.of(module)() for module in layer.modules() if isinstance(module, FSDPModule)]
    prefetched = [FORWARD_PREFETCH.of(state) for state in states]
    for state in states:
        FORWARD_PREFETCH.set(state, [])
    try:
        yield
    finally:
        for state, units in zip(states, prefetched, strict=True):
            FORWARD_PREFETCH.set(state, units)


def _checkpointed(
    name: str,
    layer: nn.Module,
    *,
    contexts: Callable[[], tuple[Any, Any]] | None,
    copies: HostCopies | None,
    is_uppermost: bool,
) -> Callable[..., object]:
    layer.recomputed_forward = layer.forward  # type: ignore[assignment]  # the compiler may replace it

    @functools.wraps(layer.forward)
    def forward(*args: Any, **kwargs: object) -> object:
        original: Any = layer.recomputed_forward
        if not (layer.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        options: dict[str, object] = {"context_fn": contexts} if contexts is not None else {}
        if (check := RecomputationCheck.entered) is not None:
            options["context_fn"] = functools.partial(check.contexts, name, contexts or noop_context_fn)
        saves = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=True, **options)
        if copies is not None:
            of_own, own = _by_own_tensors(original, args, kwargs)
            if own:
                with copies.of_layer(stay=is_uppermost):
                    return saves(of_own, *own)
        return saves(original, *args, **kwargs)

    return forward


def _by_own_tensors(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[Callable[..., object], list[object]]:
    """Return the call as a function of the layer's own tensors, those with a gradient; inputs shared by all
    layers are bound to it."""
    values = {**dict(enumerate(args)), **kwargs}
    own = {
        key: value for key, value in values.items() if isinstance(value, torch.Tensor) and value.requires_grad
    }
    shared: dict[object, object] = {key: None if key in own else value for key, value in values.items()}
    positions, names, owned = range(len(args)), tuple(kwargs), tuple(own)

    def call(*tensors: torch.Tensor) -> object:
        filled = {**shared, **dict(zip(owned, tensors, strict=True))}
        return function(
            *(filled[position] for position in positions), **{name: filled[name] for name in names}
        )

    return call, list(own.values())
