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
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel

from fsdp_tune.model.internals.torch_internals import FORWARD_PREFETCH, FSDP_STATE
from fsdp_tune.model.shard.expert_parallel import divided_experts
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.model.shard.host_copies import HostCopies
from fsdp_tune.model.shard.recomputation_check import RecomputationCheck, nested
from fsdp_tune.model.shard.routed_once import RoutedOnce
from fsdp_tune.model.shard.selective_recompute import selective_contexts
from fsdp_tune.recipe.schema.recipe import Recipe


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
        contexts = selective_contexts
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
    return first, nested(_without_forward_prefetch(layer), again)


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
