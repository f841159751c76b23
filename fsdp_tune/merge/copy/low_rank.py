"""Compute the update of one tensor by a LoRA adapter, a slab of rows at a time: scaling · B·A in fp32, in bounded memory.

The factor that runs along a row of the tensor (A; B of a transposed layer) is held whole while the tensor is written, the other
is read with the rows. `Budget` bounds what all threads hold together.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import numpy as np

from fsdp_tune.merge.copy.gather import BUFFER_BYTES, Array, Box, TensorReader, boxes
from fsdp_tune.merge.formats.reader import LowRank, LowRankOfExperts, SourceTensor

HELD_BYTES = 64 << 20
# More rows at once use the held factor better (it does not fit a core's cache): 512 KiB take three times as long.
SLAB_BYTES = 4 << 20


class Budget:
    """A budget of bytes that several threads share. A request larger than the budget waits until it is alone."""

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
        held = update.b if update.is_transposed else update.a
        whole = np.empty(held.shape, self._kind)
        reader, flat = TensorReader(held, self._scratch), whole.reshape(-1)
        for box in boxes(held.shape, BUFFER_BYTES // held.dtype.item_bytes):
            flat[box.first : box.first + box.elements] = self._read(reader, held, box)
        reader.finish()
        return whole.T if update.is_transposed else whole

    def _read_magnitude(self) -> Array | None:
        """[rows] of DoRA, in float64."""
        magnitude = self._update.magnitude
        if magnitude is None:
            return None
        lengths, reader = np.empty(self._rows, np.float64), TensorReader(magnitude, self._scratch)
        for box in boxes(magnitude.shape, BUFFER_BYTES // magnitude.dtype.item_bytes):
            lengths[box.first : box.first + box.elements] = self._read(reader, magnitude, box)
        reader.finish()
        return lengths

    def set_lengths(self, total: Array, box: Box) -> None:
        """Scale the rows of the sum, one box of whole rows, to DoRA's lengths, in place."""
        if self._magnitude is None:
            return
        rows = total.reshape(-1, self._columns)
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        first = box.first // self._columns
        rows *= (self._magnitude[first : first + len(rows)] / lengths)[:, None]

    def _read(self, reader: TensorReader, factor: SourceTensor, box: Box) -> Array:
        values = self._raw[: box.elements * factor.dtype.item_bytes].view(factor.dtype.numpy)
        reader.read(box, values)
        return values

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
                    columns[index, at : at + count] = self._read(self._left, factor, Box((index, row + at), (1, count), 0))
            return columns.T
        rank = factor.shape[1] if len(factor.shape) > 1 else 1
        wanted = np.empty((rows, rank), self._kind)
        step = max(1, width // rank)
        for at in range(0, rows, step):
            count = min(step, rows - at)
            box = Box((row + at, 0), (count, rank), 0) if len(factor.shape) > 1 else Box((row + at,), (count,), 0)
            wanted[at : at + count] = self._read(self._left, factor, box).reshape(count, rank)
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
        experts = range(box.offsets[0], box.offsets[0] + box.sizes[0]) if update.expert is None else (update.expert,)
        first_row, first_column = box.offsets[-2] + update.first_row, box.offsets[-1]
        rows, columns = slice(first_row, first_row + box.sizes[-2]), slice(first_column, first_column + box.sizes[-1])
        return np.concatenate([self._of_expert(expert, rows, columns).reshape(-1) for expert in experts])

    def _of_expert(self, expert: int, rows: slice, columns: slice) -> Array:
        b, a = self._b[:, :, expert], self._a[expert]
        left, right = (a.T, b.T) if self._update.is_transposed else (b, a)
        return (left[rows] * self._update.scaling) @ right[:, columns]


@lru_cache(maxsize=4)
def read_factor(factor: SourceTensor, kind: np.dtype[np.floating]) -> Array:
    """Return a factor in full. Kept for the next expert, whose tensor is usually the next in the file."""
    reader = TensorReader(factor, np.empty(BUFFER_BYTES, np.uint8))
    values = np.empty(factor.elements, factor.dtype.numpy)
    for box in boxes(factor.shape, BUFFER_BYTES // factor.dtype.item_bytes):
        reader.read(box, values[box.first : box.first + box.elements])
    reader.finish()
    return values.astype(kind)


def kind_of(tensor: SourceTensor) -> np.dtype[np.floating]:
    """Return the dtype of the sum: fp32, or fp64 if the tensor or a factor is fp64."""
    update = tensor.update
    parts = [tensor, *([update.b] if update else []), *([update.a] if update and update.a else [])]
    return np.dtype(np.float64 if any(part.dtype.name == "float64" for part in parts) else np.float32)


def held_bytes(tensor: SourceTensor) -> int:
    """Return the host memory of the update while the tensor is written."""
    update = tensor.update
    if update is None or update.a is None:
        return 0
    if isinstance(update, LowRankOfExperts):
        return (update.a.elements + update.b.elements) * kind_of(tensor).itemsize
    held = update.b if update.is_transposed else update.a
    return held.elements * kind_of(tensor).itemsize
