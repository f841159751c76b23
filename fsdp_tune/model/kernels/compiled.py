"""Compile each decoder layer separately with torch.compile: `kernels.compile`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.units import format_bytes
from fsdp_tune.model.experts import require_known_balance
from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.kernels.attention import live_attention
from fsdp_tune.model.kernels.class_kernels import choose_class_kernels
from fsdp_tune.model.kernels.head import SLICE_ELEMENTS, slice_tokens, summed_linear_loss
from fsdp_tune.model.kernels.liger import apply_liger, choose_liger, liger_summed_loss, require_liger
from fsdp_tune.model.kernels.linear_layers import choose_mlp_slices, find_mlps, install_mlp_slices
from fsdp_tune.model.kernels.loss_in_head import OpaqueHead, install_loss_in_head, logits_of
from fsdp_tune.model.model_files import WRITTEN, KernelChoice
from fsdp_tune.model.sequence_parallel import require_shareable_rows
from fsdp_tune.model.shard.fsdp_units import decoder_layers
from fsdp_tune.recipe.schema.recipe import Recipe

BACKEND = "inductor"


GRAPHS_OF_A_LAYER = 5
"""Without gradients (the check before the first step, evaluation) one graph for the first shape and one for others; in training one
for the first width of a batch, one for any width, and one for the short last batch of an epoch."""


_LIMIT_MESSAGE = "torch._dynamo hit config."


def choose_compile(recipe: Recipe) -> KernelChoice:
    return KernelChoice("true", WRITTEN) if recipe.kernels.compile else KernelChoice("false", "not requested")


def compile_layers(recipe: Recipe, model: PreTrainedModel) -> list[str]:
    """Compile each decoder layer and return the names. Call it after all changes to a layer's forward, and before wrapping.

    When a size first differs between batches, a second graph is compiled, in which it is a variable.
    """
    layers = decoder_layers(model, recipe.layer_classes)
    # Layers share code objects, and Dynamo's limit is per code object; above it they would run uncompiled. Twice the expected number.
    settings: Any = torch.compiler.config
    settings.recompile_limit = max(settings.recompile_limit, 2 * expected_graphs(recipe, [layer for _, layer in layers]))
    # The number of packed examples differs between batches: a variable from the first graph on.
    settings.dynamic_sources = r".*\['cu_seq_lens_[qk]'\]"
    # Under DDP, Dynamo would split graphs at buckets, which fails with recomputation and is unnecessary for single layers.
    internals.OPTIMIZE_DDP.set(False)
    internals.PRECOMPILED_HEADERS.set(False)
    # Dynamo does not compile a function that moves saved tensors to the host, so only the recomputed part is compiled there.
    inside = "recomputed_forward" if recipe.fsdp.activation_checkpointing_offload else "forward"
    for _, layer in layers:
        name = inside if hasattr(layer, inside) else "forward"
        compiled = torch.compile(getattr(layer, name), backend=BACKEND)
        internals.COMPILED_FROM.of(compiled)  # otherwise the read-back could not recognise it
        setattr(layer, name, compiled)
    return [name for name, _ in layers]


def expected_graphs(recipe: Recipe, layers: Sequence[nn.Module]) -> int:
    """Return the largest number of graphs that the decoder layers should need; layers of one kind share their graphs.

    Recomputed layers have other graphs than the rest. With inputs on the host, the graph covers only the recomputed part, and a
    forward and its recomputation have one graph each.
    """
    fsdp = recipe.fsdp
    graphs = _kinds(layers) * GRAPHS_OF_A_LAYER
    if fsdp.activation_checkpointing == "none":
        return graphs
    return graphs * (2 if fsdp.activation_checkpointing_every > 1 else 1) * (2 if fsdp.activation_checkpointing_offload else 1)


def _kinds(layers: Sequence[nn.Module]) -> int:
    """Return the number of kinds of layers, by the properties that Dynamo guards on: classes of modules, and strings and booleans."""

    def kind(module: nn.Module) -> tuple[Any, ...]:
        public = ((name, value) for name, value in vars(module).items() if not name.startswith("_") and name != "recomputes")
        return (type(module), *((name, value) for name, value in public if isinstance(value, str | bool)))

    return len({tuple(kind(module) for module in layer.modules()) for layer in layers})


def is_compiled(layer: nn.Module) -> bool:
    """Return whether a layer is compiled, for a live module that FSDP1 may have wrapped."""
    return any(internals.COMPILED_FROM.exists(vars(layer).get(name)) for name in ("forward", "recomputed_forward"))


class CompileClock(logging.Handler):
    """Count compiled graphs, compile time of forward and backward, and functions that hit the limit. One instance per process."""

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
        """Return the functions that reached the limit of graphs since the last call; new shapes run uncompiled in them."""
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


def choose_loss(recipe: Recipe, model: PreTrainedModel) -> KernelChoice:
    """Choose `kernels.loss` for both training and evaluation: auto is chunked if the larger batch of the two needs it.

    Raises: usage error if the recipe sets a chunked loss that the model's forward does not allow.
    """
    requested = recipe.kernels.loss
    if requested == "full":
        return KernelChoice("full", WRITTEN)
    if requested == "liger":
        require_liger("kernels.loss: liger")
    training = recipe.training
    rows = training.per_device_train_batch_size
    of_evaluation = training.per_device_eval_batch_size if recipe.evaluates else None
    what = "tokens of an evaluation" if of_evaluation is not None and of_evaluation > rows else "tokens"
    tokens = max(rows, of_evaluation or 0) * recipe.data.max_length // recipe.topology.row_parts
    vocabulary = _head_rows(model)
    if requested == "auto" and tokens * vocabulary <= SLICE_ELEMENTS:
        size, limit = format_bytes(4 * tokens * vocabulary), format_bytes(4 * SLICE_ELEMENTS)
        return KernelChoice("full", f"{tokens:,} {what} × {vocabulary:,} logits are {size} in fp32, {limit} are one slice")
    try:
        logits_of(model)
    except OpaqueHead as opaque:
        if requested == "auto":
            return KernelChoice("full", str(opaque))
        raise usage_error(
            "loss-not-chunkable", f"`kernels.loss: {requested}`: {opaque}", hint="leave `kernels.loss` at auto, or write `full`"
        ) from opaque
    if requested == "auto":
        part = slice_tokens(tokens, vocabulary)
        size = format_bytes(4 * tokens * vocabulary)
        return KernelChoice("chunked", f"{tokens:,} {what} × {vocabulary:,} logits would be {size} in fp32; {part:,} tokens at a time")
    return KernelChoice(requested, WRITTEN)


def _head_rows(model: PreTrainedModel) -> int:
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    return int((embedding if head is None else head).weight.shape[0])


def choose_kernels(recipe: Recipe, model: PreTrainedModel, device_type: str) -> dict[str, KernelChoice]:
    """Return the choices by recipe key or optional package, for the bare model and the device that it will run on."""
    require_known_balance(model)
    require_shareable_rows(recipe, model)
    return {
        "model.attn_implementation": live_attention(recipe, model),
        "kernels.loss": choose_loss(recipe, model),
        "kernels.liger": choose_liger(recipe, model, device_type),
        "kernels.compile": choose_compile(recipe),
        "kernels.mlp_slice_tokens": choose_mlp_slices(recipe, model),
        **choose_class_kernels(model, device_type),
    }


_LOSSES = {"chunked": summed_linear_loss, "liger": liger_summed_loss}


def install_kernels(recipe: Recipe, model: PreTrainedModel, device_type: str) -> dict[str, KernelChoice]:
    """Install the chosen kernels in the bare model, and return the choices."""
    chosen = choose_kernels(recipe, model, device_type)
    mlps = {} if recipe.kernels.mlp_slice_tokens is None else find_mlps(recipe, model)  # on the CPU, where Liger's kernels cannot run
    if chosen["kernels.liger"].value == "true":
        apply_liger(model, rotary=recipe.fsdp.activation_checkpointing != "selective")
    if recipe.kernels.mlp_slice_tokens is not None:
        install_mlp_slices(mlps.values(), recipe.kernels.mlp_slice_tokens)
    loss = chosen["kernels.loss"].value
    if loss != "full":
        install_loss_in_head(model, logits_of(model), _LOSSES[loss], loss)
    return chosen
