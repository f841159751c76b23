"""Traces between traces: what one step allocates is affine in the micro-batch, in the length, and in one over the number of shards.

Two traces of one program whose sizes differ have the same records in the same order; each size is then a straight line through two
points, and the trace of a third size needs no tracing. Rounding (padding of uneven shards) stays below a row of a shard.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fsdp_tune.plan.trace_format import Records, Shapes, Trace

_SIZES = {"events": ("bytes",), "ops": ("flops", "read_bytes", "written_bytes"), "collectives": ("bytes",)}
_SAME = {
    "events": ("at", "phase", "layer", "stream", "block", "kind", "host"),
    "ops": ("at", "phase", "layer", "stream", "name", "dtype"),
    "collectives": ("at", "phase", "stream", "kind", "group", "unit"),
    "waits": ("at", "stream", "source", "until"),
}


def alike(first: Trace, second: Trace) -> bool:
    """Whether two traces are of one program and differ in sizes alone."""
    if (first.streams, first.op_names, first.traced_layers) != (second.streams, second.op_names, second.traced_layers):
        return False
    for table, columns in _SAME.items():
        left: Records = getattr(first, table)
        right: Records = getattr(second, table)
        if len(left) != len(right) or not all(np.array_equal(left[column], right[column]) for column in columns):
            return False
    return True


def blend(first: Trace, second: Trace, weight: float, shapes: Shapes) -> Trace:
    """The trace at `first + weight × (second − first)`, of `shapes`. ValueError where the two are not `alike`."""
    if not alike(first, second):
        raise ValueError("the traces are of two programs")
    tables: dict[str, Records] = {}
    for table, columns in _SIZES.items():
        records: Records = getattr(first, table).copy()
        other: Records = getattr(second, table)
        for column in columns:
            left, right = records[column].astype(np.float64), other[column].astype(np.float64)
            line = left + weight * (right - left)
            records[column] = line if column == "flops" else np.rint(line).astype(np.int64)
        tables[table] = records
    return replace(first, **tables, shapes=shapes)


def at_micro_batch(low: Trace, high: Trace, micro_batch: int, accumulation: int) -> Trace:
    """`low` and `high` were traced at two micro-batches."""
    first, last = low.shapes.micro_batch, high.shapes.micro_batch
    shapes = replace(low.shapes, micro_batch=micro_batch, accumulation=accumulation)
    return blend(low, high, (micro_batch - first) / (last - first), shapes)


def at_accumulation(trace: Trace, accumulation: int) -> Trace:
    """The same forward, more or less often.

    Traced with accumulation, it stands for a step without it too: its time leaves the second micro-batch out, and its memory is
    that of one that accumulates, which has gradients at hand a little earlier.
    """
    return replace(trace, shapes=replace(trace.shapes, accumulation=accumulation))


def at_shards(few: Trace, many: Trace, shard_size: int, *, world_size: int, replicate_size: int) -> Trace:
    """Two traces that differ in the number of shards; sizes of shards are proportional to one over it."""
    low, high = few.shapes.shard_size, many.shapes.shard_size
    weight = (1 / shard_size - 1 / low) / (1 / high - 1 / low)
    shapes = replace(few.shapes, shard_size=shard_size, world_size=world_size, replicate_size=replicate_size)
    return blend(few, many, weight, shapes)
