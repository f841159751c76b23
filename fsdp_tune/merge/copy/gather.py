"""Gather one tensor of a merge from the files of all ranks, box by box, and what a LoRA adapter adds to it,
in bounded memory.

A tensor is cut into boxes that fit a buffer, in the order of the output, and intersected with chunks.
Checksums are compared.

The update of an adapter, scaling · B·A in fp32, is computed a slab of rows at a time. The factor that runs
along a row of the tensor (A; B of a transposed layer) is held whole while the tensor is written, the other is
read with the rows. `Budget` bounds what all threads hold together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32  # six times as fast as zlib's, which took as long as the copy itself

from fsdp_tune.core.tensors.dtypes import Extent, Shape, is_row_major, row_major
from fsdp_tune.merge.copy.boxes import Box, boxes, intersection
from fsdp_tune.merge.copy.values import Array
from fsdp_tune.merge.read.dcp import damaged_chunk, locate
from fsdp_tune.merge.read.reader import Chunk, LowRank, LowRankOfExperts, SourceTensor

# smaller ones cost calls (512 KiB: half as much time again), larger ones leave the core's cache
BUFFER_BYTES = 2 << 20
_FEW_BYTES = 64 << 10
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_WASTE = 4  # a strided read may fetch at most this many times what it needs


@dataclass(slots=True)
class _OpenChunk:
    """An opened chunk. `crc32` is updated while its storage is read from front to back."""

    chunk: Chunk
    extent: Extent
    is_row_major: bool
    crc32: int | None


class TensorReader:
    """Reads boxes of one tensor that are contiguous in it. `scratch` (BUFFER_BYTES) is clobbered.

    `in_order`: the boxes come from front to back and leave nothing out, so that checksums can run along.
    """

    def __init__(self, tensor: SourceTensor, scratch: Array, *, in_order: bool = True) -> None:
        self._files, self._tensor, self._scratch = tensor.files, tensor, scratch
        self._in_order = in_order
        self._item_bytes = tensor.dtype.item_bytes
        self._parts = [self._open(chunk) for chunk in tensor.chunks]

    def _open(self, chunk: Chunk) -> _OpenChunk:
        extent = locate(self._tensor, chunk)
        in_order = is_row_major(chunk.sizes, extent.strides)
        is_whole = (
            extent.first_byte == extent.storage_start
            and extent.storage_bytes == chunk.elements * self._item_bytes
        )
        has_checksum = not self._files.is_vouched and extent.crc32 is not None
        runs_along = has_checksum and in_order and is_whole and self._in_order
        if has_checksum and not runs_along:
            self._check_storage(extent)
        return _OpenChunk(chunk, extent, in_order, 0 if runs_along else None)

    def _check_storage(self, extent: Extent) -> None:
        """Check a storage that is not read from front to back, in a pass of its own, once for all tensors
        with parts of it."""
        if (extent.file, extent.storage_start) in self._files.checked:
            return
        crc, buffer = 0, self._scratch.data
        for at in range(0, extent.storage_bytes, BUFFER_BYTES):
            piece = buffer[: min(BUFFER_BYTES, extent.storage_bytes - at)]
            self._files.read_into(extent.file, extent.storage_start + at, piece)
            crc = crc32(piece, crc)
        self._compare(extent, crc)
        self._files.checked.add((extent.file, extent.storage_start))

    def read(self, box: Box, target: Array) -> None:
        """Fill `target` (flat, `box.elements` elements of the tensor's dtype)."""
        # As words of the same width: moving needs no arithmetic, and numpy moves its own types faster than
        # the 8-bit floats.
        shaped = target.view(_WORDS[self._item_bytes]).reshape(box.sizes)
        for part in self._parts:
            shared = intersection(box, part.chunk.offsets, part.chunk.sizes)
            if shared is None:
                continue
            in_box, in_chunk, sizes = shared
            # The ellipsis keeps it a view: indexing an array of no dimensions by () alone gives a copy of its
            # value.
            wanted = shaped[
                (*(slice(start, start + size) for start, size in zip(in_box, sizes, strict=True)), ...)
            ]
            if part.is_row_major:
                self._read_run(part, in_chunk, sizes, wanted)
            else:
                self._read_strided(part.extent, in_chunk, sizes, wanted)

    def finish(self) -> None:
        """Compare the checksums that were computed while reading. Raises: FailedError naming the file of the
        chunk that differs."""
        for part in self._parts:
            if part.crc32 is not None:
                self._compare(part.extent, part.crc32)
            steps = zip(part.chunk.sizes, part.extent.strides, strict=True)
            span_bytes = (sum((size - 1) * stride for size, stride in steps) + 1) * self._item_bytes
            self._files.drop_cached(part.extent.file, part.extent.first_byte, span_bytes)

    def _compare(self, extent: Extent, crc: int) -> None:
        if crc != extent.crc32:
            why = f"its checksum is {crc:08x} where {extent.crc32:08x} was written: bits have flipped"
            raise damaged_chunk(self._path(extent), self._tensor.name, extent.storage_start, why)

    def _path(self, extent: Extent) -> Path:
        return self._files.root / extent.file

    def _read_run(self, part: _OpenChunk, start: Shape, sizes: Shape, wanted: Array) -> None:
        """Read a box that is contiguous in a row-major chunk: one read, directly into place if the chunk
        spans full rows."""
        extent, count_bytes = part.extent, math.prod(sizes) * self._item_bytes
        steps = row_major(part.chunk.sizes)
        at = extent.first_byte + sum(a * b for a, b in zip(start, steps, strict=True)) * self._item_bytes
        if wanted.flags.c_contiguous:
            run = wanted.reshape(-1).view(np.uint8).data
            self._files.read_into(extent.file, at, run)
        else:
            run = self._scratch.data[:count_bytes]
            self._files.read_into(extent.file, at, run)
            wanted[...] = self._scratch[:count_bytes].view(wanted.dtype).reshape(sizes)
        if part.crc32 is not None:
            part.crc32 = crc32(run, part.crc32)

    def _read_strided(self, extent: Extent, start: Shape, sizes: Shape, wanted: Array) -> None:
        """Read a box of any strides: halve it along its widest stride until the span to read wastes
        little."""
        steps = [(size - 1) * stride for size, stride in zip(sizes, extent.strides, strict=True)]
        span, count = sum(steps) + 1, math.prod(sizes)
        span_bytes = span * self._item_bytes
        fits = span_bytes <= BUFFER_BYTES and (span <= _WASTE * count or span_bytes <= _FEW_BYTES)
        if not fits and max(steps, default=0) > 0:
            widest = steps.index(max(steps))
            half = sizes[widest] // 2
            first = (*sizes[:widest], half, *sizes[widest + 1 :])
            rest = (*sizes[:widest], sizes[widest] - half, *sizes[widest + 1 :])
            moved = (*start[:widest], start[widest] + half, *start[widest + 1 :])
            cut = (slice(None),) * widest
            self._read_strided(extent, start, first, wanted[(*cut, slice(None, half))])
            self._read_strided(extent, moved, rest, wanted[(*cut, slice(half, None))])
            return
        at = (
            extent.first_byte
            + sum(a * b for a, b in zip(start, extent.strides, strict=True)) * self._item_bytes
        )
        self._files.read_into(extent.file, at, self._scratch.data[:span_bytes])
        strides_bytes = tuple(stride * self._item_bytes for stride in extent.strides)
        wanted[...] = np.ndarray(sizes, wanted.dtype, self._scratch[:span_bytes].data, 0, strides_bytes)


HELD_BYTES = 64 << 20
# More rows at once use the held factor better (it does not fit a core's cache): 512 KiB take three times as
# long.
SLAB_BYTES = 4 << 20


class Budget:
    """A budget of bytes that several threads share. A request larger than the budget waits until it is
    alone."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes, self._used_bytes = total_bytes, 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, count_bytes: int) -> Iterator[None]:
        count_bytes = min(count_bytes, self._total_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._used_bytes + count_bytes <= self._total_bytes)
            self._used_bytes += count_bytes
        try:
            yield
        finally:
            with self._changed:
                self._used_bytes -= count_bytes
                self._changed.notify_all()


class Delta:
    """The rows of one tensor's update, in order. `raw` and `scratch` (BUFFER_BYTES each) are clobbered."""

    def __init__(self, tensor: SourceTensor, raw: Array, scratch: Array) -> None:
        assert isinstance(tensor.update, LowRank)
        self._update, self._raw, self._scratch = tensor.update, raw, scratch
        self._rows = tensor.shape[0]
        self._columns = math.prod(tensor.shape[1:])
        self._kind = kind_of(tensor)
        self._left = TensorReader(self._rows_of, scratch, in_order=not self._update.is_transposed)
        self._right = self._read_right()
        self._slab, self._slab_row = np.empty((0, 0), self._kind), 0
        self._magnitude = self._read_magnitude()

    @property
    def _rows_of(self) -> SourceTensor:
        """The factor whose elements belong to rows of the tensor."""
        update = self._update
        if not update.is_transposed:
            return update.b
        assert update.a is not None
        return update.a

    def _read_right(self) -> Array | None:
        """[rank, columns]; None for the update of a vector, which has no second factor."""
        update = self._update
        if update.a is None:
            return None
        if update.is_transposed:
            return _read_as(update.b, self._kind, self._raw, self._scratch).T
        return _read_as(update.a, self._kind, self._raw, self._scratch)

    def _read_magnitude(self) -> Array | None:
        """[rows] of DoRA, in float64."""
        magnitude = self._update.magnitude
        if magnitude is None:
            return None
        return _read_as(magnitude, np.dtype(np.float64), self._raw, self._scratch).reshape(-1)

    def set_lengths(self, total: Array, box: Box) -> None:
        """Scale the rows of the sum, one box of whole rows, to DoRA's lengths, in place."""
        if self._magnitude is None:
            return
        rows = total.reshape(-1, self._columns)
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        first = box.first // self._columns
        rows *= (self._magnitude[first : first + len(rows)] / lengths)[:, None]

    def of(self, box: Box) -> Array:
        """The update of one box of the tensor, flat. Boxes come in order."""
        row, count = box.offsets[0], box.sizes[0]
        if row >= self._slab_row + len(self._slab):
            # A whole number of boxes, so that none lies in two slabs.
            rows = max(1, SLAB_BYTES // (count * self._columns * self._kind.itemsize)) * count
            self._slab, self._slab_row = self._compute(row, min(rows, self._rows - row)), row
        start = box.first - self._slab_row * self._columns
        return self._slab.reshape(-1)[start : start + box.elements]

    def _compute(self, row: int, rows: int) -> Array:
        left = self._read_rows(row, rows)
        left *= self._update.scaling
        return left if self._right is None else left @ self._right

    def _read_rows(self, row: int, rows: int) -> Array:
        """[rows, rank] of the factor that is read as the rows come; [rows, 1] for a vector."""
        factor, width = self._rows_of, BUFFER_BYTES // self._rows_of.dtype.item_bytes
        if self._update.is_transposed:
            rank = factor.shape[0]
            columns = np.empty((rank, rows), self._kind)
            for index in range(rank):
                for at in range(0, rows, width):
                    count = min(width, rows - at)
                    box = Box((index, row + at), (1, count), 0)
                    columns[index, at : at + count] = _read_box(self._left, factor, box, self._raw)
            return columns.T
        rank = factor.shape[1] if len(factor.shape) > 1 else 1
        wanted = np.empty((rows, rank), self._kind)
        step = max(1, width // rank)
        for at in range(0, rows, step):
            count = min(step, rows - at)
            box = (
                Box((row + at, 0), (count, rank), 0)
                if len(factor.shape) > 1
                else Box((row + at,), (count,), 0)
            )
            wanted[at : at + count] = _read_box(self._left, factor, box, self._raw).reshape(count, rank)
        return wanted

    def finish(self) -> None:
        """Compares the checksums that ran along with the rows."""
        self._left.finish()


class ExpertDelta:
    """The update of stacked experts, or of a tensor of one of them. Both factors are held whole."""

    def __init__(self, tensor: SourceTensor) -> None:
        assert isinstance(tensor.update, LowRankOfExperts)
        self._update = update = tensor.update
        rank = update.a.shape[0] // update.experts
        self._a = read_factor(update.a, kind_of(tensor)).reshape(update.experts, rank, -1)
        self._b = read_factor(update.b, kind_of(tensor)).reshape(-1, rank, update.experts)

    def of(self, box: Box) -> Array:
        """The update of one box of the tensor, flat."""
        update = self._update
        experts = (
            range(box.offsets[0], box.offsets[0] + box.sizes[0])
            if update.expert is None
            else (update.expert,)
        )
        first_row, first_column = box.offsets[-2] + update.first_row, box.offsets[-1]
        rows, columns = (
            slice(first_row, first_row + box.sizes[-2]),
            slice(first_column, first_column + box.sizes[-1]),
        )
        return np.concatenate([self._of_expert(expert, rows, columns).reshape(-1) for expert in experts])

    def _of_expert(self, expert: int, rows: slice, columns: slice) -> Array:
        b, a = self._b[:, :, expert], self._a[expert]
        left, right = (a.T, b.T) if self._update.is_transposed else (b, a)
        return (left[rows] * self._update.scaling) @ right[:, columns]


@lru_cache(maxsize=4)
def read_factor(factor: SourceTensor, kind: np.dtype[np.floating]) -> Array:
    """Return a factor in full. Kept for the next expert, whose tensor is usually the next in the file."""
    raw, scratch = (np.empty(BUFFER_BYTES, np.uint8) for _ in range(2))
    return _read_as(factor, kind, raw, scratch)


def _read_as(tensor: SourceTensor, kind: np.dtype[np.floating], raw: Array, scratch: Array) -> Array:
    """Return a tensor in full as `kind`, converted box by box. `raw` and `scratch` (BUFFER_BYTES each) are
    clobbered."""
    reader, values = TensorReader(tensor, scratch), np.empty(tensor.elements, kind)
    for box in boxes(tensor.shape, BUFFER_BYTES // tensor.dtype.item_bytes):
        values[box.first : box.first + box.elements] = _read_box(reader, tensor, box, raw)
    reader.finish()
    return values.reshape(tensor.shape)


def _read_box(reader: TensorReader, tensor: SourceTensor, box: Box, raw: Array) -> Array:
    """Return a box as it is stored, flat, in `raw`."""
    values = raw[: box.elements * tensor.dtype.item_bytes].view(tensor.dtype.numpy)
    reader.read(box, values)
    return values


def read_in_full(tensor: SourceTensor, scratch: Array) -> Array:
    """Return a tensor as it is stored. `scratch` (BUFFER_BYTES) is clobbered."""
    reader, values = TensorReader(tensor, scratch), np.empty(tensor.elements, tensor.dtype.numpy)
    for box in boxes(tensor.shape, BUFFER_BYTES // tensor.dtype.item_bytes):
        reader.read(box, values[box.first : box.first + box.elements])
    reader.finish()
    return values.reshape(tensor.shape)


def kind_of(tensor: SourceTensor) -> np.dtype[np.floating]:
    """Return the dtype of the sum: fp32, or fp64 if the tensor or a factor is fp64."""
    update = tensor.update
    parts = [tensor, *([update.b] if update else []), *([update.a] if update and update.a else [])]
    return np.dtype(np.float64 if any(part.dtype.name == "float64" for part in parts) else np.float32)


def held_bytes(tensor: SourceTensor) -> int:
    """Return the host memory of scales and of the update while the tensor is written."""
    update, scales_bytes = (
        tensor.update,
        tensor.encoded.scales.size_bytes if tensor.encoded is not None else 0,
    )
    if update is None or update.a is None:
        return scales_bytes
    if isinstance(update, LowRankOfExperts):
        return scales_bytes + (update.a.elements + update.b.elements) * kind_of(tensor).itemsize
    held = update.b if update.is_transposed else update.a
    return scales_bytes + held.elements * kind_of(tensor).itemsize
