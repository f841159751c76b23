"""Getting the weights onto the ranks: a wrapped model whose every rank holds its shard, and no rank more than it must."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.model.build import build_empty, build_full
from fsdp_tune.model.recompute import recompute_activations
from fsdp_tune.model.units import UnitPlan, plan_units
from fsdp_tune.model.wrap import make_mesh, wrap
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.units import KIB


@dataclass(frozen=True, slots=True)
class Loaded:
    """`model` is the Hugging Face model, `wrapped` what the forward is called on; both the same object under FSDP2."""

    model: PreTrainedModel
    wrapped: nn.Module
    units: UnitPlan
    mesh: Any
    recomputed: tuple[str, ...]
    full_bytes: int
    """Bytes of the whole model's parameters."""
    peak_growth_bytes: int
    """By how much loading raised this rank's peak resident host memory."""


def load(recipe: Recipe, config: PreTrainedConfig, device: torch.device, *, vocabulary: int | None) -> Loaded:
    """Builds, wraps and fills the model of a resolved recipe on every rank of the default process group."""
    before_kib = _peak_resident_kib()
    mesh = make_mesh(recipe, device.type)
    one_reader = recipe.fsdp.cpu_ram_efficient_loading and recipe.fsdp.version == 2
    source = build_full(recipe, config, vocabulary=vocabulary) if not one_reader or dist.get_rank() == 0 else None
    model = build_empty(recipe, config, vocabulary=vocabulary) if one_reader else source
    assert model is not None
    full_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    recomputed = recompute_activations(recipe, model)
    units = plan_units(recipe, model)
    if recipe.fsdp.sharding_strategy == "NO_SHARD":
        if one_reader:
            model.to_empty(device=device)
            model.tie_weights()
            _fill(model, source, device)
        else:
            model.to(device)
        wrapped = wrap(recipe, model, units, mesh, device)
    else:
        wrapped = wrap(recipe, model, units, mesh, device)
        if one_reader:
            model.to_empty(device="cpu" if recipe.fsdp.offload_params else device)
            # Materialising gives each name a tensor of its own; transformers knows which of them are one.
            model.tie_weights()
            _fill(model, source, device)
        elif recipe.fsdp.version == 2:
            _move_buffers(model, device)
    growth = (_peak_resident_kib() - before_kib) * KIB
    return Loaded(model, wrapped, units, mesh, tuple(recomputed), full_bytes, growth)


def _peak_resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    # Buffers that are in no state dict (rotary frequencies) are lost on the meta device, so they travel too.
    yield from model.named_buffers()


@torch.no_grad()
def _fill(model: PreTrainedModel, source: PreTrainedModel | None, device: torch.device) -> None:
    """Sends each tensor from rank 0, one at a time, and keeps this rank's slice: one whole tensor on the device at most."""
    full = dict(_tensors(source)) if source is not None else {}
    for name, target in _tensors(model):
        if source is not None:
            # A copy even on CPU: broadcasting must not alias what other names of `source` share.
            whole = full[name].detach().to(device=device, dtype=target.dtype).contiguous()
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(whole, src=0)
        if isinstance(target, DTensor):
            slice_ = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(slice_.to_local())
        else:
            target.copy_(whole)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
