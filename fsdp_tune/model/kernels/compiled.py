"""torch.compile for each decoder layer by itself: one graph serves them all, and what is between them (gathering, the loss) stays eager.

As in torchtitan. A layer's `forward` is compiled, not its call: FSDP's hooks and the gathering stay outside the graph. What recomputes
the layer is inside, so that the compiler chooses what to keep within the recipe's policy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.model.kernels.choice import WRITTEN, KernelChoice
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.recipe.schema import Recipe

BACKEND = "inductor"


GRAPHS_OF_A_LAYER = 5
"""One for the check before the first step and for evaluation, which keep nothing for a backward, another for other shapes of theirs,
one for the first width of a batch, one for any width, and one for the short last batch of an epoch."""
_LIMIT_MESSAGE = "torch._dynamo hit config."


def choose_compile(recipe: Recipe) -> KernelChoice:
    return KernelChoice("true", WRITTEN) if recipe.kernels.compile else KernelChoice("false", "not asked for")


def compile_layers(recipe: Recipe, model: PreTrainedModel) -> list[str]:
    """Compile each decoder layer and return the names. Call after everything that replaces a layer's forward, and before wrapping.

    Sizes that change from batch to batch cost a second graph, the first time that they do; from then on they are variables in it.
    """
    from torch._dynamo import config as dynamo

    layers = decoder_layers(model, recipe.layer_classes)
    # Layers share their code, and the compiler's limit is for each code: beyond it they would run uncompiled. Twice what is expected.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * expected_graphs(recipe, [layer for _, layer in layers]))
    # Under DDP the compiler would cut a layer's graph at the buckets, and cannot where it recomputes; the layers are cut enough.
    dynamo.optimize_ddp = False
    # The compiler leaves a function alone that moves what it saves to the host. There it gets what is recomputed, and no more.
    inside = "recomputed_forward" if recipe.fsdp.activation_checkpointing_offload else "forward"
    for _, layer in layers:
        name = inside if hasattr(layer, inside) else "forward"
        setattr(layer, name, torch.compile(getattr(layer, name), backend=BACKEND))
    return [name for name, _ in layers]


def expected_graphs(recipe: Recipe, layers: Sequence[nn.Module]) -> int:
    """Return the most graphs that the decoder layers should need: layers of a kind share theirs.

    A layer that is recomputed is of another kind than one that is not. Where inputs go to the host the graph ends inside what is
    recomputed, and a forward and its repetition get one each.
    """
    fsdp = recipe.fsdp
    graphs = _kinds(layers) * GRAPHS_OF_A_LAYER
    if fsdp.activation_checkpointing == "none":
        return graphs
    return graphs * (2 if fsdp.activation_checkpointing_every > 1 else 1) * (2 if fsdp.activation_checkpointing_offload else 1)


def _kinds(layers: Sequence[nn.Module]) -> int:
    """Return the number of kinds of layers, by what Dynamo guards on: classes (dense, with experts) and strings (`attention_type`)."""

    def kind(module: nn.Module) -> tuple[Any, ...]:
        public = ((name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "recomputes")
        return (type(module), *((name, value) for name, value in public if isinstance(value, str | bool)))

    return len({tuple(kind(module) for module in layer.modules()) for layer in layers})


def is_compiled(layer: nn.Module) -> bool:
    """Asked of the live module, which FSDP1 may have wrapped."""
    return any(hasattr(vars(layer).get(name), "_torchdynamo_orig_callable") for name in ("forward", "recomputed_forward"))


class CompileClock(logging.Handler):
    """Count graphs, the time that the compiler takes, forward and backward, and functions that it gave up. One a process."""

    def __init__(self) -> None:
        from torch._dynamo.callback import on_compile_end, on_compile_start

        super().__init__(logging.WARNING)
        self._fallbacks: list[str] = []
        # Dynamo says so in its log alone.
        logging.getLogger("torch._dynamo.convert_frame").addHandler(self)
        self.seconds = 0.0
        self._since = 0.0
        self._graphs_before = self._counted()
        on_compile_start(self._start)
        on_compile_end(self._end)

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(_LIMIT_MESSAGE):
            self._fallbacks.append(record.getMessage().partition("function: ")[2].partition("\n")[0])

    def take_fallbacks(self) -> list[str]:
        """Return the functions that reached the limit of graphs since the last call; new shapes of theirs run uncompiled."""
        taken, self._fallbacks = self._fallbacks, []
        return taken

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
