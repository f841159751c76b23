"""Whether the chunks of a tensor cover it: each element once, however the mesh was shaped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fsdp_tune.merge.tensors import Chunk, Shape


def without_replicas(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """One of each (offsets, sizes): under HSDP every replica may have written its own. Empty chunks say nothing and go."""
    kept: dict[tuple[Shape, Shape], Chunk] = {}
    for chunk in chunks:
        if chunk.elements:
            kept.setdefault((chunk.offsets, chunk.sizes), chunk)
    return tuple(sorted(kept.values(), key=lambda chunk: chunk.offsets))


def gap_or_overlap(shape: Shape, chunks: Sequence[Chunk]) -> str | None:
    """None when `chunks` cover `shape` exactly, else what is wrong, in words."""
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return f"a chunk has {len(chunk.sizes)} dimensions where the tensor has {len(shape)}"
        bounds = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(offset < 0 or size < 0 or offset + size > limit for offset, size, limit in bounds):
            return f"the chunk at {list(chunk.offsets)} of shape {list(chunk.sizes)} reaches out of the tensor of shape {list(shape)}"
    if _overlaps(chunks):
        return "two chunks overlap"
    covered, wanted = sum(chunk.elements for chunk in chunks), math.prod(shape)
    return None if covered == wanted else f"the chunks cover {covered:,} of {wanted:,} elements"


def _overlaps(chunks: Sequence[Chunk]) -> bool:
    if len(chunks) < 2 or not chunks[0].sizes:
        return len(chunks) > 1
    starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
    ends = starts + np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
    # The usual case, slices of one dimension, is settled by sorting; a mesh of two needs the pairs.
    for dimension in range(starts.shape[1]):
        order = np.argsort(starts[:, dimension], kind="stable")
        if bool(np.all(ends[order, dimension][:-1] <= starts[order, dimension][1:])):
            return False
    for index in range(len(chunks) - 1):
        meets = (starts[index] < ends[index + 1 :]) & (starts[index + 1 :] < ends[index])
        if bool(meets.all(axis=1).any()):
            return True
    return False
