"""The engine: a few threads bring tensors together and write them to their places; memory is a few buffers, whatever the model.

Per thread: a buffer for values as read, one for values as written, one for what is in between (`gather.BUFFER_BYTES`
each), and one for sums, which costs memory only where something is added up. Every tensor is read back from the output and
its digest compared with what was meant.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import xxhash

from fsdp_tune.atomic import DISK
from fsdp_tune.cores import available_cores
from fsdp_tune.errors import Where, failed_error
from fsdp_tune.merge.contents import Source
from fsdp_tune.merge.flush import Flusher
from fsdp_tune.merge.gather import BUFFER_BYTES, TensorReader
from fsdp_tune.merge.geometry import Box, boxes
from fsdp_tune.merge.layout import INDEX_NAME, Layout, Placed
from fsdp_tune.merge.low_rank import HELD_BYTES, Budget, Delta, held_bytes, kind_of
from fsdp_tune.merge.readahead import ReadAhead
from fsdp_tune.merge.tensors import SourceTensor
from fsdp_tune.merge.values import Array, NonFinite, all_finite, convert, count_non_finite, is_checked

MOST_THREADS = 4
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

    @classmethod
    def make(cls) -> _Buffers:
        raw, out, scratch = (np.empty(BUFFER_BYTES, np.uint8) for _ in range(3))
        return cls(raw, out, scratch, np.empty(_SUM_BYTES, np.uint8))


@dataclass(slots=True)
class _Work:
    """What all threads share."""

    sources: Sequence[Source]
    stage: Path
    read_back: bool
    advance: Callable[[int], None]
    flusher: Flusher
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


def thread_count() -> int:
    return max(2, min(MOST_THREADS, available_cores()))


def write_tensors(
    sources: Sequence[Source], layout: Layout, stage: Path, *, read_back: bool, gives_back: bool, advance: Callable[[int], None]
) -> Written:
    """Fills `stage` with the files of `layout`. With several `sources`, each tensor becomes their mean.

    `advance(n)` is called from several threads with bytes as they are written. `gives_back`: the output leaves the page cache.
    """
    for file in layout.files:
        with DISK.open(stage / file.name) as handle:
            DISK.write(handle, file.header)
            handle.truncate(file.size_bytes)
    if layout.index is not None:
        with DISK.open(stage / INDEX_NAME) as handle:
            DISK.write(handle, layout.index)
    placed = [tensor for file in layout.files for tensor in file.tensors]
    with Flusher(stage, gives_back=gives_back) as flusher, ReadAhead(sources, [tensor.name for tensor in placed]) as ahead:
        work = _Work(sources, stage, read_back, advance, flusher, ahead)
        with ThreadPoolExecutor(thread_count(), thread_name_prefix="merge") as pool:
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


def _copy(work: _Work, placed: Placed) -> None:
    tensors = [source.tensors[placed.name] for source in work.sources]
    with work.budget.hold(sum(held_bytes(tensor) for tensor in tensors)):
        digest = _copy_values(work, placed, tensors)
    work.written.digests[placed.name] = digest.hexdigest()
    if work.read_back and _digest_of_output(work, placed, work.buffers.raw) != digest.digest():
        raise failed_error(
            "merge-written-differs",
            f"`{placed.name}` reads back otherwise than it was written",
            where=Where(str(work.stage / placed.file)),
            hint="the disk or the memory of this machine is faulty: write to another disk",
        )
    work.flusher.finished(placed.file, placed.first_byte, placed.first_byte + placed.size_bytes)


def _copy_values(work: _Work, placed: Placed, tensors: Sequence[SourceTensor]) -> xxhash.xxh3_128:
    """The digest of what was written."""
    buffers = work.buffers
    parts = [_Part.make(tensor, buffers) for tensor in tensors]
    digest, counts = xxhash.xxh3_128(), NonFinite()
    read_bytes = sum(tensor.dtype.item_bytes for tensor in tensors)
    with _output(work.stage / placed.file) as handle:
        handle.seek(placed.first_byte)
        for box in _boxes(placed, tensors):
            if work.stop.is_set():
                raise _Stopped
            values = _values(placed, parts, box, buffers, counts)
            raw = values.view(np.uint8).data
            digest.update(raw)
            DISK.write(handle, raw)
            work.advance(len(raw))
            work.flusher.wrote(placed.file, len(raw))
            work.ahead.has_read(box.elements * read_bytes)
    for part in parts:
        part.finish()
    if counts:
        work.written.non_finite[placed.name] = counts
    return digest


def _boxes(placed: Placed, tensors: Sequence[SourceTensor]) -> Iterator[Box]:
    widest = max(placed.dtype.item_bytes, *(tensor.dtype.item_bytes for tensor in tensors))
    return boxes(placed.shape, BUFFER_BYTES // widest)


def _values(placed: Placed, parts: Sequence[_Part], box: Box, buffers: _Buffers, counts: NonFinite) -> Array:
    """One box of the output: read, averaged where there are several sources, checked, converted where asked."""
    dtype = parts[0].tensor.dtype
    # An update reads its factors through the buffers, so it comes first.
    deltas = [part.delta.of(box) for part in parts if part.delta is not None]
    values = buffers.raw[: box.elements * dtype.item_bytes].view(dtype.numpy)
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


@contextlib.contextmanager
def _output(path: Path) -> Iterator[IO[bytes]]:
    with DISK.open(path, "r+b") as handle:
        yield handle


def _digest_of_output(work: _Work, placed: Placed, buffer: Array) -> bytes:
    digest = xxhash.xxh3_128()
    with open(work.stage / placed.file, "rb", buffering=0) as handle:
        handle.seek(placed.first_byte)
        left = placed.size_bytes
        while left:
            got = handle.readinto(buffer.data[: min(left, BUFFER_BYTES)])
            if not got:
                break
            digest.update(buffer.data[:got])
            left -= got
    return digest.digest()
