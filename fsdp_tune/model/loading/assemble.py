"""Load the weights onto the ranks: build a wrapped model in which each rank holds its shard, with minimal
memory on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.host import peak_resident_bytes
from fsdp_tune.model.active_parameters import active_parameters
from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.model.kernels.compiled import compile_layers
from fsdp_tune.model.kernels.fake_quantised import prepare_quantised
from fsdp_tune.model.kernels.install import install_kernels
from fsdp_tune.model.kernels.linear_layers import convert_to_fp8, require_gpu
from fsdp_tune.model.loading.adapter_files import start_adapters
from fsdp_tune.model.loading.construct import build_empty, build_full, build_with_buffers
from fsdp_tune.model.loading.nf4_files import refuse_unread
from fsdp_tune.model.loading.tensor_account import account_for
from fsdp_tune.model.loading.untie import tie_text, untie
from fsdp_tune.model.loading.weight_slices import (
    WeightFiles,
    find_weight_files,
    first_on_each_machine,
    fits,
    read_slices,
)
from fsdp_tune.model.model_files import KernelChoice
from fsdp_tune.model.shard.fsdp_units import UnitPlan, decoder_layers, ignored_module_names, plan_units
from fsdp_tune.model.shard.local import copy_part, count_elements, decayed_names, refresh_scales
from fsdp_tune.model.shard.process_groups import (
    destroy_group,
    join_groups,
    make_groups,
    make_mesh,
    untimed_group,
)
from fsdp_tune.model.shard.recompute import recompute_activations
from fsdp_tune.model.shard.wrap import wrap
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import run_of


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of the full model, counted before wrapping, since they cannot be derived from a shard."""

    parameters: int
    active_parameters: int | None
    """Parameters that one token uses; None if the model's configuration does not define them."""
    trained_parameters: int
    parameter_bytes: int
    decayed: frozenset[str]
    """Names of the parameters with weight decay."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model. `model` is the Hugging Face model, `wrapped` the module to call; under FSDP2 both are
    the same object."""

    model: PreTrainedModel
    wrapped: nn.Module
    units: UnitPlan
    mesh: DeviceMesh | None
    layers: tuple[tuple[str, nn.Module], ...]
    """(name, module) of each decoder layer, found before wrapping, which renames classes."""
    size: ModelSize
    peak_growth_bytes: int
    """Increase of this rank's peak resident host memory during loading."""
    way: str
    """How the weights were loaded: see `load`."""
    kernels: dict[str, KernelChoice]
    """The chosen kernels by recipe key."""
    weights_seed: int | None = None
    """Seed of the initial weights that this rank drew; None if it drew none."""


Way = Literal["own", "slices", "rank 0", "checkpoint"]


def load(
    recipe: Recipe,
    config: PreTrainedConfig,
    device: torch.device,
    *,
    vocabulary: int | None,
    local_rank: int = 0,
) -> Loaded:
    """Build, wrap and fill the model of a resolved recipe on every rank of the default process group.

    There are four ways to load: `slices`, each rank reads its part of the safetensors files; `rank 0`, rank 0
    reads or draws the weights and broadcasts them; `own`, each rank builds the full model (FSDP1, or
    `cpu_ram_efficient_loading: false`); `checkpoint`, the weights are loaded later from the shards of another
    run.
    """
    require_gpu(recipe, device)
    before_bytes = peak_resident_bytes()
    mesh, groups = make_mesh(recipe, device.type), make_groups(recipe, device.type)
    waiting = untimed_group()
    files = _find_files(recipe, local_rank, waiting)
    untie(recipe, config)  # the files may be on this machine only now
    tie_text(recipe, config)
    model = build_empty(recipe, config, vocabulary=vocabulary)
    _require_account(recipe, config, model, files)
    if not recipe.fsdp.cpu_ram_efficient_loading or recipe.fsdp.version == 1:
        destroy_group(waiting)
        model = build_full(recipe, config, vocabulary=vocabulary)
        join_groups(model, groups)
        return wrap_whole(recipe, model, mesh, device, before_bytes, compiles=recipe.kernels.compile)
    join_groups(model, groups)
    way, files = _choose(recipe, model, files)
    source = None
    if way == "rank 0" and dist.get_rank() == 0:
        source = build_full(recipe, config, vocabulary=vocabulary)
        _refuse_untied(model, source)
    dist.barrier(group=waiting)
    destroy_group(waiting)
    # Buffers that are in no state dict (rotary frequencies) are only computed by the constructor.
    buffers = dict(build_with_buffers(recipe, config).named_buffers()) if way != "rank 0" else {}
    size = _size(model)
    layers = tuple(decoder_layers(model, recipe.layer_classes))
    kernels, units = _change(recipe, model, device, compiles=recipe.kernels.compile)
    wrapped = wrap(recipe, model, units, mesh, device) if recipe.is_sharded else model
    model.to_empty(device="cpu" if recipe.fsdp.offload_params else device)
    if recipe.is_sharded:
        _place_what_fsdp_leaves(recipe, model, device)
    model.tie_weights()  # `to_empty` allocates a separate tensor for each name
    if way == "rank 0":
        _receive(model, source, device)
    else:
        _restore_buffers(model, buffers)
    if files is not None:
        read_slices(model, files)
        start_adapters(recipe, model)
    if not recipe.is_sharded:
        wrapped = wrap(recipe, model, units, mesh, device)
    refresh_scales(wrapped)
    growth = peak_resident_bytes() - before_bytes
    seed = None if source is None else torch.initial_seed()
    return Loaded(model, wrapped, units, mesh, layers, size, growth, way, kernels, seed)


