"""Keep the current module, phase and decoder layer of a recorded step, in the forward and in the backward.

Hooks are torch's global ones: they run before a module's own, and therefore before FSDP's, so a layer's
gathering and resharding count as the layer's. In the backward a layer begins where the gradient of its
output arrives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel

from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.planner.trace.recorder import PHASE, Place, Recorder
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the bare model's modules by identity, which FSDP1 and DDP keep although they rename
    modules."""

    names: dict[int, str]
    layers: dict[int, int]
    """Index of each decoder layer."""
    layer_names: tuple[str, ...]
    head: int

    def layer_of(self, name: str) -> int:
        """Return the decoder layer of a parameter or buffer; -1 outside of decoder layers."""
        return next(
            (index for index, prefix in enumerate(self.layer_names) if name.startswith(f"{prefix}.")), -1
        )

    @staticmethod
    def of(recipe: Recipe, model: PreTrainedModel) -> Names:
        layers = decoder_layers(model, recipe.layer_classes)
        return Names(
            names={id(module): name for name, module in model.named_modules()},
            layers={id(module): index for index, (_, module) in enumerate(layers)},
            layer_names=tuple(name for name, _ in layers),
            head=id(model.get_output_embeddings()),
        )


@contextlib.contextmanager
def scopes(bare: Names, recorder: Recorder) -> Iterator[None]:
    """Keep `recorder.place` up to date while the model runs."""
    tracker = _Tracker(recorder.place, bare)
    handles = [register_module_forward_pre_hook(tracker.enter), register_module_forward_hook(tracker.leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Tracker:
    def __init__(self, place: Place, bare: Names) -> None:
        self.place, self.names, self.layers, self.head = place, bare.names, bare.layers, bare.head
        self.outer: list[str] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return  # FSDP1's and DDP's wrappers
        self.outer.append(self.place.module)
        self.place.module = name
        if self.place.phase == PHASE["backward"]:
            return  # recomputation: the layer is already set
        if id(module) in self.layers:
            self.place.layer = self.layers[id(module)]
            if self.place.layer == 0:
                self._when_gradient_arrives(args, layer=-1, name="", in_head=False)
        if id(module) == self.head:
            self.place.in_head = True
            if self.place.phase != PHASE["evaluation"]:
                self.place.phase = PHASE["loss"]
            self._when_gradient_arrives(args, layer=-1, name="", in_head=False)

    def leave(self, module: nn.Module, _args: object, output: Any) -> None:
        if id(module) not in self.names:
            return
        self.place.module = self.outer.pop()
        if self.place.phase == PHASE["backward"]:
            return
        layer = self.layers.get(id(module))
        if layer is not None:
            self._when_gradient_arrives(output, layer=layer, name=self.names[id(module)], in_head=False)
            if layer == max(self.layers.values()):
                self.place.layer = -1

    def _when_gradient_arrives(self, tensors: Any, *, layer: int, name: str, in_head: bool) -> None:
        """Set the layer when the gradient of the first differentiable tensor of `tensors` arrives."""
        found = (
            [tensors]
            if isinstance(tensors, torch.Tensor)
            else [t for t in tensors if isinstance(t, torch.Tensor)]
        )
        chosen = next((tensor for tensor in found if tensor.requires_grad), None)
        if chosen is None:
            return
        place = self.place

        def arrived(_gradient: torch.Tensor) -> None:
            place.layer, place.module, place.in_head = layer, name, in_head

        chosen.register_hook(arrived)
