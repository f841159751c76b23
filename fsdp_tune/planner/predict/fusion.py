"""Fuse the elementwise and reduction operators of compiled layers, which are traced as eager ones.

Inductor compiles the operators between two matrix products or attentions to one kernel. The kernel reads its inputs once and writes
only the tensors that something else needs. If another kernel of the layer needs an intermediate tensor, it computes the tensor again
from its inputs where that moves fewer bytes than writing and reading it. This also holds between the forward and the backward of a
layer, which are compiled together. Numbers of operators are small: a trace has a few decoder layers (`planner.predict.depth`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_tune.planner.trace_format import Records

Graph = tuple[int, int, int]
"""Optimizer step, micro-batch and layer: the forward and backward that are compiled together."""
Sizes = dict[int, int]
"""Bytes by block."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the dispatcher, with the blocks that it reads and writes."""

    row: int
    """Index in the table of operations; -1 for a collective."""
    graph: Graph | None
    """None outside of the compiled code."""
    phase: int
    can_fuse: bool
    is_separate: bool
    """Whether it needs a pass of its own over its inputs: a reduction that is not along the last dimension."""
    reads: tuple[tuple[int, int], ...]
    """Blocks and bytes."""
    writes: tuple[tuple[int, int], ...]


class _Kernel(NamedTuple):
    """Identifies a fused kernel: all fusible operators of a phase with the same number of matrix products before them."""

    graph: Graph
    phase: int
    level: int
    separate: int
    """The row of a separate reduction; else -1."""


def fuse(ops: Records, calls: Sequence[Call], sizes: Sizes, micro_batch: int, slice_tokens: int) -> Records:
    """Return the operations with each fused kernel in the position of its first operator; the others keep no work and no launch."""
    layers = _Layers(calls, sizes)
    ops = ops.copy()
    traffic = layers.traffic()
    launched: set[_Kernel] = set()
    for call, kernel in zip(calls, layers.kernels, strict=True):
        if kernel is None:
            continue
        first = kernel not in launched
        launched.add(kernel)
        moved = list(traffic[kernel].values()) if first else []
        record = ops[call.row : call.row + 1]
        record["moved_bytes"] = sum(moved)
        record["batch_bytes"] = sum(size for size in moved if size % micro_batch == 0)
        record["slice_bytes"] = sum(size for size in moved if size % slice_tokens == 0) if slice_tokens else 0
        record["kernels"] = bool(moved)
    return ops


class _Layers:
    """The data flow of the compiled layers."""

    def __init__(self, calls: Sequence[Call], sizes: Sizes) -> None:
        self.sizes = sizes
        self.kernels = _kernels(calls)
        self.fused = [(call, kernel) for call, kernel in zip(calls, self.kernels, strict=True) if kernel is not None]
        self.writers: dict[int, set[_Kernel | None]] = defaultdict(set)
        self.readers: dict[int, set[_Kernel | None]] = defaultdict(set)
        for call, kernel in zip(calls, self.kernels, strict=True):
            for block, _ in call.reads:
                self.readers[block].add(kernel)
            for block, _ in call.writes:
                self.writers[block].add(kernel)
        self.stored = {block for block in (*self.writers, *self.readers) if self._is_needed_outside(block)}
        self.sources = self._choose_stored()

    def _is_needed_outside(self, block: int) -> bool:
        """Return whether anything but a fused kernel of the same layer reads or writes a block."""
        kernels = self.writers[block] | self.readers[block]
        return not self.writers[block] or None in kernels or len({kernel.graph for kernel in kernels if kernel is not None}) > 1

    def _users(self) -> dict[int, set[_Kernel]]:
        """Return the kernels that read a block, or a block that is computed from it and need not be stored."""
        users: dict[int, set[_Kernel]] = defaultdict(set)
        for call, kernel in reversed(self.fused):
            after = set[_Kernel]().union(*(users[block] for block, _ in call.writes if block not in self.stored))
            for block, _ in call.reads:
                users[block] |= after | {kernel}
        return users

    def _choose_stored(self) -> dict[int, Sizes]:
        """Add the intermediate blocks that are cheaper to store than to compute again; return what each block is computed from."""
        users = self._users()
        sources: dict[int, Sizes] = defaultdict(dict)
        for call, _ in self.fused:
            for block, _ in call.writes:
                for source, size in call.reads:
                    if source in self.stored:
                        sources[block][source] = self._at_most(source, sources[block].get(source, 0) + size)
                    elif source != block:
                        sources[block] |= sources[source]
                others = len(users[block] - self.writers[block])
                if others * sum(sources[block].values()) > (1 + others) * self.sizes.get(block, 0):
                    self.stored.add(block)
        return sources

    def _at_most(self, block: int, size: int) -> int:
        """Count each byte of a block once; views of it may overlap."""
        return min(self.sizes.get(block, 0), size)

    def traffic(self) -> dict[_Kernel, dict[tuple[int, str], int]]:
        """Return the bytes that each kernel moves, by block and direction."""
        moved: dict[_Kernel, dict[tuple[int, str], int]] = defaultdict(dict)
        for call, kernel in self.fused:
            found = moved[kernel]
            for block, size in call.writes:
                if block not in self.stored:
                    continue
                found[block, "written"] = self._at_most(block, found.get((block, "written"), 0) + size)
                for source, part in self.sources[block].items():
                    if kernel not in self.writers[source]:
                        found[source, "read"] = max(part, found.get((source, "read"), 0))
        return moved


def _kernels(calls: Sequence[Call]) -> list[_Kernel | None]:
    """Return the fused kernel of each call; None for one that is not fused."""
    levels: dict[int, tuple[Graph, int]] = {}
    """By block: the number of matrix products and separate reductions on the longest path to it, in its graph."""
    kernels: list[_Kernel | None] = []
    for call in calls:
        if call.graph is None:
            kernels.append(None)
            continue
        known = [levels[block] for block, _ in (*call.reads, *call.writes) if block in levels]
        level = max((found for graph, found in known if graph == call.graph), default=0)
        separate = call.row if call.is_separate else -1
        kernels.append(_Kernel(call.graph, call.phase, level, separate) if call.can_fuse else None)
        after = level + (call.is_separate or not call.can_fuse)
        levels |= {block: (call.graph, after) for block, _ in call.writes}
    return kernels
