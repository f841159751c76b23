"""Inputs of recomputed layers in host memory: on their way there while the layer computes, and back while the layer above goes backward.

torch's `save_on_cpu` copies on the stream that computes, which then waits for the link to the host twice a layer. Here a stream of its
own copies: out while the layer computes, at whose end what was read may be written over; back when the layer above begins its backward,
so that one input more than its own is on the device then.
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
    """Of one layer in one forward."""

    below: weakref.ref[_Inputs] | None
    """Of the layer before; dead once its backward is over."""
    stay: bool
    kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    """On the host, or where they were if they stay."""
    back: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """On the device again, or under way."""
    arrived: Any = None


class HostCopies:
    """Of one model. All its layers copy on one stream, one after the other."""

    def __init__(self) -> None:
        self._device = torch.device("cpu")
        self._stream: Any = None
        self._leaving: list[tuple[Any, torch.Tensor]] = []
        self._last: weakref.ref[_Inputs] | None = None

    @contextlib.contextmanager
    def of_layer(self, *, stay: bool) -> Iterator[None]:
        """Around what saves a layer's inputs and computes. `stay`: of the uppermost layer, whose inputs the backward asks for at once."""
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
            return tensor  # torch 2.11 saves an empty one beside the inputs, wherever they are
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
        """A backward that has begun takes what was asked for: memory on its way back is not given up before it has arrived."""
        for index, host in enumerate(inputs.kept):
            inputs.back[index] = torch.empty_like(host, device=self._device)
            inputs.arrived = self._copy(host, inputs.back[index])

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """After all that was issued before it, since the allocator counts on the order of the computing stream. When it is done."""
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
