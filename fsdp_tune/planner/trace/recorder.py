"""Record every allocation, operation and collective of a step, in order.

A storage is an allocation: views share it, and it ends with its last reference. FSDP frees and refills
gathered parameters by resizing their storage, which is not dispatched, so resizing is recorded as well.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_tune.model.internals import torch_internals as internals
from fsdp_tune.model.nested_tensors import tensors_in
from fsdp_tune.model.shard.local import plain
from fsdp_tune.planner.predict.derive import slice_for
from fsdp_tune.planner.trace import cuda_kernels as kernels
from fsdp_tune.planner.trace.fake_gpu import DEVICE, Clock, nothing, replaced
from fsdp_tune.planner.trace.known_results import known_results
from fsdp_tune.planner.trace_format import KINDS, PHASES, Call

KIND = {name: index for index, name in enumerate(KINDS)}
PHASE = {name: index for index, name in enumerate(PHASES)}


@dataclass(slots=True)
class Place:
    """Current position in the run."""

    step: int = -1
    micro: int = -1
    phase: int = 0
    layer: int = -1
    module: str = ""
    in_head: bool = False


@dataclass(slots=True)
class Allocation:
    block: int
    size: int
    layer: int
    stream: int
    host: bool
    kind: int
    held: weakref.ref[Any] | None = None


# The streams of FSDP2 hold nothing but its buffers.
_KIND_OF_STREAM = {1: "all-gather buffers", 2: "all-gather buffers", 3: "reduce buffers", 4: "reduce buffers"}
_ASKS_FOR_DEVICE = torch.ops.prim.device.default
_OWNED = (PHASE["clip"], PHASE["optimizer"], PHASE["zero_grad"])


class Recorder:
    """Records while `recording`, inside the FakeTensorMode, so that it receives the real operations and not
    those inside fake kernels."""

    def __init__(
        self, mode: Any, clock: Clock, groups: dict[str, int], micro_batch: int, *, compiles: bool
    ) -> None:
        self.clock, self.groups, self.micro_batch = clock, groups, micro_batch
        self.slice_tokens = slice_for(micro_batch)
        self.in_slice = False
        self.windows: Sequence[int | None] = ()
        """Attention windows of the traced layers, if the kernel skips what is outside of them."""
        self.place = Place()
        self.events: list[tuple[Any, ...]] = []
        self.ops: list[tuple[Any, ...]] = []
        self.compiles = compiles
        self.calls: list[Call] = []
        """The data flow, recorded if layers are compiled."""
        self.collectives: list[tuple[Any, ...]] = []
        self.kinds: list[int] = []  # kind of each block; may change until the end
        self.modules: dict[str, int] = {"": 0}
        self.op_names: dict[str, int] = {}
        self.unit = -1
        self._mode, self._results = mode, known_results()
        self._live: dict[int, Allocation] = {}
        self._paused = False
        self._hidden = False

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Track tensors created inside without counting them; the caller accounts for their memory."""
        self._hidden = True
        try:
            yield
        finally:
            self._hidden = False

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Assign the collectives inside to a stream; nothing inside allocates."""
        self.clock.streams.append(stream)
        try:
            yield
        finally:
            self.clock.streams.pop()

    def hold(self, size: int, kind: str, layer: int) -> None:
        """Record memory that is allocated now and kept, without a tensor."""
        with self._at_layer(layer):
            self.kinds[self._allocate(size).block] = KIND[kind]

    def mark(self, tensor: Any, kind: str, layer: int | None = None) -> None:
        """Set the kind of a tensor's memory; record its allocation if it is new."""
        tensor = plain(internals.LOCAL_TENSOR.of(tensor) if isinstance(tensor, DTensor) else tensor)
        allocation = self._seen(tensor)
        if allocation is not None and allocation.size:
            self.kinds[allocation.block] = allocation.kind = KIND[kind]
            if layer is not None:
                allocation.layer = layer

    def _seen(self, tensor: torch.Tensor) -> Allocation | None:
        storage = tensor.untyped_storage()
        known = self._live.get(id(storage))
        if known is not None:
            return known
        if self._paused or storage.nbytes() == 0:
            return None
        where = kernels.device_type(tensor)
        return None if where == "meta" else self._track(storage, host=where != DEVICE)

    def _track(self, storage: Any, *, host: bool) -> Allocation:
        allocation = (
            Allocation(-1, 0, -1, 0, host, 0) if self._hidden else self._allocate(storage.nbytes(), host=host)
        )
        allocation.held = weakref.ref(storage, functools.partial(self._dead, id(storage)))
        self._live[id(storage)] = allocation
        return allocation

    def _allocate(self, size: int, *, host: bool = False) -> Allocation:
        stream = self.clock.streams[-1]
        allocation = Allocation(
            len(self.kinds), size, self.place.layer, stream, host, KIND[self._kind(stream)]
        )
        self.kinds.append(allocation.kind)
        self._event(allocation, size)
        return allocation

    def _kind(self, stream: int) -> str:
        if stream in _KIND_OF_STREAM:
            return _KIND_OF_STREAM[stream]
        if self.place.phase in _OWNED:
            return "optimizer temporaries"
        if self.place.in_head:
            return "logits and loss"
        return "activations" if self.place.layer >= 0 else "activations outside layers"

    def _dead(self, key: int, _storage: object) -> None:
        allocation = self._live.pop(key)
        if allocation.size:
            self._event(allocation, -allocation.size)

    def _event(self, allocation: Allocation, size: int) -> None:
        place = self.place
        layer = allocation.layer if place.phase in _OWNED else place.layer
        where = (
            self.clock.tick(),
            place.step,
            place.micro,
            place.phase,
            layer,
            self._module(),
            allocation.stream,
        )
        self.events.append((*where, allocation.block, size, 0, allocation.host))

    def _module(self) -> int:
        return self.modules.setdefault(self.place.module, len(self.modules))

    def _resized(self, storage: Any) -> None:
        allocation = self._live.get(id(storage))
        size = storage.nbytes()
        if allocation is None:
            if size and not self._paused:
                self._gathered(self._track(storage, host=False))
            return
        if allocation.size == size:
            return
        if allocation.size:
            self._event(allocation, -allocation.size)
        held, allocation.size = allocation.held, 0
        if size:
            allocation = self._allocate(size, host=allocation.host)
            allocation.held = held
            self._live[id(storage)] = allocation
            self._gathered(allocation)

    def _gathered(self, allocation: Allocation) -> None:
        self.kinds[allocation.block] = allocation.kind = KIND["gathered units"]

    def dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and record it."""
        if func is _ASKS_FOR_DEVICE and hasattr(args[0], "fake_device"):
            return args[0].fake_device  # more than half of all calls, and not an operation
        if any(map(kernels.is_made_of_others, types)):
            return NotImplemented  # the tensors inside are dispatched next
        if self._paused:
            return func(*args, **(kwargs or {}))
        out = self._results.run(self._mode, func, args, kwargs or {})
        inputs = tensors_in(args, kwargs)
        outputs = tensors_in(out)
        self._note_roles(func, args, kwargs or {})
        owners = self._owners(inputs, outputs)
        for tensor, layer in zip(outputs, owners, strict=True):
            with self._at_layer(layer):
                self._seen(tensor)
        if func.namespace == "c10d":
            self._note_call(func, -1, inputs, outputs)
            self._collective(func, args, inputs)
        elif not func.is_view:
            self._operation(func, args, kwargs or {}, out, inputs, outputs)
        return out

    def _owners(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[int]:
        """Return the layer of each output. In clip and optimizer only the tensors identify the layer: output
        i belongs to input i.

        An output without an input (a step counter) belongs to the layer of the previous output.
        """
        if self.place.phase not in _OWNED:
            return [self.place.layer] * len(outputs)
        known = [self._live.get(id(tensor.untyped_storage())) for tensor in inputs]
        layers = [allocation.layer if allocation is not None else -1 for allocation in known] or [
            self.place.layer
        ]
        self.place.layer = layers[-1]
        return [layers[min(index, len(layers) - 1)] for index in range(len(outputs))]

    @contextlib.contextmanager
    def _at_layer(self, layer: int) -> Iterator[None]:
        before, self.place.layer = self.place.layer, layer
        try:
            yield
        finally:
            self.place.layer = before

    def _note_roles(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Recognise gathered parameters and gradients by FSDP2's own copy operations."""
        if func.namespace == "fsdp" and func.__name__.startswith("split_with_sizes_copy"):
            for parameter in kwargs["out"]:
                self.mark(parameter, "gathered units")
        if func.namespace == "fsdp" and "chunk_cat" in func.__name__:
            for gradient in args[0]:
                self.mark(gradient, "unsharded gradients")
            self.mark(kwargs["out"] if "out" in kwargs else args[3], "reduce buffers")

    def _operation(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        window = self.windows[self.place.layer] if 0 <= self.place.layer < len(self.windows) else None
        work = kernels.work(
            func, args, kwargs, out, inputs, outputs, self.micro_batch, self.slice_tokens, window
        )
        if work is None:
            return
        name = self.op_names.setdefault(work.name, len(self.op_names))
        self._note_call(func, len(self.ops), inputs, outputs)
        for layer, share in self._shares(inputs):
            self.ops.append(
                (
                    *self._where(layer),
                    name,
                    work.dtype,
                    work.flops * share,
                    round(work.moved_bytes * share),
                    round(work.batch_bytes * share),
                    round(work.slice_bytes * share),
                    self.in_slice,
                    max(1, round(work.launches * share)),
                )
            )
        scratch = [self._allocate(size) for size in work.scratch_bytes]
        for allocation in scratch:
            self._event(allocation, -allocation.size)

    def _note_call(
        self, func: Any, row: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        """Record the blocks that an operation reads and writes. FSDP's own operations are outside of the
        compiled code."""
        if not self.compiles:
            return
        place = self.place
        is_inside = (
            place.layer >= 0
            and place.phase not in _OWNED
            and self.clock.streams[-1] == 0
            and func.namespace == "aten"
        )
        is_loop = is_inside and kernels.can_fuse(func)
        call = Call(
            row=row,
            graph=(place.step, place.micro, place.layer)
            if is_inside and not func.__name__.startswith("_foreach")
            else None,
            phase=place.phase,
            can_fuse=is_loop,
            is_separate=is_loop and kernels.is_separate(func, inputs, outputs),
            reads=self._blocks(inputs[1:] if kernels.operator_name(func) == "copy_" else inputs),
            writes=self._blocks(outputs),
        )
        self.calls.append(call)

    def _blocks(self, tensors: list[torch.Tensor]) -> tuple[tuple[int, int], ...]:
        found = ((self._live.get(id(tensor.untyped_storage())), tensor) for tensor in tensors)
        return tuple(
            (known.block, tensor.numel() * tensor.element_size())
            for known, tensor in found
            if known is not None
        )

    def _where(self, layer: int) -> tuple[int, ...]:
        place = self.place
        return (
            self.clock.tick(),
            place.step,
            place.micro,
            place.phase,
            layer,
            self._module(),
            self.clock.streams[-1],
        )

    def _shares(self, inputs: list[torch.Tensor]) -> list[tuple[int, float]]:
        """Divide an operation over the tensors of all layers (clip, optimizer) into one for each layer, by
        bytes."""
        if self.place.phase not in _OWNED or not inputs:
            return [(self.place.layer, 1.0)]
        sizes: dict[int, int] = {}
        for tensor in inputs:
            known = self._live.get(id(tensor.untyped_storage()))
            layer = known.layer if known is not None else -1
            sizes[layer] = sizes.get(layer, 0) + tensor.numel() * tensor.element_size()
        total = sum(sizes.values())
        return [(layer, size / total if total else 1.0) for layer, size in sorted(sizes.items())]

    def _collective(self, func: Any, args: Any, inputs: list[torch.Tensor]) -> None:
        found = kernels.collective(func, args, inputs, self.groups)
        if found is None:
            return
        kind, group, size, dtype = found
        self.collectives.append((*self._where(self.place.layer), kind, group, size, self.unit, dtype))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record operations and resized storages, except in DTensor's sharding rules, which create tensors of
        global size."""
        with contextlib.ExitStack() as stack:
            resize = torch.UntypedStorage.resize_

            def resized(storage: Any, size: int) -> Any:
                result = resize(storage, size)
                self._resized(storage)
                return result

            backward = torch.Tensor.backward

            def begun(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
                """Mark the start of the backward, which begins with the loss and the head."""
                self.place.phase, self.place.layer, self.place.in_head = PHASE["backward"], -1, True
                backward(loss, *args, **kwargs)

            stack.enter_context(replaced(torch.Tensor, "backward", begun))
            # FSDP1 calls it to make the allocator keep a block until a stream is done, which a trace cannot
            # express.
            stack.enter_context(replaced(torch.Tensor, "record_stream", nothing))
            stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
            for rule in (internals.PROPAGATE_SHAPES, internals.PROPAGATE_SHARDING):
                stack.enter_context(rule.replaced(self._quiet(rule.get())))
            stack.enter_context(internals.recording_mode(self.dispatch))
            yield

    def _quiet(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self._paused = self._paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self._paused = before

        return call
