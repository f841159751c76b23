"""Copy tensors into the output in a few threads, with a fixed number of buffers.

Each thread has a buffer for values as read, one for values as written and one for intermediate values
(`gather.BUFFER_BYTES` each), and one for sums, which takes memory only where tensors are added up.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import xxhash

from fsdp_tune.core.atomic import DISK
from fsdp_tune.core.errors import Where, failed_error
from fsdp_tune.merge.copy.boxes import Box, boxes
from fsdp_tune.merge.copy.decode import DecodingReader, reader_of
from fsdp_tune.merge.copy.gather import (
    BUFFER_BYTES,
    HELD_BYTES,
    Budget,
    Delta,
    ExpertDelta,
    TensorReader,
    held_bytes,
    kind_of,
    read_factor,
)
from fsdp_tune.merge.copy.layout import PAGE_BYTES, Layout, Placed
from fsdp_tune.merge.copy.values import (
    Array,
    NonFinite,
    all_finite,
    convert,
    count_non_finite,
    is_checked,
    rounded_to_nf4,
)
from fsdp_tune.merge.read.contents import CheckpointTensors
from fsdp_tune.merge.read.reader import LowRankOfExperts, SourceTensor
from fsdp_tune.merge.weight_formats import INDEX_NAME

THREADS = 4  # whatever the cores: a thread that waits for the disk needs none


SAMPLE_BYTES = 32 << 10


_SUM_BYTES = 4 * BUFFER_BYTES  # the 16-bit floats of a buffer, in float64


@dataclass(slots=True)
class Written:
    """XXH3-128 of each tensor's bytes in the output, and counts of values that are not finite."""

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
        """Page-aligned, as direct I/O requires."""
        return cls(
            *(np.frombuffer(mmap.mmap(-1, size), np.uint8) for size in (*[BUFFER_BYTES] * 3, _SUM_BYTES))
        )


@dataclass(slots=True)
class _Work:
    """State shared by all threads."""

    sources: Sequence[CheckpointTensors]
    stage: Path
    read_back: bool
    is_direct: bool
    advance: Callable[[int], None]
    budget: Budget = field(default_factory=lambda: Budget(HELD_BYTES))
    stop: threading.Event = field(default_factory=threading.Event)
    written: Written = field(default_factory=Written)
    local: threading.local = field(default_factory=threading.local)

    @property
    def buffers(self) -> _Buffers:
        """This thread's buffers, allocated once: fresh memory costs a page fault per 4 KiB."""
        if not hasattr(self.local, "buffers"):
            self.local.buffers = _Buffers.make()
        return self.local.buffers


def write_tensors(
    sources: Sequence[CheckpointTensors],
    layout: Layout,
    stage: Path,
    *,
    read_back: bool,
    advance: Callable[[int], None],
) -> Written:
    """Write the files of `layout` into `stage`. With several `sources`, each tensor is their mean.

    `advance(n)` is called from several threads with the number of bytes that were written. `read_back`: read
    samples of the output and compare them.
    """
    is_direct = takes_direct_writes(stage / layout.files[0].name)
    _create(layout, stage)
    work = _Work(sources, stage, read_back, is_direct, advance)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="merge") as pool:
        try:
            futures = [pool.submit(_copy, work, placed) for file in layout.files for placed in file.tensors]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [
                error
                for future in done
                if (error := future.exception()) is not None and not isinstance(error, CancelledError)
            ]
            if failed:
                raise failed[0]
        except BaseException:
            work.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            read_factor.cache_clear()
    return work.written


