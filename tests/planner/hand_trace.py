"""Hand-written traces for tests of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdp_tune.core.topology import Topology
from fsdp_tune.planner.trace_format import (
    COLLECTIVE,
    COLLECTIVES,
    DTYPES,
    EVENT,
    GROUPS,
    KINDS,
    OP,
    PHASES,
    WAIT,
    Counts,
    Records,
    Shapes,
    Trace,
)

STREAMS = ("compute", "all-gather")


class Hand:
    """Puts records behind one another, as the host issues them."""

    def __init__(self, *, steps: int = 1) -> None:
        self.at = 0
        self.step = steps - 1
        self.names: list[str] = []
        self.rows: dict[str, list[dict[str, Any]]] = {"events": [], "ops": [], "collectives": [], "waits": []}

    def _where(self, phase: str, stream: int, micro: int) -> dict[str, Any]:
        self.at += 1
        return {
            "at": self.at,
            "step": self.step,
            "micro": micro,
            "phase": PHASES.index(phase),
            "layer": -1,
            "stream": stream,
        }

    def op(
        self,
        name: str,
        *,
        flops: float = 0,
        moved: int = 0,
        of_batch: int = 0,
        of_slice: int = 0,
        in_slice: bool = False,
        dtype: str = "bf16",
        phase: str = "forward",
        stream: int = 0,
        micro: int = 0,
    ) -> Hand:
        if name not in self.names:
            self.names.append(name)
        row = self._where(phase, stream, micro)
        row |= {
            "name": self.names.index(name),
            "dtype": DTYPES.index(dtype),
            "flops": flops,
            "moved_bytes": moved,
        }
        row |= {"batch_bytes": of_batch, "slice_bytes": of_slice, "in_slice": in_slice, "kernels": 1}
        self.rows["ops"].append(row)
        return self

    def collective(
        self,
        kind: str,
        size: int,
        *,
        group: str = "shard",
        stream: int = 1,
        phase: str = "forward",
        micro: int = 0,
    ) -> Hand:
        row = self._where(phase, stream, micro)
        row |= {"kind": COLLECTIVES.index(kind), "group": GROUPS.index(group), "bytes": size, "unit": 0}
        self.rows["collectives"].append(row)
        return self

    def wait(self, stream: int, source: int) -> Hand:
        row = self._where("forward", stream, 0)
        self.rows["waits"].append(row | {"source": source, "until": row["at"]})
        return self

    def hold(self, block: int, size: int, *, kind: str = "activations", host: bool = False) -> Hand:
        self.rows["events"].append(
            self._where("forward", 0, 0)
            | {"block": block, "bytes": size, "kind": KINDS.index(kind), "host": host}
        )
        return self

    def trace(self, **shapes: Any) -> Trace:
        return Trace(
            events=_table(EVENT, self.rows["events"]),
            ops=_table(OP, self.rows["ops"]),
            collectives=_table(COLLECTIVE, self.rows["collectives"]),
            waits=_table(WAIT, self.rows["waits"]),
            streams=STREAMS,
            modules=("",),
            op_names=tuple(self.names),
            units=(),
            counts=Counts(1000, 1000, 1000, 4000, 2, 64, 4, 16, 100, tied_embeddings=False),
            shapes=shapes_of(**shapes),
            traced_layers=2,
        )


def shapes_of(**given: Any) -> Shapes:
    values: dict[str, Any] = {
        "micro_batch": 1,
        "tokens": 128,
        "accumulation": 1,
        "traced_micro_batches": 1,
        "traced_steps": 1,
        "topology": Topology(shard=8),
    }
    return Shapes(**(values | given))


def _table(dtype: Any, rows: Sequence[dict[str, Any]]) -> Records:
    table = np.zeros(len(rows), dtype)
    for index, row in enumerate(rows):
        for name, value in row.items():
            table[index][name] = value
    return table
