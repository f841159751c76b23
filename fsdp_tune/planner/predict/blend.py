"""Traces that need no tracing: what one step allocates follows from another number of sequences, micro-batches or shards.

A tensor either has the sequences of a forward in it or has not. Fake tensors cost the same at any size, so a layout is traced at a
micro-batch that is a large prime: the sizes that are a multiple of it are those with sequences in them. Shards: two traces of one
program have the same records in the same order, and each size is a straight line over one by the number of shards through two points;
padding of uneven shards stays below a row of a shard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_tune.planner.trace_format import EVALUATION, Records, Shapes, Trace

_SIZES = {"events": ("bytes",), "ops": ("flops", "moved_bytes", "batch_bytes", "slice_bytes"), "collectives": ("bytes",)}
_PRIMES = (7919, 7907, 7901, 7883, 7879, 7877, 7873, 7867)
_SAME = {
    "events": ("at", "phase", "layer", "stream", "block", "kind", "host"),
    "ops": ("at", "phase", "layer", "stream", "name", "dtype", "in_slice"),
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
            if table == "events":  # what is allocated and freed stays so, however small
                line = np.sign(left) * np.maximum(np.sign(left) * line, 1.0)
            records[column] = line if column == "flops" else np.rint(line).astype(np.int64)
        tables[table] = records
    return replace(first, **tables, shapes=shapes)


def prime_for(trace: Trace) -> int:
    """A micro-batch to trace a layout of this trace's model at, so that `at_micro_batch` makes any other of it.

    A prime that is no factor of any size in the trace (the model's dimensions, the rows' length), and neither is its `slice_for`.
    """
    sizes = np.unique(np.abs(trace.events["bytes"]))
    free = [not (sizes % prime == 0).any() for prime in _PRIMES]
    return next(prime for prime, *unused in zip(_PRIMES, free, free[1:], strict=False) if all(unused))


def slice_for(micro_batch: int) -> int:
    """Tokens of a slice of the loss in a trace at `prime_for`: the next prime. 0 for any other micro-batch."""
    return _PRIMES[_PRIMES.index(micro_batch) + 1] if micro_batch in _PRIMES[:-1] else 0


def at_micro_batch(traced: Trace, micro_batch: int, accumulation: int) -> Trace:
    """The trace at another micro-batch; `traced` is at `prime_for`: what is a multiple of it grows with the micro-batch, and nothing else.

    Traced with accumulation, it stands for a step without it too: its time leaves the second micro-batch out, and its memory is that of one
    that accumulates, which has gradients at hand a little earlier. One sequence alone is a program of its own in a few places (rotary
    tables are not repeated), which move neither peak. Of a loss in slices there is one in the trace and in what is made of it, with the
    work of all. An evaluation was traced at its own batch size, and stays as it is.
    """
    prime, slice_prime = traced.shapes.micro_batch, slice_for(traced.shapes.micro_batch)
    tokens = micro_batch * traced.shapes.tokens
    slice_tokens = min(tokens, traced.facts.get("slice_tokens") or tokens)
    slices = tokens / slice_tokens

    def sized(table: Records, column: str) -> npt.NDArray[Any]:
        values = table[column]
        in_batch = np.where(values % prime == 0, values // prime * micro_batch, values)
        of_steps = np.where((values % slice_prime == 0) & (values % prime != 0), values // slice_prime * slice_tokens, in_batch)
        return np.where(_in_evaluation(table), values, of_steps)

    events, ops, collectives = traced.events.copy(), traced.ops.copy(), traced.collectives.copy()
    for table, column in ((events, "bytes"), (ops, "flops"), (ops, "batch_bytes"), (ops, "slice_bytes"), (collectives, "bytes")):
        table[column] = sized(table, column)
    same = traced.ops["moved_bytes"] - traced.ops["batch_bytes"] - traced.ops["slice_bytes"]
    times = np.where(ops["in_slice"], slices, 1.0)
    ops["flops"] *= times
    ops["moved_bytes"] = np.rint((same + ops["slice_bytes"]) * times) + ops["batch_bytes"]
    ops["kernels"] = np.ceil(ops["kernels"] * times)
    shapes = replace(traced.shapes, micro_batch=micro_batch, accumulation=accumulation)
    return replace(traced, events=events, ops=ops, collectives=collectives, shapes=shapes)


def _in_evaluation(table: Records) -> npt.NDArray[np.bool_]:
    """Records of the evaluation; of events, also where a block that it allocated is freed."""
    during: npt.NDArray[np.bool_] = table["phase"] == EVALUATION
    if "block" not in (table.dtype.names or ()):
        return during
    return np.isin(table["block"], table["block"][during & (table["bytes"] > 0)])


def at_shards(few: Trace, many: Trace, shard_size: int, *, world_size: int, replicate_size: int) -> Trace:
    """Two traces that differ in the number of shards; sizes of shards are proportional to one over it."""
    low, high = few.shapes.shard_size, many.shapes.shard_size
    weight = (1 / shard_size - 1 / low) / (1 / high - 1 / low)
    shapes = replace(few.shapes, shard_size=shard_size, world_size=world_size, replicate_size=replicate_size)
    return blend(few, many, weight, shapes)