def _require_account(
    recipe: Recipe, config: PreTrainedConfig, model: PreTrainedModel, files: WeightFiles | None
) -> None:
    """Raises: usage error for tensors without a place in the model, which `validate` could not see if the
    model was not on this machine."""
    if files is None or files.base is None:
        return
    if problems := account_for(recipe, config, model, files.base).problems:
        raise FsdpTuneError(*problems)


def _find_files(recipe: Recipe, local_rank: int, waiting: dist.ProcessGroup) -> WeightFiles | None:
    if recipe.model.from_config is not None or run_of(Path(str(recipe.model.name_or_path))) is not None:
        return None
    return first_on_each_machine(lambda: find_weight_files(recipe), local_rank, waiting)


def _choose(
    recipe: Recipe, model: PreTrainedModel, files: WeightFiles | None
) -> tuple[Way, WeightFiles | None]:
    if recipe.model.from_config is not None:
        return "rank 0", None
    if run_of(Path(str(recipe.model.name_or_path))) is not None:
        return "checkpoint", None
    # Machines may have different files under one name, and all ranks must load in the same way.
    can_slice = torch.tensor(int(files is not None and fits(model, files)))
    dist.all_reduce(can_slice, op=dist.ReduceOp.MIN)
    if not can_slice.item():
        refuse_unread(recipe, model.config)
    return ("slices", files) if can_slice.item() else ("rank 0", None)


def _refuse_untied(model: PreTrainedModel, source: PreTrainedModel) -> None:
    """Refuse a loaded model with two parameters where `model`, which the ranks fill from it, has one for
    both: the second would be lost.

    transformers compares the tensors of files that its class ties, and does not tie those that differ.
    Raises: FailedError.
    """
    first = {name for name, _ in model.named_parameters()}
    others = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first
    if apart := sorted(others.intersection(name for name, _ in source.named_parameters())):
        message = (
            f"the files store `{apart[0]}` with other values than the parameter that "
            f"{type(model).__name__} ties it to"
        )
        hint = (
            "set `tie_word_embeddings: false` in the model's config.json, or remove the tensor from the "
            "files if it is a leftover"
        )
        raise failed_error("weights-untied", message, where=Where(key="model.name_or_path"), hint=hint)


def _change(
    recipe: Recipe, model: PreTrainedModel, device: torch.device, *, compiles: bool
) -> tuple[dict[str, KernelChoice], UnitPlan]:
    """Apply all changes that must precede wrapping, each after those that it encloses. Return (kernels,
    units)."""
    kernels = (
        convert_to_fp8(recipe, model, device.type)
        | prepare_quantised(recipe, model)
        | install_kernels(recipe, model, device.type)
    )
    recompute_activations(recipe, model)
    if compiles:
        compile_layers(recipe, model)
    return kernels, plan_units(recipe, model)


def wrap_whole(
    recipe: Recipe,
    model: PreTrainedModel,
    mesh: DeviceMesh | None,
    device: torch.device,
    before_bytes: int = 0,
    *,
    compiles: bool = False,
) -> Loaded:
    """Wrap a model that has all its weights on this rank, with the recipe's recomputation. The planner's
    trace starts here.

    The trace does not pass `compiles`: it records operations, which a compiled layer hides.
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
    growth = peak_resident_bytes() - before_bytes
    return Loaded(model, wrapped, units, mesh, layers, size, growth, "own", kernels, torch.initial_seed())


def _size(model: PreTrainedModel) -> ModelSize:
    parameters = list(model.parameters())
    return ModelSize(
        parameters=count_elements(model.named_parameters()),
        active_parameters=active_parameters(model.config, model.named_parameters()),
        trained_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
        decayed=decayed_names(model),
    )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


@torch.no_grad()
def _receive(model: PreTrainedModel, source: PreTrainedModel | None, device: torch.device) -> None:
    """Broadcast each tensor from rank 0 and keep this rank's slice, one tensor at a time: at most one full
    tensor is on the device."""
    full = dict(_tensors(source)) if source is not None else {}
    for name, target in _tensors(model):
        if source is not None:
            # A copy even on CPU: broadcasting must not write to a tensor that other names of `source` share.
            whole = full[name].detach().to(device=device, dtype=target.dtype).contiguous()
        else:
            whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(whole, src=0)
        copy_part(target, whole)


@torch.no_grad()
def _restore_buffers(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        stored = name_in_base(name)
        assert stored is not None, "adapters have no buffers"
        buffer.copy_(values[stored])


def _place_what_fsdp_leaves(recipe: Recipe, model: PreTrainedModel, device: torch.device) -> None:
    """Move buffers and ignored parameters to the device. With offloading, FSDP2 copies only its units from
    the host, so all other tensors must already be on the device."""
    for name in ignored_module_names(recipe, model):
        module = model.get_submodule(name)
        if any(parameter.device != device for parameter in module.parameters()):
            module.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
