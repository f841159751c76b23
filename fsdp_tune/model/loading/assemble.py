"""Getting the weights onto the ranks: a wrapped model whose every rank holds its shard, and no rank more than it must."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.units import KIB
from fsdp_tune.model.kernels.choice import KernelChoice
from fsdp_tune.model.kernels.compiled import compile_layers
from fsdp_tune.model.kernels.float8 import convert_to_fp8, demand_gpu
from fsdp_tune.model.kernels.float8_weights import refresh_scales
from fsdp_tune.model.kernels.select import install_kernels
from fsdp_tune.model.loading.construct import build_empty, build_full, build_with_buffers
from fsdp_tune.model.loading.experts import active_parameters
from fsdp_tune.model.loading.weight_slices import WeightFiles, find_weight_files, first_on_each_machine, fits, read_slices
from fsdp_tune.model.shard.fsdp_units import UnitPlan, decoder_layers, ignored_module_names, plan_units
from fsdp_tune.model.shard.mesh import make_mesh
from fsdp_tune.model.shard.patience import leave, patient_group
from fsdp_tune.model.shard.recompute import recompute_activations
from fsdp_tune.model.shard.wrap import wrap
from fsdp_tune.model.step import decayed_names
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.run.directory import run_of


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Of the whole model, counted before it is wrapped: a shard no longer shows it."""

    parameters: int
    active_parameters: int | None
    """That a token meets; None where the model's configuration does not say it."""
    trained_parameters: int
    parameter_bytes: int
    decayed: frozenset[str]
    """Names of the parameters on which weight decay acts."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """`model` is the Hugging Face model, `wrapped` what the forward is called on; both the same object under FSDP2."""

    model: PreTrainedModel
    wrapped: nn.Module
    units: UnitPlan
    mesh: Any
    layers: tuple[tuple[str, nn.Module], ...]
    """(name, module) of each decoder layer, found on the bare model: wrapping renames classes."""
    size: ModelSize
    peak_growth_bytes: int
    """By how much loading raised this rank's peak resident host memory."""
    way: str
    """How the weights came: see `load`."""
    kernels: dict[str, KernelChoice]
    """By recipe key."""
    weights_seed: int | None = None
    """Seed that this rank drew initial weights with; None if it drew none."""


Way = Literal["own", "slices", "rank 0", "checkpoint"]


def load(recipe: Recipe, config: PreTrainedConfig, device: torch.device, *, vocabulary: int | None, local_rank: int = 0) -> Loaded:
    """Builds, wraps and fills the model of a resolved recipe on every rank of the default process group.

    Four ways: `slices`, each rank reads its part of the safetensors files; `rank 0` reads or draws the weights and sends
    each rank its part; `own`, each rank builds the whole model (FSDP1, or `cpu_ram_efficient_loading: false`);
    `checkpoint`, the weights come later, from another run's shards.
    """
    demand_gpu(recipe, device)
    before_kib = _peak_resident_kib()
    mesh = make_mesh(recipe, device.type)
    if not recipe.fsdp.cpu_ram_efficient_loading or recipe.fsdp.version == 1:
        model = build_full(recipe, config, vocabulary=vocabulary)
        return wrap_whole(recipe, model, mesh, device, before_kib, compiles=recipe.kernels.compile)
    model = build_empty(recipe, config, vocabulary=vocabulary)
    waiting = patient_group()
    way, files = _choose(recipe, model, local_rank, waiting)
    source = build_full(recipe, config, vocabulary=vocabulary) if way == "rank 0" and dist.get_rank() == 0 else None
    dist.barrier(group=waiting)
    leave(waiting)
    # Buffers that are in no state dict (rotary frequencies) have values that only the constructor knows.
    buffers = dict(build_with_buffers(recipe, config).named_buffers()) if way != "rank 0" else {}
    size = _size(model)
    layers = tuple(decoder_layers(model, recipe.layer_classes))
    kernels, units = _change(recipe, model, device, compiles=recipe.kernels.compile)
    wrapped = wrap(recipe, model, units, mesh, device) if recipe.is_sharded else model
    model.to_empty(device="cpu" if recipe.fsdp.offload_params else device)
    if recipe.is_sharded:
        _place_what_fsdp_leaves(recipe, model, device)
    # Materialising gives each name a tensor of its own; transformers knows which of them are one.
    model.tie_weights()
    if way == "rank 0":
        _receive(model, source, device)
    else:
        _restore_buffers(model, buffers)
    if files is not None:
        read_slices(model, files)
    if not recipe.is_sharded:
        wrapped = wrap(recipe, model, units, mesh, device)
    refresh_scales(wrapped)
    growth = (_peak_resident_kib() - before_kib) * KIB
    seed = None if source is None else torch.initial_seed()
    return Loaded(model, wrapped, units, mesh, layers, size, growth, way, kernels, seed)


