"""Keep inputs of recomputed layers in host memory: copied out while the layer computes, and back during the backward of the next layer.

torch's `save_on_cpu` copies on the compute stream, which then waits for the host link twice per layer. Here a separate stream copies:
out during the layer's forward, after which the source memory may be reused; back when the layer above starts its backward, so that
the input of one more layer is on the device at that time.

Activation checkpointing of decoder layers with preserved random state, so that dropout draws the same mask twice.

Accelerate's FSDP2 path recomputes with `preserve_rng_state=False`: with dropout, the gradients are then not those of the
loss. A layer's `forward` is replaced inside FSDP's hooks, so that the unit is gathered once for recomputation and
backward, and parameter names do not change.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from fsdp_tune.model.internals.torch_internals import ATTENTION_OPERATORS, SCALED_MM
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(eq=False)
class _Inputs:
    """Saved inputs of one layer in one forward."""

    below: weakref.ref[_Inputs] | None
    """Inputs of the layer below; the reference is dead after its backward."""
    stay: bool
    kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Copies on the host, or the original tensors if they stay."""
    back: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """Copies on the device, complete or in flight, by index."""
    arrived: Any = None


class HostCopies:
    """The host copies of one model. All its layers copy on one stream, in order."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._leaving: list[tuple[Any, torch.Tensor]] = []
        self._last: weakref.ref[_Inputs] | None = None

    @contextlib.contextmanager
    def of_layer(self, *, stay: bool) -> Iterator[None]:
        """Save the inputs of one layer during its forward. `stay` is for the last layer, whose inputs the backward needs immediately."""
        inputs = _Inputs(self._last, stay)
        self._last = weakref.ref(inputs)
        with saved_tensors_hooks(functools.partial(self._pack, inputs), self._unpack):
            yield
        for departed, _ in self._leaving:
            self._current().wait_event(departed)
        self._leaving.clear()

    def _pack(self, inputs: _Inputs, tensor: torch.Tensor) -> tuple[_Inputs, int] | torch.Tensor:
        tensor = tensor.detach()
        if not tensor.numel():
            return tensor  # torch 2.11 also saves an empty tensor
        if not inputs.stay:
            self._device = tensor.device
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._leaving.append((self._copy(tensor, host), tensor))
            tensor = host
        inputs.kept.append(tensor)
        return inputs, len(inputs.kept) - 1

    def _unpack(self, packed: tuple[_Inputs, int] | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        inputs, index = packed
        below = inputs.below() if inputs.below is not None else None
        if inputs.stay:
            tensor = inputs.kept[index]
        else:
            if index not in inputs.back:
                self._fetch(inputs)
            self._current().wait_event(inputs.arrived)
            tensor = inputs.back[index]
        if below is not None and not below.stay and not below.back:
            self._fetch(below)
        return tensor

    def _fetch(self, inputs: _Inputs) -> None:
        """Start copying inputs back to the device. The started backward uses them all, so no memory is freed while a copy is in flight."""
        for index, host in enumerate(inputs.kept):
            inputs.back[index] = torch.empty_like(host, device=self._device)
            inputs.arrived = self._copy(host, inputs.back[index])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Copy after all work issued so far, since the allocator relies on the order of the compute stream. Return the completion event."""
        module = self._module
        if self._stream is None:
            self._stream = module.Stream(priority=0)
        self._stream.wait_stream(self._current())
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _current(self) -> Any:
        return self._module.current_stream()

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._device)


aten = torch.ops.aten


# Attention and matrix products have most of a layer's FLOPs; the other operations are cheap to recompute.
@functools.cache
def _attention_operators() -> frozenset[Any]:
    return frozenset(name.get() for name in ATTENTION_OPERATORS)


# Unlike in torchtitan, top-k is not saved: transformers' routers divide its values in place, and saved values must not change.
@functools.cache
def _products() -> frozenset[Any]:
    return frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, SCALED_MM.get()})


