"""Find gathered FSDP units and their shards, and reshard them after a forward without a backward.

Units that stay gathered after the forward (the root, the kept tail, every unit under SHARD_GRAD_OP) are
resharded by their backward. Without a backward they stay gathered; the optimizer then updates the shards, and
the next step would compute with the old weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.shard.local import plain_name
from fsdp_tune.model.shard.wrap import fsdp_groups

Units = list[tuple[str, Any]]
"""(name, FSDP2 parameter group or FSDP1 module) of each unit."""


def units_of(wrapped: nn.Module) -> Units:
    """Return every unit of a wrapped model, under the name of its first module."""
    if isinstance(wrapped, FullyShardedDataParallel):
        fsdp1 = [
            (name, each)
            for name, each in wrapped.named_modules()
            if isinstance(each, FullyShardedDataParallel)
        ]
        return [(plain_name(name) or "(root)", each) for name, each in fsdp1]
    names = {id(module): name for name, module in wrapped.named_modules()}
    return [(names[id(group.modules[0])] or "(root)", group) for group in fsdp_groups(wrapped)]


def gathered_units(units: Units) -> list[str]:
    """Return the names of the units whose full parameters are in memory."""
    return [name for name, unit in units if _is_gathered(unit)]


def _is_gathered(unit: Any) -> bool:
    if not isinstance(unit, FullyShardedDataParallel):
        return not unit.is_sharded
    handle = internals.HANDLE.of(unit)
    if handle is None or not handle.uses_sharded_strategy:
        return False
    # The first forward allocates the storage for full parameters.
    return internals.FULL_PARAMETER.of(handle.flat_param) is not None and not handle.needs_unshard()


def own_parameters(wrapped: nn.Module) -> list[torch.Tensor]:
    """Return the parameters that this rank holds between steps.

    While a unit is gathered, its modules have the full parameters, and the shards are found in the unit.
    """
    if isinstance(wrapped, FullyShardedDataParallel):
        flat = _flat_parameters(wrapped)
        shards = [each if (shard := internals.LOCAL_SHARD.of(each)) is None else shard for each in flat]
        # a parameter of a unit is a view of its flat one
        inside = {each.untyped_storage().data_ptr() for each in flat}
        return [*shards, *(p for p in wrapped.parameters() if p.untyped_storage().data_ptr() not in inside)]
    groups = [unit for _, unit in units_of(wrapped)]
    sharded = {
        internals.PARAM_NAME.of(each): each.sharded_param for group in groups for each in group.fsdp_params
    }
    return [
        *sharded.values(),
        *(parameter for name, parameter in wrapped.named_parameters() if name not in sharded),
    ]


def own_gradients(wrapped: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that this rank holds: of its shards, and under FSDP1 of a unit whose gradients are
    not reduced yet."""
    kept = [parameter.grad for parameter in own_parameters(wrapped)]
    if isinstance(wrapped, FullyShardedDataParallel):
        flat = _flat_parameters(wrapped)
        kept += [gradient for each in flat for gradient in (each.grad, internals.SAVED_GRADIENT.of(each))]
    return [gradient for gradient in kept if gradient is not None]


def _flat_parameters(wrapped: FullyShardedDataParallel) -> list[Any]:
    """Return the flat parameter of each FSDP1 unit that has parameters."""
    handles = [internals.HANDLE.of(unit) for _, unit in units_of(wrapped)]
    return [handle.flat_param for handle in handles if handle is not None]


@contextlib.contextmanager
def outside_step(wrapped: nn.Module, device: torch.device) -> Iterator[None]:
    """Run forwards outside of a training step, without gradients. On exit, units are sharded and generators
    restored.

    Every forward except those of `model.step.forward_backward` runs in this context.
    """
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        for _, unit in units_of(wrapped):
            if isinstance(unit, FullyShardedDataParallel):
                if _is_gathered(unit):
                    internals.RESHARD.get()(unit, internals.HANDLE.of(unit), True)
            else:
                unit.reshard()
                # A backward prefetches in the recorded order of forwards. This forward has no backward; the
                # next one would use its record.
                unit.comm_ctx.post_forward_order.clear()
                internals.FORWARD_RECORD.of(unit).clear()