def _choose(recipe: Recipe, model: PreTrainedModel, local_rank: int, waiting: dist.ProcessGroup) -> tuple[Way, WeightFiles | None]:
    if recipe.model.from_config is not None:
        return "rank 0", None
    if run_of(Path(str(recipe.model.name_or_path))) is not None:
        return "checkpoint", None
    files = first_on_each_machine(lambda: find_weight_files(recipe), local_rank, waiting)
    # Machines may have different files under one name, and every rank must go the same way.
    can_slice = torch.tensor(int(files is not None and fits(model, files)))
    dist.all_reduce(can_slice, op=dist.ReduceOp.MIN)
    return ("slices", files) if can_slice.item() else ("rank 0", None)


def _change(recipe: Recipe, model: PreTrainedModel, device: torch.device, *, compiles: bool) -> tuple[dict[str, KernelChoice], UnitPlan]:
    """Apply to a bare model what must precede wrapping, each step after the ones that it encloses. Returns (kernels, units)."""
    kernels = convert_to_fp8(recipe, model, device.type) | install_kernels(recipe, model, device.type)
    recompute_activations(recipe, model)
    if compiles:
        compile_layers(recipe, model)
    return kernels, plan_units(recipe, model)


def wrap_whole(
    recipe: Recipe, model: PreTrainedModel, mesh: Any, device: torch.device, before_kib: int = 0, *, compiles: bool = False
) -> Loaded:
    """A model that has all its weights on this rank, recomputed and wrapped as the recipe says; the planner's trace starts here.

    The trace leaves `compiles` out: it records operations, which a compiled layer hides.
    """
    size = _size(model)
    layers = tuple(decoder_layers(model, recipe.layer_classes))
    kernels, units = _change(recipe, model, device, compiles=compiles)
    if not recipe.is_sharded and any(p.device != device for p in model.parameters()):
        nn.Module.to(model, device)
    wrapped = wrap(recipe, model, units, mesh, device)
    if recipe.is_sharded and recipe.fsdp.version == 2:
        _place_what_fsdp_leaves(recipe, model, device)
    refresh_scales(wrapped)
    growth = (_peak_resident_kib() - before_kib) * KIB
    return Loaded(model, wrapped, units, mesh, layers, size, growth, "own", kernels, torch.initial_seed())


def _size(model: PreTrainedModel) -> ModelSize:
    parameters = list(model.parameters())
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        active_parameters=active_parameters(model.config, model.named_parameters()),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        decayed=decayed_names(model),
    )


def _peak_resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _receive(model: PreTrainedModel, source: PreTrainedModel | None, device: torch.device) -> None:
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


@torch.no_grad()
def _restore_buffers(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _place_what_fsdp_leaves(recipe: Recipe, model: PreTrainedModel, device: torch.device) -> None:
    """On the device, also where parameters are offloaded: FSDP2 fetches its units from the host and nothing else, so that buffers and
    ignored parameters are used where they lie."""
    for name in ignored_module_names(recipe, model):
        module = model.get_submodule(name)
        if any(parameter.device != device for parameter in module.parameters()):
            module.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
