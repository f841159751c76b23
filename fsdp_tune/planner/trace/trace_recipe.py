"""Trace a recipe: choose the layers to run, run the step in a fake process group, and count the full model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig

from fsdp_tune.model.internals.torch_internals import CHUNKS, FAKE_STORE
from fsdp_tune.model.kernels.attention import has_variable_lengths
from fsdp_tune.model.loading.construct import attention, config_or_facts
from fsdp_tune.model.shard.fsdp_units import plan_units
from fsdp_tune.planner.predict.depth import DepthError, Repeated, full_depth, repeated_layers
from fsdp_tune.planner.trace import autocast, cuda_kernels, device
from fsdp_tune.planner.trace.fake_model import build_traced
from fsdp_tune.planner.trace.substitute import replaced
from fsdp_tune.planner.trace.to_trace import assemble, count, unit_list
from fsdp_tune.planner.trace.traced_layers import (
    container_of,
    has_unit_of_several_layers,
    layer_signatures,
    shallow_recipe,
    without_dropped,
)
from fsdp_tune.planner.trace.traced_step import run_step
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema import Recipe


def trace_recipe(recipe: Recipe, *, exact: bool = False, vocabulary: int | None = None) -> Trace:
    """Return the trace of a resolved recipe's step on rank 0 of its world.

    `exact` runs every decoder layer. Otherwise equal layers in the middle are left out, as many as `planner.predict.depth.full_depth` can
    restore; all are run if they turn out not to repeat. Raises: FsdpTuneError (exit 2) for a model that is not found or that
    transformers rejects.
    """
    config, _ = config_or_facts(recipe)
    if not exact:
        try:
            trace = _trace(recipe, config, vocabulary, exact=False)
            full_depth(trace)
            return trace
        except DepthError:
            pass  # FSDP1 processes units in another order; a model may have other layers at its ends
    return _trace(recipe, config, vocabulary, exact=True)


def _trace(recipe: Recipe, config: PreTrainedConfig, vocabulary: int | None, *, exact: bool) -> Trace:
    flash_version = 3 if recipe.model.attn_implementation == "flash_attention_3" else 2
    has_masks = not has_variable_lengths(attention(recipe, config))
    recipe, model = build_traced(recipe, config, vocabulary)
    groups: Sequence[tuple[str, ...]] = plan_units(recipe, model).groups if recipe.is_sharded else ()
    counts, units = count(recipe, config, model), unit_list(recipe, model, tuple(groups))
    repeated: Repeated | None = None
    container = None if exact else container_of(recipe, model)
    if container is not None and not has_unit_of_several_layers(recipe, model, groups):
        repeated = repeated_layers(layer_signatures(recipe, model, groups), reach=_reach(recipe))
        if repeated is not None:
            recipe = shallow_recipe(recipe, container, repeated, model, groups)
            model = without_dropped(model, container, repeated)
    with fake_world(recipe.world_size):
        run = run_step(recipe, model, has_masks=has_masks)
        trace = assemble(recipe, config, run, counts, units, repeated)
    return replace(trace, facts=trace.facts | {"flash_version": flash_version})


def _reach(recipe: Recipe) -> int:
    """Return how many layers ahead units are gathered."""
    backward = recipe.fsdp.backward_prefetch
    return max(1, int(recipe.fsdp.forward_prefetch), backward if isinstance(backward, int) else 1)


# ---- A fake process group of any size in one process, which is its rank 0.


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Initialise the default process group; its collectives return immediately and leave their buffers unchanged."""
    assert not dist.is_initialized(), "a trace needs a separate process"
    device.install()
    autocast.install()
    cuda_kernels.install()
    dist.init_process_group(f"cpu:fake,{device.DEVICE}:fake", store=FAKE_STORE.get()(), rank=0, world_size=size)
    try:
        # FSDP2 waits on this stream for units that were gathered but not used, such as frozen ones below the last gradient.
        on_accelerator = replaced(torch.accelerator, "current_stream", device.current_stream)
        with on_accelerator, CHUNKS.replaced(_Chunks):
            yield
    finally:
        dist.destroy_process_group()


class _Chunks(Sequence[torch.Tensor]):
    """The result of `torch.chunk`, padded with empty chunks, created lazily: FSDP2 uses only two of the chunks of all ranks."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.chunks, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        length = self.tensor.shape[self.dim]
        size = -(-length // self.chunks)
        begin = index * size
        return self.tensor.narrow(self.dim, begin, min(size, length - begin)) if begin < length else self.tensor.new_empty(0)