def _is_attention(op: Any) -> bool:
    """Return whether an operator is torch's attention, variable-length or not, or the forward of a flash-attn package
    (`flash_attn::_flash_attn_varlen_forward`, `flash_attn_3::fwd` and similar)."""
    if op in _attention_operators():
        return True
    namespace, _, name = str(op).partition(".")  # `flash_attn._flash_attn_varlen_forward.default`
    name = name.partition(".")[0]
    is_varlen = (namespace, name) == ("torch_attn", "_varlen_attn")
    return is_varlen or (namespace.startswith("flash_attn") and name.endswith(("forward", "fwd")))


_DROPOUT = frozenset({"dropout_p", "p_dropout"})
"""The argument in torch's operators and in those of the flash-attn packages."""


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an attention operator draws a dropout mask. If its saved result were used instead, it would not advance the random
    generator when recomputing, and all later masks of the layer would differ from those of the forward."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.name in _DROPOUT:
            return bool(args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value))
    return False


class _SaveAttentionAndEverySecondMatmul:
    """Save attention without dropout, and every second matrix product. Stateful, so one per forward; torch calls it in the same order when
    recomputing."""

    def __init__(self) -> None:
        self.matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if _is_attention(op):
            return CheckpointPolicy.PREFER_RECOMPUTE if _draws(op, args, kwargs) else CheckpointPolicy.MUST_SAVE
        if op in _products():
            self.matmuls[context.is_recompute] += 1
            if self.matmuls[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_SaveAttentionAndEverySecondMatmul())


def checkpointed_layers(recipe: Recipe, model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return the decoder layers that the recipe recomputes: every n-th, regardless of the wrap policy."""
    if recipe.fsdp.activation_checkpointing == "none":
        return []
    return decoder_layers(model, recipe.layer_classes)[:: recipe.fsdp.activation_checkpointing_every]


def recompute_activations(recipe: Recipe, model: PreTrainedModel) -> None:
    """Make the recomputed layers drop their activations in the forward. Call it before wrapping."""
    layers = checkpointed_layers(recipe, model)
    copies = HostCopies() if recipe.fsdp.activation_checkpointing_offload else None
    for _, layer in layers:
        layer.forward = _checkpointed(  # type: ignore[method-assign]
            layer,
            selective=recipe.fsdp.activation_checkpointing == "selective",
            copies=copies,
            is_uppermost=layer is layers[-1][1],
        )
        layer.recomputes = recipe.fsdp.activation_checkpointing  # type: ignore[assignment]  # for the read-back


def _checkpointed(layer: nn.Module, *, selective: bool, copies: HostCopies | None, is_uppermost: bool) -> Callable[..., Any]:
    layer.recomputed_forward = layer.forward  # type: ignore[assignment]  # the compiler may replace it

    @functools.wraps(layer.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        original: Any = layer.recomputed_forward
        if not (layer.training and torch.is_grad_enabled()):
            return original(*args, **kwargs)
        options: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
        saves = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=True, **options)
        if copies is not None:
            of_own, own = _by_own_tensors(original, args, kwargs)
            if own:
                with copies.of_layer(stay=is_uppermost):
                    return saves(of_own, *own)
        return saves(original, *args, **kwargs)

    return forward


def _by_own_tensors(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Return the call as a function of the layer's own tensors, those with a gradient; inputs shared by all layers are bound to it."""
    values = {**dict(enumerate(args)), **kwargs}
    own = {key: value for key, value in values.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    shared: dict[Any, Any] = {key: None if key in own else value for key, value in values.items()}
    positions, names, owned = range(len(args)), tuple(kwargs), tuple(own)

    def call(*tensors: torch.Tensor) -> Any:
        filled = {**shared, **dict(zip(owned, tensors, strict=True))}
        return function(*(filled[position] for position in positions), **{name: filled[name] for name in names})

    return call, list(own.values())
