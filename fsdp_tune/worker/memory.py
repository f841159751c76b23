"""Turns an allocation that failed, on the device or on the host, into a problem that says what held the memory."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsdp_tune.diagnose.oom import Host, Moment, host_problem, sizes_in
from fsdp_tune.errors import Problem
from fsdp_tune.model.local import local_part
from fsdp_tune.recipe.schema import Recipe
from fsdp_tune.units import KIB
from fsdp_tune.worker.heartbeat import Heartbeat

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer

# RuntimeErrors of torch's CPU allocator (c10/core/impl/alloc_cpu.cpp), which raises no MemoryError.
_HOST_WORDS = ("can't allocate memory", "not enough memory: you tried to allocate")

# What libraries that allocate past torch's allocator (NCCL, cuBLAS) raise when the device is full.
_DEVICE_WORDS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "Cuda failure 2 'out of memory'")


def is_device_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_WORDS)
    )


def is_host_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_WORDS))


def device_moment(error: BaseException, heartbeat: Heartbeat, trainer: FsdpTrainer | None) -> Moment:
    """What was live, from the allocator's message and from what this rank holds; before there is a trainer, the message alone."""
    components = {} if trainer is None else live_components(trainer)
    return Moment(heartbeat.phase, heartbeat.step, components, sizes_in(str(error)))


def host_out_of_memory(recipe: Recipe, heartbeat: Heartbeat) -> Problem:
    return host_problem(recipe, heartbeat.phase, _host())


def live_components(trainer: FsdpTrainer) -> dict[str, int]:
    """Bytes on this rank's device of what lives from step to step."""
    device = trainer.args.device
    parameters = list(trainer.wrapped.parameters())
    moments = [value for entry in trainer.optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return {
        "parameters": _bytes(parameters, device),
        "gradients": _bytes((p.grad for p in parameters if p.grad is not None), device),
        "optimizer state": _bytes(moments, device),
    }


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """Of the local parts that lie on `device`; storage that two tensors share counts once."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = local_part(tensor)
        if local.device.type == device.type:
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _host() -> Host:
    """Linux's own numbers; elsewhere only the largest that this process has been."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        numbers = {line.split(":")[0]: int(line.split()[1]) * KIB for line in lines}
    except OSError:
        numbers = {}
    process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    return Host(process_bytes, numbers.get("MemAvailable"), numbers.get("MemTotal"))
