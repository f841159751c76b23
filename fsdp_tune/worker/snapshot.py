"""What one checkpoint holds, and a copy of it that training can no longer change."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True, slots=True)
class Snapshot:
    step: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    rank: dict[str, Any]
    """This rank's own: generators and sums."""
    trainer: str
    """trainer_state.json"""
    facts: dict[str, Any]
    best_step: int | None = None
    """The best evaluated step when this one was taken. A later best has no checkpoint before this one is written."""


def in_host_memory(snapshot: Snapshot) -> Snapshot:
    """The same with tensors of its own, detached from the live ones."""
    return replace(snapshot, model=_copy(snapshot.model), optimizer=_copy(snapshot.optimizer))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, DTensor):
        mesh, size, stride = _on_host(value.device_mesh), value.shape, value.stride()
        return DTensor.from_local(_copy(value.to_local()), mesh, value.placements, run_check=False, shape=size, stride=stride)
    if is_traceable_wrapper_subclass(value):  # torchao's `to` ignores `copy`: what is in host memory would be shared
        names, rest = value.__tensor_flatten__()
        inner = {name: getattr(value, name).detach().to("cpu", copy=True) for name in names}
        return type(value).__tensor_unflatten__(inner, rest, value.size(), value.stride())
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return value


@functools.cache
def _on_host(mesh: DeviceMesh) -> DeviceMesh:
    """The same layout over the same ranks, for tensors in host memory. It says where shards belong and sends nothing: groups of its
    own would be communicators on the devices, made in the middle of the training."""
    if mesh.device_type == "cpu":
        return mesh
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
