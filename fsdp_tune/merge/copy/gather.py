"""Read one box of a tensor from the files of all ranks, and compare checksums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32  # six times as fast as zlib's, which took as long as the copy itself

from fsdp_tune.core.tensors.extents import Extent, Shape, is_row_major, row_major
from fsdp_tune.merge.copy.boxes import Box, intersection
from fsdp_tune.merge.copy.values import Array
from fsdp_tune.merge.formats.dcp import damaged_chunk, locate
from fsdp_tune.merge.formats.tensors import Chunk, SourceTensor

BUFFER_BYTES = 2 << 20  # smaller ones cost calls (512 KiB: half as much time again), larger ones leave the core's cache
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
        is_whole = extent.first_byte == extent.storage_start and extent.storage_bytes == chunk.elements * self._item_bytes
        has_checksum = not self._files.is_vouched and extent.crc32 is not None
        runs_along = has_checksum and in_order and is_whole and self._in_order
        if has_checksum and not runs_along:
            self._check_storage(extent)
        return _OpenChunk(chunk, extent, in_order, 0 if runs_along else None)

    def _check_storage(self, extent: Extent) -> None:
        """Check a storage that is not read from front to back, in a pass of its own, once for all tensors with parts of it."""
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
        # As words of the same width: moving needs no arithmetic, and numpy moves its own types faster than the 8-bit floats.
        shaped = target.view(_WORDS[self._item_bytes]).reshape(box.sizes)
        for part in self._parts:
            shared = intersection(box, part.chunk.offsets, part.chunk.sizes)
            if shared is None:
                continue
            in_box, in_chunk, sizes = shared
            # The ellipsis keeps it a view: indexing an array of no dimensions by () alone gives a copy of its value.
            wanted = shaped[(*(slice(start, start + size) for start, size in zip(in_box, sizes, strict=True)), ...)]
            if part.is_row_major:
                self._read_run(part, in_chunk, sizes, wanted)
            else:
                self._read_strided(part.extent, in_chunk, sizes, wanted)

    def finish(self) -> None:
        """Compare the checksums that were computed while reading. Raises: FailedError naming the file of the chunk that differs."""
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
        """Read a box that is contiguous in a row-major chunk: one read, directly into place if the chunk spans full rows."""
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
        """Read a box of any strides: halve it along its widest stride until the span to read wastes little."""
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
        at = extent.first_byte + sum(a * b for a, b in zip(start, extent.strides, strict=True)) * self._item_bytes
        self._files.read_into(extent.file, at, self._scratch.data[:span_bytes])
        strides_bytes = tuple(stride * self._item_bytes for stride in extent.strides)
        wanted[...] = np.ndarray(sizes, wanted.dtype, self._scratch[:span_bytes].data, 0, strides_bytes)
