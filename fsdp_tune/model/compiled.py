"""torch.compile for each decoder layer by itself: one graph serves them all, and what is between them (gathering, the loss) stays eager.

As in torchtitan. A layer's `forward` is compiled, not its call: FSDP's hooks and the gathering stay outside the graph. What recomputes
the layer is inside, so that the compiler chooses what to keep within the recipe's policy.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.model.choice import WRITTEN, Choice
from fsdp_tune.model.units import decoder_layers
from fsdp_tune.recipe.schema import Recipe

BACKEND = "inductor"


def choose_compile(recipe: Recipe) -> Choice:
    return Choice("true", WRITTEN) if recipe.kernels.compile else Choice("false", "not asked for")


def compile_layers(recipe: Recipe, model: PreTrainedModel) -> list[str]:
    """Returns the names. Call after everything that replaces a layer's forward, and before wrapping.

    Sizes that change from batch to batch cost a second graph, the first time that they do; from then on they are variables in it.
    """
    from torch._dynamo import config as dynamo

    layers = decoder_layers(model, recipe.layer_classes)
    # Under DDP the compiler would cut a layer's graph at the buckets, and cannot where it recomputes; the layers are cut enough.
    dynamo.optimize_ddp = False
    # The compiler leaves a function alone that moves what it saves to the host. There it gets what is recomputed, and no more.
    inside = "recomputed_forward" if recipe.fsdp.activation_checkpointing_offload else "forward"
    for _, layer in layers:
        name = inside if hasattr(layer, inside) else "forward"
        setattr(layer, name, torch.compile(getattr(layer, name), backend=BACKEND))
    return [name for name, _ in layers]


def is_compiled(layer: nn.Module) -> bool:
    """Asked of the live module, which FSDP1 may have wrapped."""
    return any(hasattr(vars(layer).get(name), "_torchdynamo_orig_callable") for name in ("forward", "recomputed_forward"))


class CompileClock:
    """Counts graphs and the time that the compiler takes, forward and backward, from its creation on. One a process."""

    def __init__(self) -> None:
        from torch._dynamo.callback import on_compile_end, on_compile_start

        self.seconds = 0.0
        self._since = 0.0
        self._graphs_before = self._counted()
        on_compile_start(self._start)
        on_compile_end(self._end)

    def _start(self, _args: Any) -> None:
        self._since = time.monotonic()

    def _end(self, _args: Any) -> None:
        self.seconds += time.monotonic() - self._since

    @property
    def graphs(self) -> int:
        return self._counted() - self._graphs_before

    @staticmethod
    def _counted() -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])
