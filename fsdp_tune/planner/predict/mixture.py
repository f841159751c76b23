"""The experts of a traced mixture, and how `ep` neighbouring ranks divide the experts of each layer. Pure.

A trace is of FSDP alone: every rank gathers all experts of a layer. `Shapes.ep_size` is the number of ranks
that divide them, for which the step is predicted (`predict.divided_memory`, `predict.divided_step`): a rank
keeps 1 / ep of the experts, sharded inside of each expert over the `shards / ep` ranks with the same ones.
FSDP2 gathers a tensor that is sharded inside into a temporary of the same size first
(`foreach_all_gather_copy_out`), and sorts its gradient into a copy (`foreach_reduce`), unless one rank holds
all of it. The fullest rank has `imbalance` times the mean rows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.expert_names import are_stacked_experts, dim_inside, is_in_experts
from fsdp_tune.core.families import CHOSEN_EXPERTS, expert_count
from fsdp_tune.core.tensors.peft_names import unwrapped
from fsdp_tune.planner.trace_format import DTYPES, KINDS, PHASES, Records, Trace

GROUPED_PRODUCT = "grouped_mm"
"""In the name of an operation that multiplies rows with the experts that they chose."""
LOAD_DEVIATION = 0.35
"""Assumed standard deviation of the rows of an expert, relative to their mean. Gini coefficients of five
trained models on text are 0.11 to 0.24 and more (arXiv:2605.20982), which is 0.19 to 0.43 for normally
distributed loads (√π × Gini)."""
LOADS_ASSUMED = (
    f"with expert parallelism, the rows of an expert deviate by {LOAD_DEVIATION:.0%} from their mean, "
    "and nothing overlaps with all-to-all"
)
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 1}
COPY_OUT, _COPY_IN, _REDUCE_IN = "split_with_sizes_copy", "all_gather_copy_in", "chunk_cat"
"""FSDP2's copies of a complete unit: out of the buffer of a gather, into it, and into the buffer of a
reduction."""
_ALIKE = 0.02
"""Largest relative difference of two sizes that count as equal: shards are padded."""


@dataclass(frozen=True, slots=True)
class TracedExperts:
    """The experts of a trace at full depth."""

    experts: int
    rows: int
    """Rows that a rank sends to experts in a forward: its tokens, once for each chosen expert."""
    shares: dict[int, float]
    """Elements of a unit → the share that experts are."""
    stacks: frozenset[int]
    """Elements of the parameters that stack experts."""
    gathered_bytes: dict[int, int]
    """Of all experts of each layer that has some, in the dtype of a gather."""

    @property
    def layers(self) -> list[int]:
        return list(self.gathered_bytes)

    def share(self, elements: float) -> float:
        """Return the share of experts in a buffer of so many elements: that of a unit of this size, 1 for a
        stack of experts, else 0."""
        unit = next(
            (share for size, share in self.shares.items() if abs(elements - size) <= _ALIKE * size), None
        )
        return (
            unit
            if unit is not None
            else float(any(abs(elements - size) <= _ALIKE * size for size in self.stacks))
        )


def with_ep_size(trace: Trace, ep: int) -> Trace:
    """Return the trace of the same step with the experts divided among `ep` ranks."""
    return replace(trace, shapes=replace(trace.shapes, ep_size=ep))


def divided_mixture(trace: Trace) -> TracedExperts | None:
    """Return the experts of a trace at full depth that `ep_size` ranks divide; None if each rank has all of
    them.

    Raises: usage error (exit 2) for a model of which that cannot be predicted.
    """
    ep = trace.shapes.ep_size
    if ep == 1:
        return None
    mixture = mixture_of(trace)
    is_adapted = has_adapted_experts(trace)
    if not is_adapted and mixture is not None and ep in divisions(trace, mixture, [ep]):
        return mixture
    if is_adapted:
        reason = "its stacks of experts have adapters (`lora.target_parameters`)"
    elif mixture is None:
        reason = "its configuration has no number of chosen experts, or its step has no grouped product"
    else:
        others = trace.shapes.shards // ep
        reason = (
            f"{ep} ranks do not divide {mixture.experts} experts and {trace.shapes.shards} shards, or "
            f"{others} not a width of each expert"
        )
    message = f"`fsdp.ep_size: {ep}` is not predicted for this model: {reason}"
    raise usage_error(
        "trace-failed",
        message,
        hint="`--set fsdp.ep_size=1` predicts the recipe in which each rank gathers all experts",
    )


def divisions(trace: Trace, mixture: TracedExperts, sizes: list[int]) -> list[int]:
    """Return those of `sizes` ranks that can divide the experts: the ranks with the same experts must shard
    each of them evenly."""
    shards = trace.shapes.shards

    def is_even(ranks: int) -> bool:
        return all(dim_inside(shape, ranks) is not None for shape in trace.facts.expert_shapes)

    return [
        ep
        for ep in sizes
        if shards % ep == 0 and mixture.experts % ep == 0 and (ep == 1 or is_even(shards // ep))
    ]


def imbalance(ep: int, experts: int) -> float:
    """Return the rows of the fullest of `ep` ranks with `experts` / `ep` experts each, relative to the
    mean."""
    return 1 + LOAD_DEVIATION * math.sqrt(ep / experts) * _largest_of(ep)


@functools.cache
def _largest_of(draws: int) -> float:
    """Return the expected largest of so many draws of a standard normal distribution, ∫ (1 − Fⁿ) above zero −
    ∫ Fⁿ below."""
    points = np.linspace(-8, 8, 3201)
    below = np.array([NormalDist().cdf(point) for point in points.tolist()]) ** draws
    return float(np.trapezoid(np.where(points > 0, 1 - below, -below), points)) if draws > 1 else 0.0


def is_grouped(trace: Trace, ops: Records) -> npt.NDArray[np.bool_]:
    """Select the products of rows with their experts."""
    return np.array([GROUPED_PRODUCT in name for name in trace.op_names] or [False])[ops["name"]]


def may_be_divided(trace: Trace) -> bool:
    """Return whether the model has experts and several ranks share a copy. The trace need not be at full
    depth."""
    return expert_count(trace.facts.config) > 1 and trace.shapes.shards > 1


def has_adapted_experts(trace: Trace) -> bool:
    """Return whether stacks of experts have adapters, each with a changed copy of its stack in a layer."""
    return any(unwrapped(name) != name and are_stacked_experts(unwrapped(name)) for name in trace.modules)


def mixture_of(trace: Trace) -> TracedExperts | None:
    """Return the experts of a trace at full depth; None for a dense model, without shards, or if no grouped
    product was traced."""
    experts, chosen = expert_count(trace.facts.config), CHOSEN_EXPERTS.of(trace.facts.config)
    if chosen is None or not may_be_divided(trace):
        return None
    ops = trace.steady(trace.ops)
    layers = frozenset(ops["layer"][is_grouped(trace, ops)].tolist()) - {-1}
    if not layers:
        return None
    held = trace.events[(trace.events["phase"] == PHASES.index("load")) & (trace.events["bytes"] > 0)]
    in_experts = np.array([is_in_experts(name) for name in trace.modules], bool)
    shares: dict[int, float] = {}
    stacks: set[int] = set()
    gathered = dict.fromkeys(sorted(layers), 0)
    for unit in trace.units:
        own = held[(held["layer"] == unit.layer) & (held["kind"] == KINDS.index("parameters"))]
        total, of_experts = int(own["bytes"].sum()), own["bytes"][in_experts[own["module"]]]
        if unit.layer in layers and total:
            share = shares[unit.parameters] = float(of_experts.sum()) / total
            stacks |= {round(size / total * unit.parameters) for size in of_experts.tolist()}
            gathered[unit.layer] += round(share * unit.gathered_bytes)
    tokens = trace.shapes.micro_batch * trace.shapes.tokens // trace.shapes.topology.row_parts
    return TracedExperts(experts, tokens * chosen, shares, frozenset(stacks), gathered)


def copies_of_units(trace: Trace, mixture: TracedExperts, ops: Records) -> npt.NDArray[np.bool_]:
    """Select FSDP2's copies of units with experts."""
    return is_named(trace, ops, COPY_OUT, _COPY_IN, _REDUCE_IN) & np.isin(ops["layer"], mixture.layers)


