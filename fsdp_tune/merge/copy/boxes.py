"""Boxes of a tensor: contiguous parts that fit a buffer, and what they have in common with chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_tune.core.tensors.dtypes import Shape


@dataclass(frozen=True, slots=True)
class Box:
    """Elements `offsets` … `offsets + sizes`, contiguous in the whole tensor; `first` is the linear index of
    the first."""

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
    # Dimensions before `cut` are fixed at one index each, `cut` is taken in ranges, and dimensions after it
    # in full.
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
            yield Box(
                (*fixed, start, *(0,) * (len(shape) - cut - 1)),
                (*(1,) * cut, count, *shape[cut + 1 :]),
                first,
            )
            first += count * inner


class Intersection(NamedTuple):
    """The part that a box and a chunk of one tensor have in common."""

    in_box: Shape
    """Its start, from that of the box."""
    in_chunk: Shape
    """Its start, from that of the chunk."""
    sizes: Shape


def intersection(box: Box, offsets: Shape, sizes: Shape) -> Intersection | None:
    """Return the intersection of a box and a chunk; None if they have no element in common."""
    lows = tuple(max(a, b) for a, b in zip(box.offsets, offsets, strict=True))
    highs = tuple(
        min(a + m, b + n) for a, m, b, n in zip(box.offsets, box.sizes, offsets, sizes, strict=True)
    )
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    in_box = tuple(low - start for low, start in zip(lows, box.offsets, strict=True))
    in_chunk = tuple(low - start for low, start in zip(lows, offsets, strict=True))
    return Intersection(in_box, in_chunk, tuple(high - low for low, high in zip(lows, highs, strict=True)))
