"""Find what held the memory when an allocation failed, on device or host."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp_tune.core.errors import Problem
from fsdp_tune.core.host import memory_info, peak_resident_bytes
from fsdp_tune.model.allocation_errors import is_of_cuda
from fsdp_tune.model.shard.gathered import own_gradients, own_parameters
from fsdp_tune.model.shard.local import parts_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from fsdp_tune.worker.observe.memory_problems import Host, Moment, host_problem, sizes_in

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer


def device_moment(error: BaseException, heartbeat: HeartbeatWriter, trainer: FsdpTrainer | None) -> Moment:
    """Return the live memory from the message of the allocator and the tensors of this rank; without a
    trainer, from the message only."""
    components = {} if trainer is None else live_components(trainer)
    module = None if trainer is None else running_module(error, trainer.wrapped)
    return Moment(heartbeat.phase, heartbeat.step, components, sizes_in(str(error)), module)


def running_module(error: BaseException, model: nn.Module) -> str | None:
    """Return the name of the innermost module whose code raised the error; None if that is not the code of a
    part of the model."""
    names = {id(module): name for name, module in model.named_modules() if name}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    found = [names[id(module)] for frame in frames if id(module := frame.f_locals.get("self")) in names]
    return found[-1] if found else None


def host_out_of_memory(recipe: Recipe, heartbeat: HeartbeatWriter, error: BaseException) -> Problem:
    return host_problem(recipe, heartbeat.phase, _host(), page_locked=is_of_cuda(error))


def live_components(trainer: FsdpTrainer) -> dict[str, int]:
    """Return the bytes on the device of this rank that persist between steps."""
    device = trainer.args.device
    moments = [value for entry in trainer.live_optimizer.state.values() for value in entry.values()]
    return {
        "parameters": _bytes(own_parameters(trainer.wrapped), device),
        "gradients": _bytes(own_gradients(trainer.wrapped), device),
        "optimizer state": _bytes(moments, device),
    }


def _bytes(tensors: Iterable[object], device: torch.device) -> int:
    """Return the bytes of this rank's parts of tensors on `device`; shared storage counts once."""
    parts = [part for tensor in tensors for part in parts_of(tensor) if part.device.type == device.type]
    storages = [part.untyped_storage() for part in parts]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _host() -> Host:
    """Linux's own numbers; elsewhere only the largest that this process has been."""
    memory = memory_info()
    return Host(peak_resident_bytes(), memory.get("MemAvailable"), memory.get("MemTotal"))