def second_copies(trace: Trace, mixture: TracedExperts, ops: Records) -> npt.NDArray[np.int64]:
    """Return the bytes of experts that FSDP2 copies once more with each operation, at gathers and reductions
    of units with experts, since divided experts are sharded inside. 0 where they were traced so, or where one
    rank holds all of an expert."""
    shapes = trace.shapes
    sizes = np.zeros(len(ops), np.int64)
    if trace.facts.experts_inside or shapes.ep_size in (1, shapes.shards):
        return sizes
    of_units = is_named(trace, ops, COPY_OUT, _REDUCE_IN)
    for (
        layer,
        gathered,
    ) in mixture.gathered_bytes.items():  # an operation that moves less is of another unit of the layer
        sizes[of_units & (ops["layer"] == layer) & (ops["moved_bytes"] >= 2 * gathered)] = (
            gathered // shapes.ep_size
        )
    return sizes


def traced_second_copies(trace: Trace, mixture: TracedExperts, ops: Records) -> npt.NDArray[np.bool_]:
    """Select these copies in a trace of experts that are sharded inside."""
    if not trace.facts.experts_inside:
        return np.zeros(len(ops), bool)
    items = np.array([ITEM_BYTES.get(dtype, 2) for dtype in DTYPES])[ops["dtype"]]
    is_stack = [mixture.share(size) == 1 for size in (ops["moved_bytes"] / 2 / items).tolist()]
    return is_named(trace, ops, "cat") & np.array(is_stack, bool)


def is_named(trace: Trace, ops: Records, *names: str) -> npt.NDArray[np.bool_]:
    """Select the operations with one of these names."""
    return np.array([name in names for name in trace.op_names] or [False])[ops["name"]]
