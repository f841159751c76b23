"""The fake device `gpu`, which torch treats as an accelerator.

The device uses torch's PrivateUse1 slot with a Python backend: autograd, FSDP2 and autocast take their
accelerator paths (streams, events, fused dropout), unlike on `cpu`, and also in a build of torch without
CUDA. Streams and events only record waits.

torch leaves autocast's list of operations to each backend; this is CUDA's (`autocast_mode.h`). Plain DDP
computes in half precision by autocast: matrices are cast, a weight once for each forward (autocast's own
cache), and norms and sums run in fp32.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import library

from fsdp_tune.model.internals.torch_internals import BACKEND_MODULE, HOST_VALUES, REGISTER_BACKEND


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module or class for the duration of the block."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def nothing(*_args: object, **_options: object) -> None:
    """Do nothing, in place of a function whose effect a trace must not have."""


@contextlib.contextmanager
def values_of_host() -> Iterator[None]:
    """Let lists, numbers and arrays become tensors of the fake device and indices of its tensors; enter it
    before the fake mode.

    Below the modes, where nothing is fake, torch would allocate such a tensor on the device itself. Now it
    makes one on the host, and an operation copies it.
    """
    get, put = torch.Tensor.__getitem__, torch.Tensor.__setitem__

    def selected(tensor: torch.Tensor, index: Any) -> torch.Tensor:
        return get(tensor, _by_position(index))

    def assigned(tensor: torch.Tensor, index: Any, value: Any) -> None:
        put(tensor, _by_position(index), value)

    with (
        HOST_VALUES.replaced(True),
        replaced(torch.Tensor, "__getitem__", selected),
        replaced(torch.Tensor, "__setitem__", assigned),
    ):
        yield


def _by_position(index: Any) -> Any:
    """Replace masks (lists and arrays of booleans) by the positions that they select, since a mask on the
    fake device has no values."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_mask, parts)):
        return index
    return tuple(
        each for part in parts for each in (np.asarray(part).nonzero() if _is_mask(part) else (part,))
    )


def _is_mask(part: Any) -> bool:
    if isinstance(part, np.ndarray):
        return part.dtype == np.bool_
    return isinstance(part, list) and bool(part) and all(isinstance(each, bool) for each in part)


DEVICE = "gpu"
# FSDP2 creates its streams in this order, in the first forward (`FSDPCommContext.lazy_init`). A stream with
# an explicit priority of 0 is that of the host copies (`model/shard/recompute.py`).
STREAMS = ("compute", "all-gather copy-in", "all-gather", "reduce-scatter", "all-reduce", "host copies")


@dataclass
class Clock:
    """The common order of all records, the current stream, and the waits between streams."""

    now: int = 0
    streams: list[int] = field(default_factory=lambda: [0])
    next_stream: int = 1
    waits: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    """(at, waiting stream, source stream, position in the order up to which it waits)"""

    def tick(self) -> int:
        self.now += 1
        return self.now - 1

    def wait(self, stream: int, source: int, until: int) -> None:
        if stream != source:
            self.waits.append((self.tick(), stream, source, until))


clock = Clock()
"""The clock of the current trace: torch gets streams from the device module, of which a process has one."""


def restart() -> Clock:
    """Start a new order for the next trace of this process."""
    global clock
    clock = Clock()
    return clock


class Event:
    def __init__(self, *_args: object, **_options: object) -> None:
        self.source, self.until = 0, 0

    def record(self, stream: Stream | None = None) -> Event:
        self.source, self.until = stream.index if stream is not None else clock.streams[-1], clock.now
        return self

    def wait(self, stream: Stream | None = None) -> None:
        clock.wait(stream.index if stream is not None else clock.streams[-1], self.source, self.until)

    def synchronize(self) -> None:
        """Block the CPU. In the order of records, the compute stream continues after the event."""
        clock.wait(0, self.source, self.until)

    def query(self) -> bool:
        return True


