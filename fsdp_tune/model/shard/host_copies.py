"""Keep inputs of recomputed layers in host memory: copied out while the layer computes, and back during the
backward of the next layer.

torch's `save_on_cpu` copies on the compute stream, which then waits for the host link twice per layer. Here a
separate stream copies: out during the layer's forward, after which the source memory may be reused; back when
the layer above starts its backward, so that the input of one more layer is on the device at that time.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


@dataclass(eq=False)
class _Inputs:
    """Saved inputs of one layer in one forward."""

    below: weakref.ref[_Inputs] | None
    """Inputs of the layer below; the reference is dead after its backward."""
    stay: bool
    kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """Copies on the host, or the original tensors if they stay."""
    back: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """Copies on the device, complete or in flight, by index."""
    arrived: object = None


class HostCopies:
    """The host copies of one model. All its layers copy on one stream, in order."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._leaving: list[tuple[object, torch.Tensor]] = []
        self._last: weakref.ref[_Inputs] | None = None

    @contextlib.contextmanager
    def of_layer(self, *, stay: bool) -> Iterator[None]:
        """Save the inputs of one layer during its forward. `stay` is for the last layer, whose inputs the
        backward needs immediately."""
        inputs = _Inputs(self._last, stay)
        self._last = weakref.ref(inputs)
        with saved_tensors_hooks(functools.partial(self._pack, inputs), self._unpack):
            yield
        for departed, _ in self._leaving:
            self._current().wait_event(departed)
        self._leaving.clear()

    def _pack(self, inputs: _Inputs, tensor: torch.Tensor) -> tuple[_Inputs, int] | torch.Tensor:
        tensor = tensor.detach()
        if not tensor.numel():
            return tensor  # torch 2.11 also saves an empty tensor
        if not inputs.stay:
            self._device = tensor.device
            host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._leaving.append((self._copy(tensor, host), tensor))
            tensor = host
        inputs.kept.append(tensor)
        return inputs, len(inputs.kept) - 1

    def _unpack(self, packed: tuple[_Inputs, int] | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        inputs, index = packed
        below = inputs.below() if inputs.below is not None else None
        if inputs.stay:
            tensor = inputs.kept[index]
        else:
            if index not in inputs.back:
                self._fetch(inputs)
            self._current().wait_event(inputs.arrived)
            tensor = inputs.back[index]
        if below is not None and not below.stay and not below.back:
            self._fetch(below)
        return tensor

    def _fetch(self, inputs: _Inputs) -> None:
        """Start copying inputs back to the device. The started backward uses them all, so no memory is freed
        while a copy is in flight."""
        for index, host in enumerate(inputs.kept):
            inputs.back[index] = torch.empty_like(host, device=self._device)
            inputs.arrived = self._copy(host, inputs.back[index])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> object:
        """Copy after all work issued so far, since the allocator relies on the order of the compute stream.
        Return the completion event."""
        module = self._module
        if self._stream is None:
            self._stream = module.Stream(priority=0)
        self._stream.wait_stream(self._current())
        with module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _current(self) -> Any:
        return self._module.current_stream()

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self._device)
