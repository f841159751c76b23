"""The format of a traced step: allocations, operations, collectives and waits of one rank, in the order of
issue by the CPU.

The trace is the interface between the part that runs the real model (`fsdp_tune.planner.trace`, imports
torch) and the planner (pure): memory is a replay of `events`, time a simulation of `ops`, `collectives` and
`waits`. Tables are numpy record arrays; every record has `at`, its position in a common order of all tables,
and columns that index the tuples of names of `Trace`.

A trace may have fewer layers than the model (`traced_layers` < `layers`):
`fsdp_tune.planner.predict.depth.full_depth` repeats the middle ones, so that all later code gets a trace of
the full model and does not extrapolate.

`fuse` joins the elementwise and reduction operators of compiled layers, which are traced as eager ones.
Inductor compiles the operators between two matrix products or attentions to one kernel. The kernel reads its
inputs once and writes only the tensors that something else needs. If another kernel of the layer needs an
intermediate tensor, it computes the tensor again from its inputs where that moves fewer bytes than writing
and reading it. This also holds between the forward and the backward of a layer, which are compiled together.
Numbers of operators are small: a trace has a few decoder layers.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.topology import DIMENSIONS, Topology

FORMAT_VERSION = 8

Records = npt.NDArray[Any]

_WHERE = [
    ("at", "i4"),  # position in the common order
    ("step", "i1"),  # optimizer step: -1 before the first, then 0, 1 …
    ("micro", "i1"),  # micro-batch of that step; -1 outside forward, loss and backward
    ("phase", "i1"),  # index into PHASES
    # current decoder layer, or that of the tensor in clip, optimizer and zero_grad; -1 for none
    (
        "layer",
        "i2",
    ),
    ("module", "i4"),  # index into Trace.modules: the innermost current module
    ("stream", "i1"),  # index into Trace.streams; 0 is the compute stream
]
PHASES = ("load", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "evaluation")
EVALUATION = PHASES.index("evaluation")
"""The phase after the last step: one batch, with its own step number."""

EVENT = np.dtype([*_WHERE, ("block", "i4"), ("bytes", "i8"), ("kind", "i1"), ("host", "?")])
"""`block` is allocated (`bytes` > 0) or freed (`bytes` < 0, the same size). `kind` indexes KINDS. `host`: in
(pinned) host memory, not on the device. `stream` of an allocation is that of its memory pool."""

KINDS = (
    "parameters",  # this rank's shards (or full parameters), and buffers of the model
    "gradients",  # this rank's gradients
    "optimizer state",
    "gathered units",  # unsharded parameters
    "all-gather buffers",
    "reduce buffers",  # reduce-scatter and all-reduce inputs and outputs
    "unsharded gradients",  # between backward and reduce-scatter, or between micro-batches
    "activations",  # of the decoder layers
    "activations outside layers",  # embedding, final norm, rotary tables
    "logits and loss",
    "optimizer temporaries",  # clip and step
    "inputs",  # token ids, labels, position ids
)

OP = np.dtype(
    [
        *_WHERE,
        ("name", "i4"),
        ("dtype", "i1"),
        ("flops", "f8"),
        ("moved_bytes", "i8"),
        ("batch_bytes", "i8"),
        ("slice_bytes", "i8"),
        ("in_slice", "?"),
        ("kernels", "i4"),
    ]
)
"""One call of the dispatcher that starts work on the device (without views and metadata). `name` indexes
Trace.op_names (`mm`, `_foreach_mul_`, `copy_to_host` …), `dtype` indexes DTYPES: that of the multiplication
for flops, else of the output. `flops` counts a multiply-add as two, and zero for elementwise work.
`moved_bytes` are the bytes read and written; `batch_bytes` and `slice_bytes` are those in tensors whose size
is a multiple of the micro-batch or of the tokens of a loss slice; `in_slice` marks the work of every slice
(`derive.at_micro_batch`). `kernels` is the number of launches: more than one for foreach operations, 0 inside
a fused kernel, whose bytes are those of its first operation (`fuse`)."""

DTYPES = ("fp32", "bf16", "fp16", "fp64", "int64", "int32", "bool", "uint8", "fp8")

COLLECTIVE = np.dtype(
    [*_WHERE, ("kind", "i1"), ("group", "i1"), ("bytes", "i8"), ("unit", "i4"), ("dtype", "i1")]
)
"""`bytes` is the full buffer: the output of an all-gather, the input of a reduce-scatter, the tensor of an
all-reduce, the input of an all-to-all.
`kind` indexes COLLECTIVES, `group` GROUPS, `unit` Trace.units (-1: none, such as the norm's sum)."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")
GROUPS = ("world", *DIMENSIONS)
"""What `Topology.group` takes."""

WAIT = np.dtype([*_WHERE, ("source", "i1"), ("until", "i4")])
"""`stream` waits until all work that was issued to stream `source` at positions < `until` is done."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One FSDP unit (or DDP bucket)."""

    name: str
    layer: int
    """Index of the decoder layer, -1 for the embedding, the head and the root."""
    parameters: int
    """Elements, over all ranks."""
    parameter_bytes: int
    """In storage dtype, over all ranks."""
    gathered_bytes: int
    """Size of the output of one all-gather, in compute dtype."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the full model, independent of the traced layers."""

    parameters: int
    active_parameters: int | None
    """Parameters that one token uses (`core.gpus`); None if the model's configuration does not define
    them."""
    trained_parameters: int
    parameter_bytes: int
    layers: int
    hidden_size: int
    attention_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of the traced run, per rank."""

    micro_batch: int
    """Sequences of one forward."""
    tokens: int
    """Tokens of one sequence (`data.max_length`)."""
    accumulation: int
    """Micro-batches of a real step; `traced_micro_batches` of them were traced (the first, perhaps one
    between, and the last)."""
    traced_micro_batches: int
    traced_steps: int
    topology: Topology
    is_sharded: bool = True
    ep_size: int = 1
    """Ranks that divide the experts of a layer in the predicted step. The tables of a trace are always those
    of one (`predict.mixture`)."""

    @property
    def shards(self) -> int:
        """Parts of the model on different ranks; 1 for plain DDP, also where ranks share rows."""
        return self.topology.copy_size if self.is_sharded else 1


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What the trace assumes of model and libraries."""

    attention: list[str] = field(default_factory=list[str])
    """Kernels."""
    flash_version: int = 2
    slice_tokens: int | None = None
    """Tokens of which the loss computes logits at a time; None for all."""
    torch: str = ""
    transformers: str = ""
    python: str = ""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the model."""
    max_positions: int | None = None
    experts_inside: bool = False
    """Whether stacks of experts are sharded inside of each expert."""
    expert_shapes: list[list[int]] = field(default_factory=list[list[int]])
    """Of stacked experts that ranks may divide, each once."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One rank's training from loaded weights through `shapes.traced_steps` optimizer steps."""

    events: Records
    ops: Records
    collectives: Records
    waits: Records
    streams: tuple[str, ...]
    """compute, all-gather copy-in, all-gather, reduce-scatter, all-reduce, unshard …"""
    modules: tuple[str, ...]
    """Qualified names in the bare model; modules[0] is ''."""
    op_names: tuple[str, ...]
    units: tuple[Unit, ...]
    counts: Counts
    shapes: Shapes
    traced_layers: int
    period: int = 1
    """Number of decoder layers after which the pattern repeats (2 if every second one is recomputed)."""
    first_repeated: int = 0
    """The first of the `period` traced layers that represent the layers that were not traced."""
    facts: TraceFacts = field(default_factory=TraceFacts)

    @property
    def layers(self) -> int:
        return self.counts.layers

    def steady(self, table: Records) -> Records:
        """Return the records of the last traced optimizer step, in which all state already exists."""
        return table[table["step"] == self.shapes.traced_steps - 1]

    def to_bytes(self) -> bytes:
        head = {
            "version": FORMAT_VERSION,
            "streams": self.streams,
            "modules": self.modules,
            "op_names": self.op_names,
            "units": [asdict(unit) for unit in self.units],
            "counts": asdict(self.counts),
            "shapes": asdict(self.shapes),
            "traced_layers": self.traced_layers,
            "period": self.period,
            "first_repeated": self.first_repeated,
            "facts": asdict(self.facts),
        }
        buffer = io.BytesIO()
        arrays = {name: getattr(self, name) for name in _TABLES}
        np.savez_compressed(buffer, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
        return buffer.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> Trace:
        """Read a trace. Raises: ValueError for other data, or for another version of the format."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as archive:
                head: dict[str, Any] = json.loads(archive["head"].tobytes())
                tables = {name: archive[name] for name in _TABLES}
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:  # cut off, or damaged
            raise ValueError(f"not a trace: {error}") from error
        if head.get("version") != FORMAT_VERSION:
            raise ValueError(f"trace format {head.get('version')}, this program reads {FORMAT_VERSION}")
        for name, dtype in _TABLES.items():
            if tables[name].dtype != dtype:
                raise ValueError(f"{name}: not the columns of this format")
        return Trace(
            **tables,
            streams=tuple(head["streams"]),
            modules=tuple(head["modules"]),
            op_names=tuple(head["op_names"]),
            units=tuple(Unit(**unit) for unit in head["units"]),
            counts=Counts(**head["counts"]),
            shapes=Shapes(**head["shapes"] | {"topology": Topology(**head["shapes"]["topology"])}),
            traced_layers=head["traced_layers"],
            period=head["period"],
            first_repeated=head["first_repeated"],
            facts=TraceFacts(**head["facts"]),
        )

    def save(self, path: Path) -> None:
        write_file(path, self.to_bytes())

    @staticmethod
    def load(path: Path) -> Trace:
        return Trace.from_bytes(path.read_bytes())


_TABLES = {"events": EVENT, "ops": OP, "collectives": COLLECTIVE, "waits": WAIT}
assert set(_TABLES) <= {f.name for f in fields(Trace)}

Segments = Literal["plain", "expandable"]
"""How the caching allocator gets memory: fixed segments, or pages mapped into growing ranges
(`expandable_segments:True`)."""


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
    """Whether it needs a pass of its own over its inputs: a reduction that is not along the last
    dimension."""
    reads: tuple[tuple[int, int], ...]
    """Blocks and bytes."""
    writes: tuple[tuple[int, int], ...]


class _Kernel(NamedTuple):
    """Identifies a fused kernel: all fusible operators of a phase with the same number of matrix products
    before them."""

    graph: Graph
    phase: int
    level: int
    separate: int
    """The row of a separate reduction; else -1."""


def fuse(ops: Records, calls: Sequence[Call], sizes: Sizes, micro_batch: int, slice_tokens: int) -> Records:
    """Return the operations with each fused kernel in the position of its first operator; the others keep no
    work and no launch."""
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
        self.fused = [
            (call, kernel) for call, kernel in zip(calls, self.kernels, strict=True) if kernel is not None
        ]
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
        return (
            not self.writers[block]
            or None in kernels
            or len({kernel.graph for kernel in kernels if kernel is not None}) > 1
        )

    def _users(self) -> dict[int, set[_Kernel]]:
        """Return the kernels that read a block, or a block that is computed from it and need not be
        stored."""
        users: dict[int, set[_Kernel]] = defaultdict(set)
        for call, kernel in reversed(self.fused):
            after = set[_Kernel]().union(
                *(users[block] for block, _ in call.writes if block not in self.stored)
            )
            for block, _ in call.reads:
                users[block] |= after | {kernel}
        return users

    def _choose_stored(self) -> dict[int, Sizes]:
        """Add the intermediate blocks that are cheaper to store than to compute again; return what each block
        is computed from."""
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
    """By block: the number of matrix products and separate reductions on the longest path to it, in its
    graph."""
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
