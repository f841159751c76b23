"""Read what the wrapper shards, casts and gathers from its live units."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.loading.assemble import Loaded
from fsdp_tune.model.shard.local import kept_in_fp32, plain_name
from fsdp_tune.model.shard.wrap import fsdp_groups
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.records import UnitState
from fsdp_tune.worker.readback.one_or_all import of_all, only


def wrapper_of(wrapped: nn.Module) -> str:
    if isinstance(wrapped, FSDPModule):
        return "fsdp2"
    if isinstance(wrapped, FullyShardedDataParallel):
        return "fsdp1"
    return "ddp" if isinstance(wrapped, DistributedDataParallel) else type(wrapped).__name__


def cast_parameters(loaded: Loaded) -> list[nn.Parameter]:
    """Return the trained parameters whose dtype is that of the recipe: all but those that the model's class
    keeps in fp32."""
    kept = kept_in_fp32(loaded.model)
    return [
        p for name, p in loaded.wrapped.named_parameters() if p.requires_grad and plain_name(name) not in kept
    ]


def dtype_name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def offloads(wrapped: nn.Module, kind: str) -> bool:
    policies = (
        [wrapped.cpu_offload] if kind == "fsdp1" else [group.offload_policy for group in fsdp_groups(wrapped)]
    )
    return any(map(goes_to_host, policies))


def goes_to_host(policy: object) -> bool:
    """FSDP2 encodes it in the class of the policy, FSDP1 in a field."""
    return isinstance(policy, CPUOffloadPolicy) or bool(getattr(policy, "offload_params", False))


def read_sharding(kind: str, recipe: Recipe, loaded: Loaded) -> dict[str, Any]:
    """Return the fields of a report that depend on the wrapper."""
    return _ddp(recipe, loaded) if kind == "ddp" else {"fsdp2": _fsdp2, "fsdp1": _fsdp1}[kind](loaded)


def _fsdp2(loaded: Loaded) -> dict[str, Any]:
    names = {id(module): name or "(root)" for name, module in loaded.model.named_modules()}
    units: list[UnitState] = []
    placements: Counter[str] = Counter()
    for group in fsdp_groups(loaded.model):
        tensors = [parameter.sharded_param for parameter in group.fsdp_params]
        placements.update(
            str([str(p) for p in tensor.placements]) for tensor in tensors if not _is_inside(tensor)
        )
        policies = [parameter.mp_policy for parameter in group.fsdp_params]
        state: Any = internals.FSDP_STATE.of(group.modules[0])()
        units.append(
            UnitState(
                modules=[names.get(id(m), "?") for m in group.modules],
                parameters=sum(tensor.numel() for tensor in tensors),
                is_trained=any(tensor.requires_grad for tensor in tensors),
                reshard_after_forward=_reshard(group),
                param_dtype=only({dtype_name(policy.param_dtype) for policy in policies}),
                reduce_dtype=only({dtype_name(policy.reduce_dtype) for policy in policies}),
                output_dtype=only({dtype_name(policy.output_dtype) for policy in policies}),
                forward_prefetch=len(internals.FORWARD_PREFETCH.of(state)),
                # A list of the unit itself ends the prefetching: no unit before it has a backward.
                backward_prefetch=sum(other is not state for other in internals.BACKWARD_PREFETCH.of(state)),
            )
        )
    as_stored = [unit for unit in units if tuple(unit.modules) in loaded.units.of_precision]
    cast = [unit for unit in units if unit not in as_stored]
    holder = (loaded.units.holder,)
    stays_gathered = {("(root)",), holder} | loaded.units.keeps_gathered
    layers = [unit for unit in units if tuple(unit.modules) not in stays_gathered]
    first_trained = next((index for index, unit in enumerate(layers) if unit.is_trained), 0)
    plain = [name for name, p in loaded.model.named_parameters() if not isinstance(p, DTensor)]
    storage = only({dtype_name(p.dtype) for p in cast_parameters(loaded)})
    return {
        "placements": _parsed(placements),
        "reshard_after_forward": only({unit.reshard_after_forward for unit in layers}) if layers else None,
        "reshard_after_backward": only({group.reshard_after_backward for group in fsdp_groups(loaded.model)}),
        "compute_dtype": of_all(unit.param_dtype or storage for unit in cast),
        "cast_although_kept": [unit.modules[0] for unit in as_stored if unit.param_dtype is not None],
        "reduce_dtype": of_all(unit.reduce_dtype for unit in units),
        "forward_prefetch": max((unit.forward_prefetch for unit in layers), default=0),
        "backward_prefetch": max((unit.backward_prefetch for unit in layers[first_trained:]), default=0)
        or "implicit",
        "prefetching_units": len(layers),
        # Frozen units before the first trained one have no backward, and are not gathered ahead of it.
        "prefetching_units_of_backward": len(layers) - first_trained,
        "output_dtype": of_all(unit.output_dtype for unit in units),
        "units": units,
        "sharded_inside": [
            name for name, p in loaded.model.named_parameters() if isinstance(p, DTensor) and _is_inside(p)
        ],
        "not_sharded": plain,
        "sharded": sum(isinstance(p, DTensor) for p in loaded.model.parameters()),
    }


def _is_inside(tensor: DTensor) -> bool:
    """Return whether a stack of experts is sharded inside of each expert."""
    return any(isinstance(placement, Shard) and placement.dim != 0 for placement in tensor.placements)


def _reshard(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None:
        return False
    return (
        True
        if after is group.mesh_info or after.shard_mesh_size == group.mesh_info.shard_mesh_size
        else int(after.shard_mesh_size)
    )


def _parsed(placements: Counter[str]) -> list[str]:
    """`Shard(dim=0)` for torch's `S(0)`, so that the report does not change with torch's way of printing."""
    text = only(set(placements)) if placements else "[]"
    words = str(text).replace("S(0)", "Shard(dim=0)").replace("'R'", "'Replicate()'")
    return [word.strip(" '\"") for word in words.strip("[]").split(",")] if words != "[]" else []


def _fsdp1(loaded: Loaded) -> dict[str, Any]:
    units = [module for module in loaded.wrapped.modules() if isinstance(module, FullyShardedDataParallel)]
    strategy = only({unit.sharding_strategy.name for unit in units})
    precision = units[0].mixed_precision
    storage = only({dtype_name(p.dtype) for p in cast_parameters(loaded)})
    # torch answers any strategy with NO_SHARD on one rank; the root alone is freed by no one between forward
    # and backward.
    return {
        "placements": []
        if strategy == "NO_SHARD"
        else [*(["Replicate()"] if "HYBRID" in strategy else []), "Shard(dim=0)"],
        "reshard_after_forward": None
        if strategy == "NO_SHARD" or len(units) == 1
        else strategy in {"FULL_SHARD", "HYBRID_SHARD"},
        "compute_dtype": dtype_name(precision.param_dtype) or storage,
        "reduce_dtype": dtype_name(precision.reduce_dtype),
        "units": [
            UnitState(modules=[type(unit.module).__name__], strategy=unit.sharding_strategy.name)
            for unit in units
        ],
        "sharded": len(units),
    }


def _ddp(recipe: Recipe, loaded: Loaded) -> dict[str, Any]:
    from fsdp_tune.model.step import compute_context

    storage = only({dtype_name(p.dtype) for p in cast_parameters(loaded)})
    with compute_context(recipe, recipe.launch.device):
        enabled = torch.is_autocast_enabled(recipe.launch.device)
        compute = dtype_name(torch.get_autocast_dtype(recipe.launch.device)) if enabled else storage
    return {
        "placements": [],
        "reshard_after_forward": None,
        "compute_dtype": compute,
        "reduce_dtype": storage,
        "units": [],
        "sharded": 0,
    }
