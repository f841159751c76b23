"""The engine: a few threads bring tensors together and write them to their places; memory is a few buffers, whatever the model.

Per thread: a buffer for values as read, one for values as written, one for what is in between (`gather.BUFFER_BYTES`
each), one for sums, which costs memory only where something is added up, and a block that goes to the disk (`sink`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.errors import Where, failed_error
from fsdp_tune.merge.copy.gather import BUFFER_BYTES, TensorReader
from fsdp_tune.merge.copy.geometry import Box, boxes
from fsdp_tune.merge.copy.layout import INDEX_NAME, Layout, Placed
from fsdp_tune.merge.copy.readahead import ReadAhead
from fsdp_tune.merge.copy.sink import TensorSink, allocate, block_buffer, takes_direct_writes
from fsdp_tune.merge.copy.values import Array, NonFinite, all_finite, convert, count_non_finite, is_checked
from fsdp_tune.merge.formats.contents import Source
from fsdp_tune.merge.formats.tensors import SourceTensor
from fsdp_tune.merge.lora.low_rank import HELD_BYTES, Budget, Delta, held_bytes, kind_of

THREADS = 4  # whatever the cores: a thread that waits for the disk needs none
_SUM_BYTES = 4 * BUFFER_BYTES  # the 16-bit floats of a buffer, in float64


@dataclass(slots=True)
class Written:
    """What the copy learnt: XXH3-128 of each tensor's bytes in the output, and the values that are not finite."""

    digests: dict[str, str] = field(default_factory=dict[str, str])
    non_finite: dict[str, NonFinite] = field(default_factory=dict[str, NonFinite])


@dataclass(slots=True)
class _Buffers:
    raw: Array
    out: Array
    scratch: Array
    sum: Array
    block: Array

    @classmethod
    def make(cls) -> _Buffers:
        raw, out, scratch = (np.empty(BUFFER_BYTES, np.uint8) for _ in range(3))
        return cls(raw, out, scratch, np.empty(_SUM_BYTES, np.uint8), block_buffer())


@dataclass(slots=True)
class _Work:
    """What all threads share."""

    sources: Sequence[Source]
    stage: Path
    read_back: bool
    is_direct: bool
    advance: Callable[[int], None]
    ahead: ReadAhead
    budget: Budget = field(default_factory=lambda: Budget(HELD_BYTES))
    stop: threading.Event = field(default_factory=threading.Event)
    written: Written = field(default_factory=Written)
    local: threading.local = field(default_factory=threading.local)

    @property
    def buffers(self) -> _Buffers:
        """This thread's own; made once, since fresh memory costs a page fault per 4 KiB."""
        if not hasattr(self.local, "buffers"):
            self.local.buffers = _Buffers.make()
        return self.local.buffers


class _Stopped(Exception):
    """Another thread failed, or the user pressed Ctrl-C."""


def write_tensors(sources: Sequence[Source], layout: Layout, stage: Path, *, read_back: bool, advance: Callable[[int], None]) -> Written:
    """Fills `stage` with the files of `layout`. With several `sources`, each tensor becomes their mean.

    `advance(n)` is called from several threads with bytes as they are gathered. `read_back`: samples of all that was
    written are compared with what was meant.
    """
    is_direct = _create(layout, stage)
    if layout.index is not None:
        with DISK.open(stage / INDEX_NAME) as handle:
            DISK.write(handle, layout.index)
    placed = [tensor for file in layout.files for tensor in file.tensors]
    with ReadAhead(sources, [tensor.name for tensor in placed]) as ahead:
        work = _Work(sources, stage, read_back, is_direct, advance, ahead)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="merge") as pool:
            try:
                futures = [pool.submit(_copy, work, tensor) for tensor in placed]
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                failed = [error for future in done if (error := future.exception()) is not None and not isinstance(error, _Stopped)]
            except BaseException:
                work.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            if failed:
                work.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise failed[0]
    return work.written


@dataclass(frozen=True, slots=True)
class _Part:
    """What one checkpoint gives to a tensor of the output."""

    tensor: SourceTensor
    reader: TensorReader
    delta: Delta | None

    @classmethod
    def make(cls, tensor: SourceTensor, buffers: _Buffers) -> _Part:
        delta = Delta(tensor, buffers.raw, buffers.scratch) if tensor.update is not None else None
        return cls(tensor, TensorReader(tensor, buffers.scratch), delta)

    def finish(self) -> None:
        self.reader.finish()
        if self.delta is not None:
            self.delta.finish()


def _create(layout: Layout, stage: Path) -> bool:
    """The files at their full size, with their headers. Returns whether they can be written past the page cache."""
    is_direct: bool | None = None
    for file in layout.files:
        path = stage / file.name
        with DISK.open(path) as handle:
            if is_direct is None:  # they all lie in one directory
                is_direct = takes_direct_writes(path)
            allocate(handle, file.size_bytes)
            DISK.write(handle, file.header)
    return bool(is_direct)


