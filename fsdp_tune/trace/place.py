"""Where a traced run is, and what is allocated: what the recorder keeps of both."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from fsdp_tune.plan.trace_format import KINDS, PHASES

KIND = {name: index for index, name in enumerate(KINDS)}
PHASE = {name: index for index, name in enumerate(PHASES)}


@dataclass(slots=True)
class Place:
    """Where the run is."""

    step: int = -1
    micro: int = -1
    phase: int = 0
    layer: int = -1
    module: str = ""
    in_head: bool = False


@dataclass(slots=True)
class Allocation:
    block: int
    size: int
    layer: int
    stream: int
    host: bool
    kind: int
    held: weakref.ref[Any] | None = None
