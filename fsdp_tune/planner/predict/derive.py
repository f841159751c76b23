"""Derive traces from other traces: for another number of sequences, micro-batches or shards.

The size of a tensor either depends on the number of sequences or does not. Fake tensors cost the same at any
size, so a layout is traced at a micro-batch that is a large prime: the sizes that are multiples of it depend
on the number of sequences. For shards, two traces of one program have the same records in the same order, and
each size is linear in 1 / (number of shards), so two points determine it; padding of uneven shards is less
than a row per shard.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.topology import Topology
from fsdp_tune.planner.trace_format import EVALUATION, Records, Shapes, Trace

_SIZES = {
    "events": ("bytes",),
    "ops": ("flops", "moved_bytes", "batch_bytes", "slice_bytes"),
    "collectives": ("bytes",),
}


_PRIMES = (7919, 7907, 7901, 7883, 7879, 7877, 7873, 7867)


_SAME = {
    "events": ("at", "phase", "layer", "stream", "block", "kind", "host"),
    "ops": ("at", "phase", "layer", "stream", "name", "dtype", "in_slice"),
    "collectives": ("at", "phase", "stream", "kind", "group", "unit"),
    "waits": ("at", "stream", "source", "until"),
}


def alike(first: Trace, second: Trace) -> bool:
    """Return whether two traces are of one program and differ only in sizes."""
    if (first.streams, first.op_names, first.traced_layers) != (
        second.streams,
        second.op_names,
        second.traced_layers,
    ):
        return False
    for table, columns in _SAME.items():
        left: Records = getattr(first, table)
        right: Records = getattr(second, table)
        if len(left) != len(right) or not all(
            np.array_equal(left[column], right[column]) for column in columns
        ):
            return False
    return True


def blend(first: Trace, second: Trace, weight: float, shapes: Shapes) -> Trace:
    """Return the trace at `first + weight × (second − first)`, with `shapes`. Raises: ValueError if the two
    are not `alike`."""
    if not alike(first, second):
        raise ValueError("the traces are of two programs")
    tables: dict[str, Records] = {}
    for table, columns in _SIZES.items():
        records: Records = getattr(first, table).copy()
        other: Records = getattr(second, table)
        for column in columns:
            left, right = records[column].astype(np.float64), other[column].astype(np.float64)
            line = left + weight * (right - left)
            if table == "events":  # an allocation or a free keeps its sign and at least one byte
                line = np.sign(left) * np.maximum(np.sign(left) * line, 1.0)
            records[column] = line if column == "flops" else np.rint(line).astype(np.int64)
        tables[table] = records
    return replace(first, **tables, shapes=shapes)


def prime_for(trace: Trace) -> int:
    """Return a micro-batch at which to trace a layout of this trace's model, so that `at_micro_batch` can
    derive any other.

    It is a prime that divides no size in the trace (dimensions of the model, length of rows), and neither
    does its `slice_for`.
    """
    sizes = np.unique(np.abs(trace.events["bytes"]))
    free = [not (sizes % prime == 0).any() for prime in _PRIMES]
    return next(prime for prime, *unused in zip(_PRIMES, free, free[1:], strict=False) if all(unused))


def slice_for(micro_batch: int) -> int:
    """Return the tokens of a slice of the loss in a trace at `prime_for`: the next prime; 0 for any other
    micro-batch."""
    return _PRIMES[_PRIMES.index(micro_batch) + 1] if micro_batch in _PRIMES[:-1] else 0


def at_micro_batch(traced: Trace, micro_batch: int, accumulation: int) -> Trace:
    """Return the trace at another micro-batch. `traced` is at `prime_for`; only its multiples depend on the
    micro-batch.

    A trace with accumulation is also used for a step without it: the time excludes the second micro-batch,
    and the memory is that of an accumulating step, in which gradients exist slightly earlier. A single
    sequence differs in a few operations (rotary tables are not repeated) without effect on either peak. A
    loss in slices has one slice in both traces, with the work of all. An evaluation was traced at its own
    batch size and does not change.
    """
    prime, slice_prime = traced.shapes.micro_batch, slice_for(traced.shapes.micro_batch)
    tokens = micro_batch * traced.shapes.tokens // traced.shapes.topology.row_parts
    slice_tokens = min(tokens, traced.facts.slice_tokens or tokens)
    slices = tokens / slice_tokens

    def sized(table: Records, column: str) -> npt.NDArray[np.int64 | np.float64]:
        values = table[column]
        in_batch = np.where(values % prime == 0, values // prime * micro_batch, values)
        of_steps = np.where(
            (values % slice_prime == 0) & (values % prime != 0),
            values // slice_prime * slice_tokens,
            in_batch,
        )
        return np.where(_in_evaluation(table), values, of_steps)

    events, ops, collectives = traced.events.copy(), traced.ops.copy(), traced.collectives.copy()
    for table, column in (
        (events, "bytes"),
        (ops, "flops"),
        (ops, "batch_bytes"),
        (ops, "slice_bytes"),
        (collectives, "bytes"),
    ):
        table[column] = sized(table, column)
    same = traced.ops["moved_bytes"] - traced.ops["batch_bytes"] - traced.ops["slice_bytes"]
    times = np.where(ops["in_slice"], slices, 1.0)
    ops["flops"] *= times
    ops["moved_bytes"] = np.rint((same + ops["slice_bytes"]) * times) + ops["batch_bytes"]
    ops["kernels"] = np.ceil(ops["kernels"] * times)
    shapes = replace(traced.shapes, micro_batch=micro_batch, accumulation=accumulation)
    return replace(traced, events=events, ops=ops, collectives=collectives, shapes=shapes)


def _in_evaluation(table: Records) -> npt.NDArray[np.bool_]:
    """Select the records of the evaluation; for events, also the frees of blocks that it allocated."""
    during: npt.NDArray[np.bool_] = table["phase"] == EVALUATION
    if "block" not in (table.dtype.names or ()):
        return during
    return np.isin(table["block"], table["block"][during & (table["bytes"] > 0)])


def at_shards(few: Trace, many: Trace, topology: Topology) -> Trace:
    """Return the trace on other ranks, from two with other numbers of shards; sizes of shards are linear in
    the inverse of the number."""
    shapes = replace(few.shapes, topology=topology)
    low, high = few.shapes.shards, many.shapes.shards
    weight = (1 / shapes.shards - 1 / low) / (1 / high - 1 / low)
    return blend(few, many, weight, shapes)