@dataclass(frozen=True, slots=True)
class _Contribution:
    """One checkpoint's contribution to a tensor of the output."""

    tensor: SourceTensor
    reader: TensorReader | DecodingReader
    delta: Delta | ExpertDelta | None

    @classmethod
    def make(cls, tensor: SourceTensor, buffers: _Buffers) -> _Contribution:
        delta: Delta | ExpertDelta | None = None
        if isinstance(tensor.update, LowRankOfExperts):
            delta = ExpertDelta(tensor)
        elif tensor.update is not None:
            delta = Delta(tensor, buffers.raw, buffers.scratch)
        return cls(tensor, reader_of(tensor, buffers.scratch), delta)

    def finish(self) -> None:
        self.reader.finish()
        if isinstance(self.delta, Delta):
            self.delta.finish()


def _create(layout: Layout, stage: Path) -> None:
    """Create the files at their full size, with their headers, and the index."""
    for file in layout.files:
        with DISK.open(stage / file.name) as handle:
            allocate(handle, file.size_bytes)
            DISK.write(handle, file.header)
    if layout.index is not None:
        with DISK.open(stage / INDEX_NAME) as handle:
            DISK.write(handle, layout.index)


def takes_direct_writes(path: Path) -> bool:
    """Write a page to `path` past the page cache. Returns False where the file system has no direct I/O."""
    with DISK.open(path):  # creates the file
        pass
    try:
        with DISK.open_direct(path) as handle:
            DISK.write(handle, memoryview(mmap.mmap(-1, PAGE_BYTES)))
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        raise
    return True


def allocate(handle: IO[bytes], size_bytes: int) -> None:
    """Set the size of a file and reserve its blocks where the system can, so that a full disk fails here and
    not hours later."""
    handle.truncate(size_bytes)
    # Not os.posix_fallocate: where a file system cannot, the C library writes a byte into every block
    # instead.
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or not size_bytes:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(handle.fileno(), 0, 0, size_bytes) and (code := ctypes.get_errno()) in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
    ):
        raise OSError(code, os.strerror(code))


def _copy(work: _Work, placed: Placed) -> None:
    tensors = [source.tensors[placed.name] for source in work.sources]
    path, found = work.stage / placed.file, _boxes(placed, tensors)
    is_direct = (
        work.is_direct
        and placed.first_byte % PAGE_BYTES == 0
        and not any(_bytes_of(box, placed) % PAGE_BYTES for box in found)
    )
    with (
        DISK.open_direct(path) if is_direct else DISK.open(path, "r+b") as handle,
        work.budget.hold(sum(held_bytes(tensor) for tensor in tensors)),
    ):
        samples = _copy_values(work, placed, tensors, found, handle)
        handle.flush()
        if work.read_back and not all(
            _reads_back(handle, work.buffers.scratch, sample) for sample in samples
        ):
            raise failed_error(
                "merge-written-differs",
                f"`{placed.name}` reads back otherwise than it was written",
                where=Where(str(path)),
                hint="the disk or the memory of this machine is faulty: write to another disk",
            )


class _WrittenSample(NamedTuple):
    """Bytes of a file, and their digest."""

    offset: int
    size_bytes: int
    digest: bytes