def _copy(work: _Work, placed: Placed) -> None:
    tensors = [source.tensors[placed.name] for source in work.sources]
    path = work.stage / placed.file
    with TensorSink(path, placed.first_byte, placed.size_bytes, work.buffers.block, is_direct=work.is_direct) as sink:
        with work.budget.hold(sum(held_bytes(tensor) for tensor in tensors)):
            digest = _copy_values(work, placed, tensors, sink)
        work.written.digests[placed.name] = digest.hexdigest()
        if sink.digest.digest() != digest.digest() or (work.read_back and not sink.reads_back()):
            raise failed_error(
                "merge-written-differs",
                f"`{placed.name}` reads back otherwise than it was written",
                where=Where(str(path)),
                hint="the disk or the memory of this machine is faulty: write to another disk",
            )


def _copy_values(work: _Work, placed: Placed, tensors: Sequence[SourceTensor], sink: TensorSink) -> xxhash.xxh3_128:
    """The digest of what was meant."""
    buffers = work.buffers
    parts = [_Part.make(tensor, buffers) for tensor in tensors]
    digest, counts = xxhash.xxh3_128(), NonFinite()
    read_bytes = sum(tensor.dtype.item_bytes for tensor in tensors)
    for box in _boxes(placed, tensors):
        if work.stop.is_set():
            raise _Stopped
        raw = _values(placed, parts, box, buffers, counts, sink).view(np.uint8)
        digest.update(raw.data)
        sink.write(raw)
        work.advance(raw.size)
        work.ahead.has_read(box.elements * read_bytes)
    for part in parts:
        part.finish()
    if counts:
        work.written.non_finite[placed.name] = counts
    return digest


def _boxes(placed: Placed, tensors: Sequence[SourceTensor]) -> Iterator[Box]:
    widest = max(placed.dtype.item_bytes, *(tensor.dtype.item_bytes for tensor in tensors))
    return boxes(placed.shape, BUFFER_BYTES // widest)


def _values(placed: Placed, parts: Sequence[_Part], box: Box, buffers: _Buffers, counts: NonFinite, sink: TensorSink) -> Array:
    """One box of the output: read, averaged where there are several sources, checked, converted where asked."""
    dtype = parts[0].tensor.dtype
    size_bytes = box.elements * dtype.item_bytes
    # An update reads its factors through the buffers, so it comes first.
    deltas = [part.delta.of(box) for part in parts if part.delta is not None]
    room = sink.room(size_bytes) if dtype == placed.dtype else None
    values = (buffers.raw[:size_bytes] if room is None else room).view(dtype.numpy)
    parts[0].reader.read(box, values)
    if deltas or (len(parts) > 1 and dtype.converts):
        values = _sum(parts, deltas, box, values, buffers)
    elif len(parts) > 1:
        values = _the_same(placed, parts, box, values, buffers)
    found = NonFinite()
    if is_checked(dtype) and not all_finite(values, buffers.scratch):
        count_non_finite(values, found)
        counts.nan += found.nan
        counts.inf += found.inf
    if values.dtype == placed.dtype.numpy:
        return values
    out = buffers.out[: box.elements * placed.dtype.item_bytes].view(placed.dtype.numpy)
    convert(values, out)
    if not all_finite(out, buffers.scratch):
        after = NonFinite()
        count_non_finite(out, after)
        counts.overflow += after.inf - found.inf
    return out


def _sum(parts: Sequence[_Part], deltas: Sequence[Array], box: Box, values: Array, buffers: _Buffers) -> Array:
    """Weights and what adapters add to them; over several sources the mean, summed in float64. Rounded once, by the caller."""
    kind = np.dtype(np.float64) if len(parts) > 1 else kind_of(parts[0].tensor)
    total = buffers.sum[: box.elements * kind.itemsize].view(kind)
    np.copyto(total, values, casting="unsafe")
    other = buffers.out[: values.nbytes].view(values.dtype)
    for part in parts[1:]:
        part.reader.read(box, other)
        np.add(total, other, out=total, casting="unsafe")
    for delta in deltas:
        np.add(total, delta, out=total, casting="unsafe")
    if len(parts) > 1:
        total /= len(parts)
    return total


def _the_same(placed: Placed, parts: Sequence[_Part], box: Box, values: Array, buffers: _Buffers) -> Array:
    """Integers and fp8 have no mean: they must be equal in all checkpoints."""
    other = buffers.out[: values.nbytes].view(values.dtype)
    for part in parts[1:]:
        part.reader.read(box, other)
        if not np.array_equal(other.view(np.uint8), values.view(np.uint8)):
            raise failed_error(
                "merge-average-differs",
                f"the checkpoints cannot be averaged: `{placed.name}` is {placed.dtype.name}, which has no mean, and differs between them",
            )
    return values
