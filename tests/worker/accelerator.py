"""Stand-ins for an accelerator, in a build of torch that has none: late as the real one is, and as strict
about misuse.

What they copy: `torch/cuda/streams.py` and `aten/src/ATen/cuda/CUDAEvent.h` (events), `torch/cuda/random.py`
(generators), `_new_process_group_helper` in `torch/distributed/distributed_c10d.py` (process groups).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}


class Queue:
    """The device's queue of work: nothing in it happens until the host waits for it."""

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self.issued = self.done = 0
        self.seconds = 0.0
        """The device's clock: how long its work has taken."""

    def add(self, work: Callable[[], None]) -> int:
        self._work.append(work)
        self.issued += 1
        return self.issued

    def compute(self, seconds: float) -> None:
        def work() -> None:
            self.seconds += seconds

        self.add(work)

    def run_until(self, number: int) -> None:
        while self.done < number:
            self._work.popleft()()
            self.done += 1


class Event:
    """`torch.cuda.Event` on `queue`."""

    queue: Queue

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timed = enable_timing
        self._number: int | None = None
        self._at_seconds = 0.0

    def record(self) -> None:
        self._number = self.queue.add(self._pass)

    def _pass(self) -> None:
        self._at_seconds = self.queue.seconds

    def synchronize(self) -> None:
        if self._number is not None:  # an event that was never recorded is complete
            self.queue.run_until(self._number)

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds."""
        if not (self._is_timed and end._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._number is None or end._number is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(self._number, end._number) > self.queue.done:
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end._at_seconds - self._at_seconds) * 1000


class PinnedScalar:
    """A page-locked tensor of no dimensions: a copy into it that does not block arrives when the device comes
    to it."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self._tensor = queue, torch.zeros(())

    def numpy(self) -> Any:
        return self._tensor.numpy()

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        value = source.clone()
        number = self._queue.add(lambda: self._tensor.copy_(value) and None)
        if not non_blocking:
            self._queue.run_until(number)


@contextlib.contextmanager
def late_cuda() -> Iterator[Queue]:
    """`torch.cuda.Event` and page-locked scalars on a queue that runs when the host waits."""
    queue = Queue()
    event = type("Event", (Event,), {"queue": queue})
    make = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Any:
        return PinnedScalar(queue) if pin_memory else make(*size, **options)

    with mock.patch.object(torch.cuda, "Event", event), mock.patch.object(torch, "empty", empty):
        yield queue


class _Collectives(dist.ProcessGroupGloo):
    """A device's backend, with gloo underneath: splits, connects when its device is bound, and takes its
    limit from options."""

    class Options:
        _timeout: timedelta

    supports_splitting = True

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self.connected_to: Any = None
        _alive.append(self)  # torch holds the C++ part alone

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected_to = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Called on ranks outside a new group, since ncclCommSplit is collective over the parent."""
        assert device == self.connected_to


_alive: list[_Collectives] = []


def _make_hccl(group: Any, _options: Any) -> _Collectives:
    """Create the backend as torch_npu's extension does."""
    options = _Collectives.Options()
    options._timeout = group.timeout
    return _Collectives(group.store, group.group_rank, group.group_size, options)


@contextlib.contextmanager
def devices(device_type: str, count: int) -> Iterator[list[int]]:
    """A machine with `count` devices, and their backend; yields the indices that were set. `npu` stays known
    to the process.

    `torch.accelerator.is_available` is false: a mesh then makes its groups by `new_group`, since gloo
    underneath cannot split.
    """
    chosen: list[int] = []
    module = SimpleNamespace(
        device_count=lambda: count,
        is_available=lambda: count > 0,
        set_device=chosen.append,
        is_initialized=lambda: bool(chosen),
    )
    if device_type == "npu" and not hasattr(torch, "npu"):
        torch.utils.rename_privateuse1_backend("npu")
        torch._register_device_module("npu", SimpleNamespace())
        dist.Backend.register_backend("hccl", _make_hccl, extended_api=True, devices=["npu"])
    built_in = {"cuda": "NCCL", "xpu": "XCCL"}.get(device_type)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, device_type, module))
        stack.enter_context(
            mock.patch.object(
                torch.accelerator, "current_accelerator", return_value=torch.device(device_type)
            )
        )
        stack.enter_context(mock.patch.object(torch.accelerator, "device_count", return_value=count))
        stack.enter_context(mock.patch.object(torch.accelerator, "is_available", return_value=False))
        if built_in is not None:
            stack.enter_context(
                mock.patch.object(c10d, f"is_{built_in.lower()}_available", return_value=True)
            )
            stack.enter_context(mock.patch.object(c10d, f"ProcessGroup{built_in}", _Collectives, create=True))
        try:
            yield chosen
        finally:
            _alive.clear()
