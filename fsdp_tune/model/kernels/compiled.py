"""Compile decoder layers with torch.compile: `kernels.compile`.

Compiled is each decoder layer separately, as in torchtitan: equal layers share one graph, and the code
between them (gathering, the loss) stays eager. A layer's `forward` is compiled, not its `__call__`: FSDP's
hooks and the gathering stay outside of the graph. The recomputation of the layer is inside, so that the
compiler chooses the tensors to keep within the recipe's policy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.recipe.schema.recipe import Recipe

BACKEND = "inductor"


GRAPHS_OF_A_LAYER = 5
"""Without gradients (the check before the first step, evaluation) one graph for the first shape and one for
others; in training one for the first width of a batch, one for any width, and one for the short last batch of
an epoch."""


_LIMIT_MESSAGE = "torch._dynamo hit config."


def choose_compile(recipe: Recipe) -> KernelChoice:
    return KernelChoice("true", WRITTEN) if recipe.kernels.compile else KernelChoice("false", "not requested")


def compile_layers(recipe: Recipe, model: PreTrainedModel) -> list[str]:
    """Compile each decoder layer and return the names. Call it after all changes to a layer's forward, and
    before wrapping.

    When a size first differs between batches, a second graph is compiled, in which it is a variable.
    """
    layers = decoder_layers(model, recipe.layer_classes)
    # Layers share code objects, and Dynamo's limit is per code object; above it they would run uncompiled.
    # Twice the expected number.
    settings: Any = torch.compiler.config
    settings.recompile_limit = max(
        settings.recompile_limit, 2 * expected_graphs(recipe, [layer for _, layer in layers])
    )
    # The number of packed examples differs between batches: a variable from the first graph on.
    settings.dynamic_sources = r".*\['cu_seq_lens_[qk]'\]"
    # Under DDP, Dynamo would split graphs at buckets, which fails with recomputation and is unnecessary for
    # single layers.
    internals.OPTIMIZE_DDP.set(False)
    internals.PRECOMPILED_HEADERS.set(False)
    # Dynamo does not compile a function that moves saved tensors to the host, so only the recomputed part is
    # compiled there.
    inside = "recomputed_forward" if recipe.fsdp.activation_checkpointing_offload else "forward"
    for _, layer in layers:
        name = inside if hasattr(layer, inside) else "forward"
        compiled = torch.compile(getattr(layer, name), backend=BACKEND)
        internals.COMPILED_FROM.of(compiled)  # otherwise the read-back could not recognise it
        setattr(layer, name, compiled)
    return [name for name, _ in layers]


def expected_graphs(recipe: Recipe, layers: Sequence[nn.Module]) -> int:
    """Return the largest number of graphs that the decoder layers should need; layers of one kind share their
    graphs.

    Recomputed layers have other graphs than the rest. With inputs on the host, the graph covers only the
    recomputed part, and a forward and its recomputation have one graph each.
    """
    fsdp = recipe.fsdp
    graphs = _kinds(layers) * GRAPHS_OF_A_LAYER
    if fsdp.activation_checkpointing == "none":
        return graphs
    return (
        graphs
        * (2 if fsdp.activation_checkpointing_every > 1 else 1)
        * (2 if fsdp.activation_checkpointing_offload else 1)
    )


def _kinds(layers: Sequence[nn.Module]) -> int:
    """Return the number of kinds of layers, by the properties that Dynamo guards on: classes of modules, and
    strings and booleans."""

    def kind(module: nn.Module) -> tuple[object, ...]:
        public = (
            (name, value)
            for name, value in vars(module).items()
            if not name.startswith("_") and name != "recomputes"
        )
        return (type(module), *((name, value) for name, value in public if isinstance(value, str | bool)))

    return len({tuple(kind(module) for module in layer.modules()) for layer in layers})


def is_compiled(layer: nn.Module) -> bool:
    """Return whether a layer is compiled, for a live module that FSDP1 may have wrapped."""
    return any(
        internals.COMPILED_FROM.exists(vars(layer).get(name)) for name in ("forward", "recomputed_forward")
    )


class CompileClock(logging.Handler):
    """Count compiled graphs, compile time of forward and backward, and functions that hit the limit. One
    instance per process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._fallbacks: list[str] = []
        # Dynamo reports a reached limit only in its log.
        logging.getLogger("torch._dynamo.convert_frame").addHandler(self)
        self.seconds = 0.0
        self._since = 0.0
        self._graphs_before = self._counted()
        internals.COMPILE_START.get()(self._start)
        internals.COMPILE_END.get()(self._end)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(_LIMIT_MESSAGE):
            self._fallbacks.append(record.getMessage().partition("function: ")[2].partition("\n")[0])

    def take_fallbacks(self) -> list[str]:
        """Return the functions that reached the limit of graphs since the last call; new shapes run
        uncompiled in them."""
        taken, self._fallbacks = self._fallbacks, []
        return taken

    def _start(self, _args: object) -> None:
        self._since = time.monotonic()

    def _end(self, _args: object) -> None:
        self.seconds += time.monotonic() - self._since

    @property
    def graphs(self) -> int:
        return self._counted() - self._graphs_before

    @staticmethod
    def _counted() -> int:
        return int(internals.COUNTERS.get()["stats"]["unique_graphs"])
