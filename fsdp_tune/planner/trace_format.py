"""The format of a traced step: allocations, operations, collectives and waits of one rank, in the order of issue by the CPU.

The trace is the interface between the part that runs the real model (`fsdp_tune.planner.trace`, imports torch) and the planner
(pure): memory is a replay of `events`, time a simulation of `ops`, `collectives` and `waits`. Tables are numpy record arrays; every
record has `at`, its position in a common order of all tables, and columns that index the tuples of names of `Trace`.

A trace may have fewer layers than the model (`traced_layers` < `layers`): `fsdp_tune.planner.predict.depth.full_depth` repeats the
middle ones, so that all later code gets a trace of the full model and does not extrapolate.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

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
    ("layer", "i2"),  # current decoder layer, or that of the tensor in clip, optimizer and zero_grad; -1 for none
    ("module", "i4"),  # index into Trace.modules: the innermost current module
    ("stream", "i1"),  # index into Trace.streams; 0 is the compute stream
]
PHASES = ("load", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "evaluation")
EVALUATION = PHASES.index("evaluation")
"""The phase after the last step: one batch, with its own step number."""

EVENT = np.dtype([*_WHERE, ("block", "i4"), ("bytes", "i8"), ("kind", "i1"), ("host", "?")])
"""`block` is allocated (`bytes` > 0) or freed (`bytes` < 0, the same size). `kind` indexes KINDS. `host`: in (pinned) host memory,
not on the device. `stream` of an allocation is that of its memory pool."""

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
"""One call of the dispatcher that starts work on the device (without views and metadata). `name` indexes Trace.op_names
(`mm`, `_foreach_mul_`, `copy_to_host` …), `dtype` indexes DTYPES: that of the multiplication for flops, else of the output.
`flops` counts a multiply-add as two, and zero for elementwise work. `moved_bytes` are the bytes read and written; `batch_bytes` and
`slice_bytes` are those in tensors whose size is a multiple of the micro-batch or of the tokens of a loss slice; `in_slice` marks the
work of every slice (`blend.at_micro_batch`). `kernels` is the number of launches: more than one for foreach operations, 0 inside a
fused kernel, whose bytes are those of its first operation (`planner.predict.fusion`)."""

DTYPES = ("fp32", "bf16", "fp16", "fp64", "int64", "int32", "bool", "uint8", "fp8")

COLLECTIVE = np.dtype([*_WHERE, ("kind", "i1"), ("group", "i1"), ("bytes", "i8"), ("unit", "i4"), ("dtype", "i1")])
"""`bytes` is the full buffer: the output of an all-gather, the input of a reduce-scatter, the tensor of an all-reduce, the input of an
all-to-all.
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
    """Parameters that one token uses (`core.gpus`); None if the model's configuration does not define them."""
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
    """Micro-batches of a real step; `traced_micro_batches` of them were traced (the first, perhaps one between, and the last)."""
    traced_micro_batches: int
    traced_steps: int
    topology: Topology
    is_sharded: bool = True

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
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            head: dict[str, Any] = json.loads(archive["head"].tobytes())
            tables = {name: archive[name] for name in _TABLES}
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
"""How the caching allocator gets memory: fixed segments, or pages mapped into growing ranges (`expandable_segments:True`)."""
