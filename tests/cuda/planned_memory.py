"""The planner's trace of a recipe, as `fsdp-tune plan` makes it, and what its replay holds in a steady
step."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.memory import peak_memory, place
from fsdp_tune.planner.trace_format import KINDS
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.cuda.live_memory import smaller_slices
from tests.cuda.memory_step import MemoryChange, MemoryStep
from tests.planner.trace.tracing import trace_of

_SLICES = smaller_slices()
"""Entered in the child that traces, and never left: a context that nobody holds is left at once."""


@dataclass(frozen=True)
class PlannedMemory:
    """Without cuBLAS's workspace, which the emulated device does not have."""

    step: MemoryStep
    peak_allocated_bytes: int
    """The replay's, in the steady step."""


def planned_memory(recipe: Recipe) -> PlannedMemory:
    """Trace and replay a resolved recipe, whose evaluation is off: the last traced step is the steady one."""
    trace = full_depth(trace_of(recipe, change=_SLICES.__enter__))
    memory = peak_memory(trace)
    events = trace.events[~trace.events["host"]]
    changes = [
        MemoryChange(
            int(event["block"]),
            int(event["bytes"]),
            f"{place(trace, event)}, {KINDS[event['kind']]}" if event["bytes"] > 0 else "",
        )
        for event in events
    ]
    begin = int((events["step"] == trace.shapes.traced_steps - 1).argmax())
    most = int(memory.timeline.allocated_bytes.max())
    return PlannedMemory(MemoryStep(changes, begin), most)
