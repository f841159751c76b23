"""What a checkpoint is saved from: the state of this rank at one step, and host memory into which it is
copied, so that training goes on while it is written."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_tune.model.internals.torch_internals import MESH_WITHOUT_GROUPS
from fsdp_tune.model.shard.local import parts_of, wraps_others
from fsdp_tune.worker.checkpoint.state import RankFile

ALIGNMENT_BYTES = 256


_PORTABLE = 1
"""`cudaHostRegisterPortable`: page-locked for all devices."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    step: int
    model: dict[str, torch.Tensor]
    optimizer: dict[str, dict[str, torch.Tensor]]
    """Parameter → kind → tensor."""
    rank: RankFile
    trainer: str
    """trainer_state.json"""
    facts: dict[str, object]
    best_step: int | None = None
    """The best evaluated step at the time of the snapshot. A later best step has no checkpoint before this
    one is written."""


class HostArena:
    """Host memory for one snapshot at a time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._unpin: weakref.finalize[[int], HostArena] | None = None
        self._used_bytes = 0

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Return a copy of a snapshot, independent of the live tensors. The copy returned before is
        overwritten."""
        every = [
            *snapshot.model.values(),
            *(each for kinds in snapshot.optimizer.values() for each in kinds.values()),
        ]
        tensors = [part for tensor in every for part in parts_of(tensor)]
        on_device = any(tensor.is_cuda for tensor in tensors)
        self._reserve(sum(_aligned(tensor) for tensor in tensors), pinned=on_device)
        self._used_bytes = 0
        copied = replace(
            snapshot,
            model=self._copies(snapshot.model),
            optimizer={parameter: self._copies(kinds) for parameter, kinds in snapshot.optimizer.items()},
        )
        if on_device:
            torch.cuda.current_stream().synchronize()
        return copied

    def _reserve(self, size_bytes: int, *, pinned: bool) -> None:
        if size_bytes <= self._memory.nbytes and pinned == (self._unpin is not None):
            return
        if self._unpin is not None:
            self._unpin()
        # Released before the larger one is allocated: a host may not have room for both.
        self._memory, self._unpin = np.empty(0, np.uint8), None
        self._memory = np.empty(size_bytes, np.uint8)
        if pinned and size_bytes:
            address = self._memory.ctypes.data
            pin_memory(address, size_bytes)
            # With the arena at the latest: memory that is freed while CUDA has it locked is taken for pinned
            # when it is used again.
            self._unpin = weakref.finalize(self, unpin_memory, address)
            self._unpin.atexit = False

    def _copies(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: self._copy(tensor) for name, tensor in tensors.items()}

    def _copy(self, value: Any) -> Any:
        """Return a copy of a tensor of any class; any other value, as of a module's extra state,
        unchanged."""
        if isinstance(value, DTensor):
            mesh, size, stride = _on_host(value.device_mesh), value.shape, value.stride()
            return DTensor.from_local(
                self._copy(value.to_local()),
                mesh,
                value.placements,
                run_check=False,
                shape=size,
                stride=stride,
            )
        if wraps_others(type(value)):
            names, rest = value.__tensor_flatten__()
            inner = {name: self._copy(getattr(value, name)) for name in names}
            return type(value).__tensor_unflatten__(inner, rest, value.size(), value.stride())
        return self._copy_plain(value) if isinstance(value, torch.Tensor) else value

    def _copy_plain(self, tensor: torch.Tensor) -> torch.Tensor:
        size_bytes = tensor.numel() * tensor.element_size()
        # By numpy, so that the storage ends with the tensor: DCP copies tensors whose storage is larger
        # before it writes them.
        part = (
            torch.from_numpy(self._memory[self._used_bytes : self._used_bytes + size_bytes])
            .view(tensor.dtype)
            .view(tensor.shape)
        )
        self._used_bytes += _aligned(tensor)
        # waited for in `copy`, which only does so for CUDA
        return part.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def pin_memory(address: int, size_bytes: int) -> None:
    """Page-lock memory for copies from a GPU. Raises: CudaError, a RuntimeError."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE)))


def unpin_memory(address: int) -> None:
    """Undo `pin_memory`. Raises: CudaError, a RuntimeError."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))


def _aligned(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, rounded up so that the next one begins where any dtype may."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@functools.cache
def _on_host(mesh: DeviceMesh) -> DeviceMesh:
    """Return the same mesh for tensors in host memory.

    It only describes the layout: process groups would create communicators on the devices during training.
    """
    if mesh.device_type == "cpu":
        return mesh
    return DeviceMesh(
        "cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, **MESH_WITHOUT_GROUPS.value(False)
    )
