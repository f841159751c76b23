"""Traces for tests, in forked children, since a trace takes the default process group of its process."""

from __future__ import annotations

import functools
import multiprocessing
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fsdp_tune.planner.trace_format import KINDS, PHASES, Records, Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from tests import leaks


def trace_of(recipe: Recipe, *, exact: bool = False, change: Callable[[], None] = lambda: None) -> Trace:
    """`change` breaks something of the shared step, in a child of its own.

    One child makes all traces with the same change, as in a plan: torch's caches are warm, which halves the
    seconds of a trace.
    """
    connection, _ = _tracer(change)
    connection.send((recipe, exact))
    answer: Any = connection.recv()
    if isinstance(answer, str):
        raise AssertionError(answer)
    return Trace.from_bytes(answer)


@functools.cache
def _tracer(change: Callable[[], None]) -> tuple[Connection, BaseProcess]:
    """Fork a child that makes traces until the connection is closed."""
    import fsdp_tune.planner.trace.trace_recipe  # noqa: F401  before the fork: the import is the long part

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(change, ours, theirs), daemon=True)
    child.start()
    assert child.pid is not None
    leaks.is_shared(child.pid)
    theirs.close()
    return ours, child


def _serve(change: Callable[[], None], ours: Connection, theirs: Connection) -> None:
    import traceback
    import warnings

    from fsdp_tune.planner.trace.trace_recipe import trace_recipe

    ours.close()
    warnings.simplefilter("ignore")
    change()
    while True:
        try:
            recipe, exact = theirs.recv()
        except EOFError:
            return
        try:
            theirs.send(trace_recipe(recipe, exact=exact).to_bytes())
        except BaseException:  # noqa: BLE001  the test gets the traceback
            theirs.send(traceback.format_exc())


def alive(trace: Trace, *kinds: str, until: Records | None = None) -> Counter[int]:
    """Sizes in bytes of the allocations of these kinds that are alive after the events `until` (all, unless
    given)."""
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
