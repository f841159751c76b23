"""The table of a mixture of experts: the same step if 1, 2, 4, 8 or the recipe's `fsdp.ep_size` ranks divide
the experts of a layer. Pure.

Memory is that of `predict.divided_memory`, time that of `predict.divided_step`: the row of the recipe has the
figures of its plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.divided_step import elements, step_work
from fsdp_tune.planner.predict.efficiency import Efficiency
from fsdp_tune.planner.predict.memory import Fits, fit
from fsdp_tune.planner.predict.mixture import (
    TracedExperts,
    copies_of_units,
    divisions,
    has_adapted_experts,
    imbalance,
    is_grouped,
    may_be_divided,
    mixture_of,
    traced_second_copies,
    with_ep_size,
)
from fsdp_tune.planner.predict.roofline import Seconds, rows_of_expert
from fsdp_tune.planner.predict.timing import simulate
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.rules.experts import expert_parallel_limits
from fsdp_tune.recipe.schema.recipe import Recipe

SIZES = (1, 2, 4, 8)
"""Numbers of ranks that are planned, in addition to the recipe's."""


def published_factor(ep: int) -> float:
    """Return the largest factor by which published gains of `ep` ranks differ from the predicted ones, of 8
    ranks for all but 2 (docs/evidence/experts.md)."""
    return 1.2 if ep == 2 else 1.9


@dataclass(frozen=True, slots=True)
class ExpertRow(JsonAnswer):
    """The step if `ep_size` ranks divide the experts of a layer. Seconds are of one step, hidden ones
    included."""

    ep_size: int
    fits: Fits
    peak_allocated_gib: float
    device_gib: float
    step_seconds: float
    tokens_per_second_per_device: float
    gather_seconds: float
    """Gathers, reductions and copies of units with experts."""
    exchange_seconds: float
    """All-to-all, of tokens and of their numbers."""
    product_seconds: float
    """Grouped products."""
    exposed_seconds: float
    """Communication that nothing hides."""
    rows_of_expert: float
    """Tokens that an expert gets in a forward, on average."""
    imbalance: float
    """Rows of the fullest rank, relative to the mean."""
    is_yours: bool
    """Whether it is the recipe's `fsdp.ep_size`."""


def expert_rows(
    trace: Trace, hardware: Hardware, machines: int, efficiency: Efficiency
) -> tuple[ExpertRow, ...]:
    """Return the step for each number of ranks that can divide the experts, from one; () for a model without
    experts or with adapters of them, and for one rank.

    Raises: UnknownFigure for a missing figure of the GPU.
    """
    if not may_be_divided(trace) or has_adapted_experts(trace):
        return ()
    trace = full_depth(trace)
    mixture = mixture_of(trace)
    if mixture is None:
        return ()
    sizes = divisions(trace, mixture, sorted({*SIZES, trace.shapes.ep_size}))
    rows = (
        _row(
            with_ep_size(trace, ep),
            mixture,
            hardware,
            machines,
            efficiency,
            is_yours=ep == trace.shapes.ep_size,
        )
        for ep in sizes
    )
    return tuple(rows) if len(sizes) > 1 else ()


def _row(
    trace: Trace,
    mixture: TracedExperts,
    hardware: Hardware,
    machines: int,
    efficiency: Efficiency,
    *,
    is_yours: bool,
) -> ExpertRow:
    work, ep, shapes = step_work(trace, hardware, machines, efficiency), trace.shapes.ep_size, trace.shapes
    timed, found = (
        simulate(work, efficiency),
        fit(trace, hardware, reserved_factor=efficiency.reserved_factor),
    )
    tokens = shapes.micro_batch * shapes.accumulation * shapes.tokens / shapes.topology.row_size
    ops, table, exchanged = work.ops, work.collectives, work.exchanges
    of_units = np.array([mixture.share(count) > 0 for count in elements(table)], bool)
    traced = trace.steady(trace.ops)
    traced = traced[traced["kernels"] > 0]  # the operations of `work`, with all bytes
    copies = copies_of_units(trace, mixture, ops) | traced_second_copies(trace, mixture, traced)
    products = is_grouped(trace, ops)
    gathers = _total(work.collective_seconds[of_units], table["micro"][of_units], trace)
    return ExpertRow(
        ep_size=ep,
        fits=found.answer,
        peak_allocated_gib=found.memory.peak_allocated_bytes / GIB,
        device_gib=found.device_bytes / GIB,
        step_seconds=timed.step_seconds,
        tokens_per_second_per_device=tokens / timed.step_seconds,
        gather_seconds=gathers + _total(work.op_seconds[copies], ops["micro"][copies], trace),
        exchange_seconds=0.0 if exchanged is None else _total(exchanged.seconds, exchanged.micro, trace),
        product_seconds=_total(work.op_seconds[products], ops["micro"][products], trace),
        exposed_seconds=timed.exposed_seconds,
        rows_of_expert=rows_of_expert(trace),
        imbalance=imbalance(ep, mixture.experts),
        is_yours=is_yours,
    )


def _total(seconds: Seconds, micro: npt.NDArray[np.int64], trace: Trace) -> float:
    """Return the sum over all micro-batches of a step, of which the trace has some."""
    shapes = trace.shapes
    like, times = min(1, shapes.traced_micro_batches - 1), shapes.accumulation - shapes.traced_micro_batches
    return float((seconds * (1 + np.where(micro == like, times, 0))).sum())


def why_experts(rows: tuple[ExpertRow, ...], recipe: Recipe) -> str | None:
    """Explain in a sentence with figures which number of ranks is fastest, and what the recipe would need for
    it; None without rows."""
    if not rows:
        return None
    alone = rows[0]
    fitting = [row for row in rows if row.fits != "no"] or list(rows)
    best = min(fitting, key=lambda row: row.step_seconds)
    other = min(rows[1:], key=lambda row: row.step_seconds)
    shown = best if best.ep_size > 1 else other
    gain = alone.step_seconds / shown.step_seconds - 1
    faster = f"{abs(gain):.0%} {'faster' if gain > 0 else 'slower'} than without expert parallelism"
    factor = published_factor(shown.ep_size)
    faster += (
        f", within the error of such gains (a factor of {factor:g})" if 1 / factor < 1 + gain < factor else ""
    )
    gathers = (
        f"gathers of experts and their copies take {shown.gather_seconds:.3g} s instead of "
        f"{alone.gather_seconds:.3g} s"
    )
    products = f"grouped products {shown.product_seconds:.3g} s instead of {alone.product_seconds:.3g} s"
    costs = (
        f"all-to-all adds {shown.exchange_seconds:.3g} s, and the fullest rank has {shown.imbalance:.2f} "
        "times the mean rows"
    )
    verdict = f"{shown.ep_size} ranks that divide the experts are {faster}"
    return f"{verdict}: {gathers}, {products}; {costs}; {_how_to_set(recipe, shown.ep_size)}"


def _how_to_set(recipe: Recipe, ep: int) -> str:
    """Return the key, or what in the recipe excludes it."""
    fsdp = recipe.fsdp.model_copy(update={"ep_size": ep})
    against = next(expert_parallel_limits(recipe.model_copy(update={"fsdp": fsdp})), None)
    return (
        "`fsdp.ep_size` sets them"
        if against is None
        else f"not with this recipe: {against.message} ({against.hint})"
    )
