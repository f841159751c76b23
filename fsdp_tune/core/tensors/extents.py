"""Where the elements of a stored tensor are in a file."""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements: the first at byte `first_byte` of `file`, the others by `strides` (in elements).

    `storage_start` and `storage_bytes` bound the block of bytes that `crc32` (None: not recorded) was taken over.
    """

    file: str
    first_byte: int
    strides: Shape
    storage_start: int
    storage_bytes: int
    crc32: int | None = None


def row_major(shape: Shape) -> Shape:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(sizes: Shape, strides: Shape) -> bool:
    """Return whether elements are contiguous in row-major order. Strides of dimensions of size 1 are ignored."""
    return math.prod(sizes) == 0 or all(
        size == 1 or stride == wanted for size, stride, wanted in zip(sizes, strides, row_major(sizes), strict=True)
    )