def _copy_values(
    work: _Work, placed: Placed, tensors: Sequence[SourceTensor], found: Sequence[Box], handle: IO[bytes]
) -> list[_WrittenSample]:
    """Write one tensor. Returns a sample of each box."""
    parts = [_Contribution.make(tensor, work.buffers) for tensor in tensors]
    digest, counts, samples = xxhash.xxh3_128(), NonFinite(), list[_WrittenSample]()
    handle.seek(placed.first_byte)
    for box in found:
        if work.stop.is_set():
            raise CancelledError  # another thread failed, or the user pressed Ctrl-C
        raw = _values(placed, parts, box, work.buffers, counts).view(np.uint8).data
        digest.update(raw)
        # At another position in each box, so that an error that repeats at one position is found.
        start = len(samples) % max(1, len(raw) // SAMPLE_BYTES) * SAMPLE_BYTES
        sample = raw[start : start + SAMPLE_BYTES]
        samples.append(_WrittenSample(handle.tell() + start, len(sample), xxhash.xxh3_128_digest(sample)))
        DISK.write(handle, raw)
        work.advance(len(raw))
    for part in parts:
        part.finish()
    work.written.digests[placed.name] = digest.hexdigest()
    if counts:
        work.written.non_finite[placed.name] = counts
    return samples


def _reads_back(handle: IO[bytes], buffer: Array, sample: _WrittenSample) -> bool:
    found = buffer.data[: sample.size_bytes]
    count = os.preadv(handle.fileno(), [found], sample.offset)
    return count == sample.size_bytes and xxhash.xxh3_128_digest(found) == sample.digest


def _boxes(placed: Placed, tensors: Sequence[SourceTensor]) -> list[Box]:
    """Cut a tensor into boxes that fit the buffers, of whole pages of the output where its shape allows."""
    widest = max(placed.dtype.item_bytes, *(tensor.dtype.item_bytes for tensor in tensors))
    return list(boxes(placed.shape, BUFFER_BYTES // widest, PAGE_BYTES // placed.dtype.item_bytes))


def _bytes_of(box: Box, placed: Placed) -> int:
    return box.elements * placed.dtype.item_bytes


def _values(
    placed: Placed, parts: Sequence[_Contribution], box: Box, buffers: _Buffers, counts: NonFinite
) -> Array:
    """Return one box of the output: read, averaged over several sources, checked for NaN and infinity, and
    converted."""
    dtype = parts[0].tensor.dtype
    size_bytes = box.elements * dtype.item_bytes
    # An update reads its factors through the buffers, so it comes first.
    deltas = [(part.delta, part.delta.of(box)) for part in parts if part.delta is not None]
    values = buffers.raw[:size_bytes].view(dtype.numpy)
    parts[0].reader.read(box, values)
    if deltas or parts[0].tensor.nf4_scales is not None or (len(parts) > 1 and dtype.converts):
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


def _sum(
    parts: Sequence[_Contribution],
    deltas: Sequence[tuple[Delta | ExpertDelta, Array]],
    box: Box,
    values: Array,
    buffers: _Buffers,
) -> Array:
    """Weights and what adapters add to them; over several sources the mean, summed in float64. Rounded once,
    by the caller."""
    kind = np.dtype(np.float64) if len(parts) > 1 else kind_of(parts[0].tensor)
    total = buffers.sum[: box.elements * kind.itemsize].view(kind)
    np.copyto(total, _as_trained(parts[0], values), casting="unsafe")
    other = buffers.out[: values.nbytes].view(values.dtype)
    for part in parts[1:]:
        part.reader.read(box, other)
        np.add(total, _as_trained(part, other), out=total, casting="unsafe")
    for delta, update in deltas:
        np.add(total, update, out=total, casting="unsafe")
        if isinstance(delta, Delta):
            delta.set_lengths(total, box)  # of one source: several with DoRA are refused
    if len(parts) > 1:
        total /= len(parts)
    return total


def _as_trained(part: _Contribution, values: Array) -> Array:
    """The weights as a QLoRA run had them, from 4 bits."""
    scales = part.tensor.nf4_scales
    return values if scales is None else rounded_to_nf4(values, scales)


def _the_same(
    placed: Placed, parts: Sequence[_Contribution], box: Box, values: Array, buffers: _Buffers
) -> Array:
    """Return `values`, which all checkpoints must have, since their dtype has no mean (integers, fp8).
    Raises: FailedError."""
    other = buffers.out[: values.nbytes].view(values.dtype)
    for part in parts[1:]:
        part.reader.read(box, other)
        if not np.array_equal(other.view(np.uint8), values.view(np.uint8)):
            what = (
                f"`{placed.name}` is {placed.dtype.name}, which has no mean, and differs from that in "
                f"{parts[0].tensor.files.root}"
            )
            message, where = f"the checkpoints cannot be averaged: {what}", Where(str(part.tensor.files.root))
            raise failed_error(
                "merge-average-differs", message, where=where, hint="merge one of them: `--step N`"
            )
    return values