class Stream:
    # Attributes of torch's own streams; FSDP2 of torch 2.15 passes the stream to an operation that backends
    # may replace.
    device_index, device_type = 0, 0

    def __init__(
        self, *_args: object, index: int | None = None, priority: int | None = None, **_options: object
    ) -> None:
        if index is None and priority == 0:
            index = len(STREAMS) - 1
        if index is None:
            index, clock.next_stream = min(clock.next_stream, len(STREAMS) - 1), clock.next_stream + 1
        self.index = self.stream_id = index

    def wait_stream(self, other: Stream) -> None:
        clock.wait(self.index, other.index, clock.now)

    def wait_event(self, event: Event) -> None:
        clock.wait(self.index, event.source, event.until)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        clock.wait(0, self.index, clock.now)

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is captured; optimizers of torch 2.15 query it in each step."""
        return False


def current_stream(*_device: object) -> Stream:
    return Stream(index=clock.streams[-1])


class _Module:
    """The device module, as `torch.cuda` is for CUDA, on top of torch's own for a backend in Python."""

    Stream, Event = Stream, Event

    def current_stream(self, *_device: object) -> Stream:
        return current_stream()

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        clock.streams.append(clock.streams[-1] if stream is None else stream.index)
        try:
            yield
        finally:
            clock.streams.pop()

    def device(self, *_device: object) -> Any:
        return contextlib.nullcontext()

    def set_device(self, *_device: object) -> None:
        pass

    def synchronize(self, *_device: object) -> None:
        pass

    def get_rng_state(self, *_device: object) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, *_state: object) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]


def install() -> None:
    """Register the device with torch, once per process; it cannot be undone."""
    if not hasattr(torch, DEVICE):
        REGISTER_BACKEND.get()(DEVICE, type("DeviceModule", (_Module, BACKEND_MODULE.get()), {})())


# AT_FORALL_LOWER_PRECISION_FP, those that language models use; `cuda_kernels` handles attention.
_LOWER = (
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "addbmm",
    "mv",
    "addmv",
    "addr",
    "conv1d",
    "prelu",
)
# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE.
_FP32 = (
    "layer_norm",
    "native_layer_norm",
    "group_norm",
    "rms_norm",
    "softmax.int",
    "log_softmax.int",
    "nll_loss",
    "cross_entropy_loss",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "pow.Scalar",
    "exp",
    "log",
    "log1p",
    "expm1",
    "rsqrt",
    "reciprocal",
    "softplus",
    "logsumexp",
    "sum",
    "sum.dim_IntList",
    "cumsum",
    "cumprod",
    "prod",
)
_weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


@functools.cache
def install_autocast() -> list[library.Library]:
    """Install autocast for the fake device, once per process; the returned objects must stay alive."""
    fallback = library.Library("_", "IMPL", "AutocastPrivateUse1")
    fallback.fallback(library.fallthrough_kernel)
    casts = library.Library("aten", "IMPL", "AutocastPrivateUse1")
    for name in _LOWER:
        casts.impl(name, functools.partial(_run, _overload(name), None))
    for name in _FP32:
        casts.impl(name, functools.partial(_run, _overload(name), torch.float32))
    return [fallback, casts]


def forget_weights() -> None:
    """Empty the cache of cast weights, as leaving an autocast context does."""
    _weights.clear()


def _overload(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _run(operation: Any, own: torch.dtype | None, /, *args: Any, **kwargs: Any) -> Any:
    wanted = own or torch.get_autocast_dtype(DEVICE)
    torch.set_autocast_enabled(DEVICE, False)  # otherwise the operation would be dispatched here again
    try:
        # `set_opt_dtype`: the caller's counts
        if not any(isinstance(each, torch.dtype) for each in (*args, *kwargs.values())):
            args, kwargs = (
                tuple(_cast(args, wanted)),
                {name: _cast(value, wanted) for name, value in kwargs.items()},
            )
        return operation(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(DEVICE, True)


def _cast(leaf: Any, wanted: torch.dtype) -> Any:
    if isinstance(leaf, list | tuple):
        return [_cast(each, wanted) for each in leaf]
    if (
        not isinstance(leaf, torch.Tensor)
        or not leaf.is_floating_point()
        or leaf.dtype in (wanted, torch.float64)
    ):
        return leaf
    if wanted == torch.float32 or not (leaf.is_leaf and leaf.requires_grad and leaf.dtype == torch.float32):
        return leaf.to(wanted)
    if id(leaf) not in _weights:
        _weights[id(leaf)] = (leaf, leaf.to(wanted))
    return _weights[id(leaf)][1]
