"""Traces for tests: each in a forked child, since a trace takes the default process group of its process."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable
from typing import Any

from fsdp_tune.planner.trace_format import KINDS, PHASES, Records, Trace
from fsdp_tune.recipe.schema.recipe import Recipe


def trace_of(recipe: Recipe, *, exact: bool = False, change: Callable[[], None] | None = None) -> Trace:
    """`change` is called in the child first: what it breaks of the shared step stays there."""
    import fsdp_tune.planner.trace.trace_recipe  # noqa: F401  before the fork: the import is the long part

    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_trace, args=(recipe, exact, change, writer))
    child.start()
    writer.close()
    try:
        answer: Any = reader.recv()
    finally:
        child.join()
    if isinstance(answer, str):
        raise AssertionError(answer)
    return Trace.from_bytes(answer)


def _trace(recipe: Recipe, exact: bool, change: Callable[[], None] | None, writer: Any) -> None:
    import traceback
    import warnings

    from fsdp_tune.planner.trace.trace_recipe import trace_recipe

    warnings.simplefilter("ignore")
    try:
        if change is not None:
            change()
        writer.send(trace_recipe(recipe, exact=exact).to_bytes())
    except BaseException:  # noqa: BLE001  the test gets the traceback
        writer.send(traceback.format_exc())


def alive(trace: Trace, *kinds: str, until: Records | None = None) -> Counter[int]:
    """Sizes in bytes of the allocations of these kinds that are alive after the events `until` (all, unless given)."""
    events = trace.events if until is None else until
    sizes: dict[int, int] = {}
    for event in events:
        if event["bytes"] > 0:
            sizes[int(event["block"])] = int(event["bytes"]) if KINDS[event["kind"]] in kinds else 0
        else:
            sizes.pop(int(event["block"]))
    return Counter(size for size in sizes.values() if size)


def before(trace: Trace, phase: str, step: int = 0) -> Records:
    """The events up to where `phase` of `step` begins."""
    inside = (trace.events["phase"] == PHASES.index(phase)) & (trace.events["step"] == step)
    return trace.events[: int(inside.argmax())]
