"""Track the current module, phase and decoder layer, in the forward and in the backward.

Hooks are torch's global ones: they run before a module's own, and therefore before FSDP's, so a layer's gathering and
resharding count as the layer's. In the backward a layer begins where the gradient of its output arrives.

DDP under fake tensors. Its C++ reducer reads values in two places, and uses a single bucket in the first step.

The chunked loss in a trace at a micro-batch that represents any other (`blend.at_micro_batch`).

The number of slices depends on the micro-batch, so a single slice of a prime number of tokens is run and its records are marked. All
slices do the same work, and each frees its memory before the next begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PreTrainedModel

from fsdp_tune.model.internals.torch_internals import VERIFY_SHAPES
from fsdp_tune.model.kernels import head
from fsdp_tune.model.loading.assemble import Loaded, wrap_whole
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.planner.trace.device import STREAMS, nothing, replaced
from fsdp_tune.planner.trace.recorder import PHASE, Place, Recorder
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the bare model's modules by identity, which FSDP1 and DDP keep although they rename modules."""

    names: dict[int, str]
    layers: dict[int, int]
    """Index of each decoder layer."""
    layer_names: tuple[str, ...]
    head: int

    def layer_of(self, name: str) -> int:
        """Return the decoder layer of a parameter or buffer; -1 outside of decoder layers."""
        return next((index for index, prefix in enumerate(self.layer_names) if name.startswith(f"{prefix}.")), -1)

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

    def leave(self, module: nn.Module, _args: Any, output: Any) -> None:
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
        found = [tensors] if isinstance(tensors, torch.Tensor) else [t for t in tensors if isinstance(t, torch.Tensor)]
        chosen = next((tensor for tensor in found if tensor.requires_grad), None)
        if chosen is None:
            return
        place = self.place

        def arrived(_gradient: torch.Tensor) -> None:
            place.layer, place.module, place.in_head = layer, name, in_head

        chosen.register_hook(arrived)


COMPUTE, ALL_REDUCE = STREAMS.index("compute"), STREAMS.index("all-reduce")


def wrap_traceable(recipe: Recipe, model: PreTrainedModel, where: torch.device, recorder: Recorder, bare: Names) -> Loaded:
    """Wrap the model in DDP and record the sum of each gradient over the ranks as it becomes ready. Call while the recorder records.

    DDP allocates gradients in buckets when it wraps and never frees them. A bucket spans layers, so its memory and its sum are recorded
    for each parameter: the bytes are the same, and `planner.predict.timing` forms the buckets of later steps at any depth.
    """
    with VERIFY_SHAPES.replaced(nothing), recorder.hidden():  # it reads values
        loaded = wrap_whole(recipe, model, None, where)
    wrapped: Any = loaded.wrapped
    wrapped.register_comm_hook(recorder, _all_is_ready)
    wrapped.reducer = _Reducer(wrapped.reducer)

    def ready(parameter: torch.Tensor) -> None:
        if wrapped.require_backward_grad_sync:
            recorder.clock.wait(ALL_REDUCE, COMPUTE, recorder.clock.now)
            with recorder.on_stream(ALL_REDUCE):
                dist.all_reduce(parameter.grad)

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            recorder.hold(parameter.numel() * parameter.element_size(), "gradients", bare.layer_of(name))
            parameter.register_post_accumulate_grad_hook(ready)
    return loaded


class _Reducer:
    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _all_is_ready(recorder: Recorder, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook in place of the single bucket's sum. As in a run, the optimizer's stream waits for all sums."""
    recorder.clock.wait(COMPUTE, ALL_REDUCE, recorder.clock.now)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares the objects, and this module's annotations are strings.
_all_is_ready.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


ENDLESS_TOKENS = 1 << 40


def most_tokens(vocabulary: int) -> int:
    """Return the largest number of tokens in a slice."""
    return head.slice_tokens(ENDLESS_TOKENS, vocabulary)


@contextlib.contextmanager
def one_slice(recorder: Recorder) -> Iterator[None]:
    """Run only the first slice, of `recorder.slice_tokens` tokens; if that is 0, leave the slices as they are."""
    if not recorder.slice_tokens:
        yield
        return

    def first(start: int, _stop: int, _step: int) -> Iterator[int]:
        recorder.in_slice = True
        yield start
        recorder.in_slice = False

    with (
        replaced(head, "slice_tokens", lambda *_: recorder.slice_tokens),
        replaced(head, "range", first),
    ):
        yield
