"""Cut a tensor into boxes that fit a buffer, in the order of the output, and intersect them with chunks.

Convert element values between float types, round them to 4 bits, and find NaN and infinity.

Read one box of a tensor from the files of all ranks, and compare checksums.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from isal.isal_zlib import crc32  # six times as fast as zlib's, which took as long as the copy itself

from fsdp_tune.core.tensors.dtypes import NF4_BLOCK, NF4_SMALLEST_SCALE, NF4_VALUES, DType, Extent, Shape, is_row_major, row_major
from fsdp_tune.merge.formats.reader import Chunk, SourceTensor
from fsdp_tune.merge.formats.stored import damaged_chunk, locate


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `offsets` … `offsets + sizes`, contiguous in the whole tensor; `first` is the linear index of the first."""

    offsets: Shape
    sizes: Shape
    first: int

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Shape, most_elements: int, multiple: int = 1) -> Iterator[Box]:
    """Cut `shape` into contiguous boxes of at most `most_elements`, in row-major order.

    Box sizes are multiples of `multiple` elements where the shape allows it.
    """
    if 0 in shape:
        return
    if not shape:
        yield Box((), (), 0)
        return
    # Dimensions before `cut` are fixed at one index each, `cut` is taken in ranges, and dimensions after it in full.
    cut = 0
    while math.prod(shape[cut + 1 :]) > most_elements:
        cut += 1
    inner = math.prod(shape[cut + 1 :])
    rows, step = min(max(most_elements // inner, 1), shape[cut]), multiple // math.gcd(multiple, inner)
    rows -= rows % step if step <= rows else 0
    first = 0
    for fixed in itertools.product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], rows):
            count = min(rows, shape[cut] - start)
            yield Box((*fixed, start, *(0,) * (len(shape) - cut - 1)), (*(1,) * cut, count, *shape[cut + 1 :]), first)
            first += count * inner


def intersection(box: Box, offsets: Shape, sizes: Shape) -> tuple[Shape, Shape, Shape] | None:
    """Return (start in the box, start in the chunk, sizes) of the intersection of box and chunk, or None."""
    lows = tuple(max(a, b) for a, b in zip(box.offsets, offsets, strict=True))
    highs = tuple(min(a + m, b + n) for a, m, b, n in zip(box.offsets, box.sizes, offsets, sizes, strict=True))
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    in_box = tuple(low - start for low, start in zip(lows, box.offsets, strict=True))
    in_chunk = tuple(low - start for low, start in zip(lows, offsets, strict=True))
    return in_box, in_chunk, tuple(high - low for low, high in zip(lows, highs, strict=True))


Array = np.ndarray[Any, np.dtype[Any]]
# The largest finite magnitude of the 16-bit floats, as an integer: comparing bits is 10 times as fast as `isfinite` on them.
_LARGEST_FINITE_BITS = {"bfloat16": 0x7F7F, "float16": 0x7BFF}
_FLOATS_8_BIT = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz)
_NF4 = np.array(NF4_VALUES, np.float32)
_NF4_EDGES = (_NF4[1:] + _NF4[:-1]) / np.float32(2)
_NF4_PIECE = 1024
"""Blocks at a time: intermediate values of 256 KiB stay in the core's cache."""
_NF4_SCALE_DTYPES: dict[str, np.dtype[np.generic]] = {"fp32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(slots=True)
class NonFinite:
    """Counts of one tensor: `nan` and `inf` as they were read, `overflow` finite values that the target type cannot hold."""

    nan: int = 0
    inf: int = 0
    overflow: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf or self.overflow)

    def __str__(self) -> str:
        parts = [(self.nan, "NaN"), (self.inf, "infinite"), (self.overflow, "too large for the target dtype")]
        return ", ".join(f"{count:,} {word}" for count, word in parts if count)


def all_finite(values: Array, scratch: Array) -> bool:
    """Return whether every element is finite. `scratch` has at least as many bytes as `values` and is overwritten."""
    name = values.dtype.name
    if name in _LARGEST_FINITE_BITS:
        bits = values.view(np.uint16)
        magnitudes = scratch[: bits.nbytes].view(np.uint16)
        np.bitwise_and(bits, 0x7FFF, out=magnitudes)
        return int(magnitudes.max(initial=0)) <= _LARGEST_FINITE_BITS[name]
    if values.dtype.kind in "fc" or values.dtype.type in _FLOATS_8_BIT:
        # Into existing memory: a new array would take fresh pages from the kernel.
        return bool(np.isfinite(values, out=scratch[: values.size].view(np.bool_)).all())
    return True


def count_non_finite(values: Array, counts: NonFinite) -> None:
    counts.nan += int(np.count_nonzero(np.isnan(values)))
    # The 8-bit floats of the `fn` kinds have no infinity, and numpy's isinf is not defined for them.
    counts.inf += int(np.count_nonzero(~np.isfinite(values))) - int(np.count_nonzero(np.isnan(values)))


def convert(values: Array, target: Array) -> None:
    """Round to nearest, ties to even, as torch's `.to` does: float64 goes to the 16-bit types through float32.

    NaN stays NaN; values that are too large become infinite, and the caller counts them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.dtype == np.float64 and target.dtype.itemsize == 2
        np.copyto(target, values.astype(np.float32) if narrow else values, casting="unsafe")


def rounded_to_nf4(values: Array, scales_in: Literal["fp32", "bf16"]) -> Array:
    """Return whole blocks of values, quantised and dequantised, in fp32: what `model.adapters.nf4` makes of them."""
    rounded = values.astype(np.float32)
    blocks = rounded.reshape(-1, NF4_BLOCK)
    for first in range(0, len(blocks), _NF4_PIECE):
        piece = blocks[first : first + _NF4_PIECE]
        scales = np.abs(piece).max(axis=1).astype(_NF4_SCALE_DTYPES[scales_in]).astype(np.float32)
        scaled = piece * (np.float32(1.0) / np.maximum(scales, np.float32(NF4_SMALLEST_SCALE)))[:, None]
        codes = np.zeros(scaled.shape, np.uint8)
        for edge in _NF4_EDGES:
            codes += scaled > edge
        np.multiply(_NF4[codes], scales[:, None], out=piece)
    return rounded


def is_checked(dtype: DType) -> bool:
    """Return whether values of this type can be NaN or infinite."""
    return dtype.numpy.kind in "fc" or dtype.numpy.type in (ml_dtypes.bfloat16, *_FLOATS_8_BIT)


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
