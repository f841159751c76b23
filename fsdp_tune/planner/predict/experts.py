"""Expert parallelism: what a traced step becomes if `ep` neighbouring ranks divide the experts of each layer among them. Pure.

The trace is of FSDP alone: every rank gathers all experts of a layer. With `ep` ranks, a rank keeps 1 / ep of the experts, which are
sharded inside of each expert over the `shards / ep` ranks with the same ones, and sends each token to the ranks of its experts. E experts,
k of them chosen by a token, T tokens of a rank, H the hidden size:

- Gathers, reductions and their copies: the part of a unit that experts are has 1 / ep of its bytes, among `shards / ep` ranks.
- Grouped products: as many FLOPs, 1 / ep of the bytes of weights, and T k ep / E rows for each expert, which fill more of a tile
  (`timing.tile_share`).
- All-to-all of T k H elements, of which (ep − 1) / ep leave the rank: two in the forward, two in the backward, and one in the
  recomputation of a layer, which ends before the results are needed again (`early_stop` of torch.utils.checkpoint). The rows are sorted
  once more at both ends. Before tokens are sent, the ranks exchange their numbers, and the host waits for these.
- The rank whose experts get most rows has `imbalance` times as many as the mean, and the others wait for it.

Parameters, gradients and optimizer state take as much memory as before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.families import CHOSEN_EXPERTS, expert_count, is_in_experts
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.topology import Group, Topology
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.collectives import Volume, collective_seconds, sent_bytes
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.memory import Fits, fit
from fsdp_tune.planner.predict.timing import (
    GROUPED,
    Efficiency,
    Exchanges,
    Seconds,
    StepWork,
    UnknownFigure,
    op_kinds,
    op_seconds,
    rows_of_expert,
    simulate,
    step_work,
)
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, GROUPS, KINDS, PHASES, Records, Trace

SIZES = (1, 2, 4, 8)
"""Numbers of ranks that are planned."""
LOAD_DEVIATION = 0.35
"""Assumed standard deviation of the rows of an expert, relative to their mean. Gini coefficients of five trained models on text are 0.11 to
0.24 and more (arXiv:2605.20982), which is 0.19 to 0.43 for normally distributed loads (√π × Gini)."""
PUBLISHED_FACTOR = {2: 1.2, 4: 1.9, 8: 1.9}
"""Largest factor by which published gains of 2 and 8 ranks differ from the predicted ones (docs/evidence/experts.md); none of 4 is
published."""
LOADS_ASSUMED = (
    f"with expert parallelism, the rows of an expert deviate by {LOAD_DEVIATION:.0%} from their mean, and nothing overlaps with all-to-all"
)
_MOST_OF = {1: 0.0, 2: 0.564, 4: 1.029, 8: 1.423}
"""Expected largest of so many draws of a standard normal distribution."""
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "fp8": 1}
_GATHERED = ("gathered units", "all-gather buffers", "reduce buffers", "unsharded gradients")
_COPIES = ("split_with_sizes_copy", "all_gather_copy_in", "chunk_cat")
"""FSDP2's copies of a complete unit."""
_ALIKE = 0.02
"""Largest relative difference of two sizes that count as equal: shards are padded."""


@dataclass(frozen=True, slots=True)
class ExpertRow(JsonAnswer):
    """The step if `ep_size` ranks divide the experts of a layer. Seconds are of one step, hidden ones included."""

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


@dataclass(frozen=True, slots=True)
class _Mixture:
    """The experts of a trace at full depth."""

    experts: int
    rows: int
    """Rows that a rank sends to experts in a forward: its tokens, once for each chosen expert."""
    shares: dict[int, float]
    """Elements of a unit → the share that experts are."""
    stacks: frozenset[int]
    """Elements of the parameters that stack experts."""
    layers: frozenset[int]


def expert_rows(
    trace: Trace, hardware: Hardware, machines: int, efficiency: Efficiency, *, with_sizes: tuple[int, ...] = SIZES
) -> tuple[ExpertRow, ...]:
    """Return the step for each of `with_sizes` ranks that can divide the experts, from one; () for a model without experts, for one rank,
    or if the time is unknown."""
    trace = full_depth(trace)
    mixture = _mixture(trace)
    if mixture is None:
        return ()
    shards = trace.shapes.shards
    sizes = [ep for ep in with_sizes if shards % ep == 0 and mixture.experts % ep == 0]
    try:
        work = step_work(trace, hardware, machines, efficiency)
        return tuple(_row(work, mixture, ep, hardware, machines, efficiency) for ep in sizes) if len(sizes) > 1 else ()
    except UnknownFigure:
        return ()


def imbalance(ep: int, experts: int) -> float:
    """Return the rows of the fullest of `ep` ranks with `experts` / `ep` experts each, relative to the mean."""
    return 1 + LOAD_DEVIATION * math.sqrt(ep / experts) * _MOST_OF[ep]


def _row(work: StepWork, mixture: _Mixture, ep: int, hardware: Hardware, machines: int, efficiency: Efficiency) -> ExpertRow:
    trace, load = work.trace, imbalance(ep, mixture.experts)
    divided = _divided(work, mixture, ep, load, hardware, machines, efficiency)
    timed = simulate(divided, efficiency)
    found = fit(_with_less_gathered(trace, mixture, ep, load), hardware)
    shapes = trace.shapes
    tokens = shapes.micro_batch * shapes.accumulation * shapes.tokens / shapes.topology.row_size
    ops, table, exchanged = divided.ops, divided.collectives, divided.exchanges
    of_units = np.array([_share(mixture, elements) > 0 for elements in _elements(table)], bool)
    copies, products = _copies(trace, mixture, ops), op_kinds(trace, ops) == GROUPED
    gathers = _total(divided.collective_seconds[of_units], table["micro"][of_units], trace)
    return ExpertRow(
        ep_size=ep,
        fits=found.answer,
        peak_allocated_gib=found.memory.peak_allocated_bytes / GIB,
        device_gib=found.device_bytes / GIB,
        step_seconds=timed.step_seconds,
        tokens_per_second_per_device=tokens / timed.step_seconds,
        gather_seconds=gathers + _total(divided.op_seconds[copies], ops["micro"][copies], trace),
        exchange_seconds=0.0 if exchanged is None else _total(exchanged.seconds, exchanged.micro, trace),
        product_seconds=_total(divided.op_seconds[products], ops["micro"][products], trace),
        exposed_seconds=timed.exposed_seconds,
        rows_of_expert=rows_of_expert(trace) * ep,
        imbalance=load,
    )


def _total(seconds: Seconds, micro: npt.NDArray[np.int64], trace: Trace) -> float:
    """Return the sum over all micro-batches of a step, of which the trace has some."""
    shapes = trace.shapes
    like, times = min(1, shapes.traced_micro_batches - 1), shapes.accumulation - shapes.traced_micro_batches
    return float((seconds * (1 + np.where(micro == like, times, 0))).sum())


# ---- The experts of a trace


def _mixture(trace: Trace) -> _Mixture | None:
    """Return the experts; None for a dense model, without shards, or if no grouped product was traced."""
    experts, chosen = expert_count(trace.facts.config), CHOSEN_EXPERTS.of(trace.facts.config)
    ops = trace.steady(trace.ops)
    layers = frozenset(ops["layer"][op_kinds(trace, ops) == GROUPED].tolist()) - {-1}
    if experts == 1 or chosen is None or trace.shapes.shards == 1 or not layers:
        return None
    held = trace.events[(trace.events["phase"] == PHASES.index("load")) & (trace.events["bytes"] > 0)]
    in_experts = np.array([is_in_experts(name) for name in trace.modules], bool)
    shares: dict[int, float] = {}
    stacks: set[int] = set()
    for unit in trace.units:
        own = held[(held["layer"] == unit.layer) & (held["kind"] == KINDS.index("parameters"))]
        total, of_experts = int(own["bytes"].sum()), own["bytes"][in_experts[own["module"]]]
        if unit.layer in layers and total:
            shares[unit.parameters] = float(of_experts.sum()) / total
            stacks |= {round(size / total * unit.parameters) for size in of_experts.tolist()}
    tokens = trace.shapes.micro_batch * trace.shapes.tokens // trace.shapes.topology.row_parts
    return _Mixture(experts, tokens * chosen, shares, frozenset(stacks), layers)


def _share(mixture: _Mixture, elements: float) -> float:
    """Return the share of experts in a buffer of so many elements: that of a unit of this size, 1 for a stack of experts, else 0."""
    unit = next((share for size, share in mixture.shares.items() if abs(elements - size) <= _ALIKE * size), None)
    return unit if unit is not None else float(any(abs(elements - size) <= _ALIKE * size for size in mixture.stacks))


def _elements(collectives: Records) -> list[float]:
    sizes = np.array([_ITEM_BYTES.get(dtype, 0) or math.inf for dtype in DTYPES])[collectives["dtype"]]
    return (collectives["bytes"] / sizes).tolist()


def _copies(trace: Trace, mixture: _Mixture, ops: Records) -> npt.NDArray[np.bool_]:
    names = np.array([name in _COPIES for name in trace.op_names] or [False])[ops["name"]]
    return names & np.isin(ops["layer"], list(mixture.layers))


# ---- The same step with divided experts


def _divided(
    work: StepWork, mixture: _Mixture, ep: int, load: float, hardware: Hardware, machines: int, efficiency: Efficiency
) -> StepWork:
    if ep == 1:
        return work
    topology = replace(work.trace.shapes.topology, machines=machines)
    seconds, sent = _collectives(work, mixture, ep, topology, hardware)
    ops, exchanges = _ops(work, mixture, ep, load), _exchanges(work, mixture, ep, load, topology, hardware, efficiency)
    times = op_seconds(work.trace, ops, hardware, efficiency, topology.local_world_size, rows_of_expert(work.trace) * ep)
    return replace(work, ops=ops, op_seconds=times, collective_seconds=seconds, sent=sent, exchanges=exchanges)


def _collectives(work: StepWork, mixture: _Mixture, ep: int, topology: Topology, hardware: Hardware) -> tuple[Seconds, list[Volume]]:
    """Return times and sent bytes of the collectives: experts are gathered and reduced apart from the rest of a unit."""
    seconds, sent, table = work.collective_seconds.copy(), list(work.sent), work.collectives
    for index, elements in enumerate(_elements(table)):
        share = _share(mixture, elements)
        group = topology.group(GROUPS[int(table["group"][index])])
        if share == 0 or group.ranks % ep:
            continue
        kind, size = COLLECTIVES[int(table["kind"][index])], int(table["bytes"][index])
        parts = [(round(size * (1 - share)), group), (round(size * share / ep), Group(group.ranks // ep, group.machines))]
        volumes = [sent_bytes(kind, part, among) for part, among in parts]
        seconds[index] = sum(_known(collective_seconds(kind, part, among, hardware), hardware) for part, among in parts if part)
        sent[index] = Volume(sum(each.machine_link_bytes for each in volumes), sum(each.network_bytes for each in volumes))
    return seconds, sent


def _known(seconds: float | None, hardware: Hardware) -> float:
    if seconds is None:
        raise UnknownFigure(f"the link speed of {hardware.name} is unknown")
    return seconds


def _ops(work: StepWork, mixture: _Mixture, ep: int, load: float) -> Records:
    """Return the operations of the fullest rank, with 1 / ep of the experts' weights and of the copies of units."""
    trace, ops = work.trace, work.ops.copy()
    products, copies = op_kinds(trace, ops) == GROUPED, _copies(trace, mixture, ops)
    items = np.array([_ITEM_BYTES.get(dtype, 4) for dtype in DTYPES])[ops["dtype"]]
    # A product of `rows` rows has 2 × rows × inner × columns FLOPs, and a matrix of inner × columns for each expert.
    weights = np.minimum(ops["flops"] / (2 * mixture.rows) * mixture.experts * items, ops["moved_bytes"])
    others = ops["moved_bytes"] - weights
    share = max(mixture.shares.values(), default=0.0)
    of_unit = ops["moved_bytes"] * (1 - share * (1 - 1 / ep))
    between = _between_products(work, products)
    moved = np.select([products, copies, between], [weights / ep + others * load, of_unit, ops["moved_bytes"] * load], ops["moved_bytes"])
    ops["moved_bytes"] = np.rint(moved)
    ops["flops"] = np.where(products, ops["flops"] * load, ops["flops"])
    return ops


def _passes(work: StepWork, products: npt.NDArray[np.bool_]) -> list[tuple[npt.NDArray[np.int64], bool]]:
    """Return the rows of the products of each pass through the experts of a layer, and whether it is the gradients'.

    A forward has some products; a backward has two for each of these, or one if experts are frozen, after those of a recomputation.
    """
    ops, found = work.ops, list[tuple[npt.NDArray[np.int64], bool]]()
    rows = np.flatnonzero(products)
    keys = np.stack([ops[name][rows].astype(np.int64) for name in ("micro", "layer", "phase")], axis=1)
    forward, backward = PHASES.index("forward"), PHASES.index("backward")
    for micro, layer in {(int(micro), int(layer)) for micro, layer, _ in keys}:
        own = (keys[:, 0] == micro) & (keys[:, 1] == layer)
        first, second = rows[own & (keys[:, 2] == forward)], rows[own & (keys[:, 2] == backward)]
        if len(first):
            found.append((first, False))
        again = len(first) if len(second) > 2 * len(first) else 0
        if again:
            found.append((second[:again], False))
        if len(second) > again:
            found.append((second[again:], True))
    return found


def _between_products(work: StepWork, products: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Select the operations on the rows of experts: those between the first and the last product of a pass."""
    found = np.zeros(len(work.ops), bool)
    for rows, _ in _passes(work, products):
        found[rows[0] : rows[-1]] = work.ops["stream"][rows[0] : rows[-1]] == 0
    return found & ~products


def _exchanges(
    work: StepWork, mixture: _Mixture, ep: int, load: float, topology: Topology, hardware: Hardware, efficiency: Efficiency
) -> Exchanges:
    trace, ops = work.trace, work.ops
    products = op_kinds(trace, ops) == GROUPED
    group = Group(ep, max(1, ep // topology.local_world_size))
    item = _ITEM_BYTES.get(DTYPES[int(ops["dtype"][products][0])], 2)
    size = mixture.rows * trace.counts.hidden_size * item
    tokens = _known(collective_seconds("all_to_all", size * load, group, hardware), hardware)
    numbers = _known(collective_seconds("all_to_all", 8 * mixture.experts, group, hardware), hardware)
    # Rows are read and written once more, by the order of the experts where they arrive.
    sorting = 2 * size * load / (hardware.bandwidth_bytes_per_second * efficiency.bandwidth) + efficiency.kernel_seconds
    where: list[tuple[int, float, bool]] = []
    for rows, is_gradient in _passes(work, products):
        forward = not is_gradient
        where.append((int(rows[0]) - 1, tokens + sorting + (numbers if forward else 0.0), forward))
        recomputed = forward and ops["phase"][rows[0]] == PHASES.index("backward")
        if not recomputed:
            where.append((int(rows[-1]), tokens + sorting, False))
    where.sort()
    at = np.array([row for row, _, _ in where], np.int64)
    return Exchanges(
        at=ops["at"][at].astype(np.int64),
        phase=ops["phase"][at].astype(np.int64),
        micro=ops["micro"][at].astype(np.int64),
        seconds=np.array([seconds for _, seconds, _ in where]),
        sent=sent_bytes("all_to_all", size, group),
        needs_host=np.array([needs for _, _, needs in where], bool),
    )


def _with_less_gathered(trace: Trace, mixture: _Mixture, ep: int, load: float) -> Trace:
    """Return the trace with 1 / ep of the experts in gathered units and their buffers, and the rows of the fullest rank."""
    if ep == 1:
        return trace
    events = trace.events.copy()
    gathered = np.isin(events["kind"], [KINDS.index(kind) for kind in _GATHERED])
    rows = (events["kind"] == KINDS.index("activations")) & np.isin(events["layer"], list(mixture.layers))
    factors: dict[int, float] = {}
    for size in np.unique(np.abs(events["bytes"][gathered])).tolist():
        share = max(_share(mixture, size / item) for item in (1, 2, 4))
        factors[size] = 1 - share * (1 - 1 / ep)
    sizes = np.abs(events["bytes"])
    scale = np.ones(len(events))
    scale[gathered] = [factors[size] for size in sizes[gathered].tolist()]
    # Tensors with a row for each token and chosen expert, which are more than those with a row for each token.
    wide = rows & (sizes % mixture.rows == 0) & (sizes > mixture.rows * 64)
    scale[wide] = load
    events["bytes"] = np.sign(events["bytes"]) * np.maximum(1, np.rint(sizes * scale)).astype(np.int64)
    return replace(trace, events=events)


def why_experts(rows: tuple[ExpertRow, ...]) -> str | None:
    """Explain in a sentence with figures which number of ranks is fastest; None without rows."""
    if not rows:
        return None
    alone = rows[0]
    fitting = [row for row in rows if row.fits != "no"] or list(rows)
    best = min(fitting, key=lambda row: row.step_seconds)
    other = min(rows[1:], key=lambda row: row.step_seconds)
    shown = best if best.ep_size > 1 else other
    gain = alone.step_seconds / shown.step_seconds - 1
    faster = f"{abs(gain):.0%} {'faster' if gain > 0 else 'slower'} than without expert parallelism"
    factor = PUBLISHED_FACTOR[shown.ep_size]
    faster += f", within the error of such gains (a factor of {factor})" if 1 / factor < 1 + gain < factor else ""
    gathers = f"gathers of experts and their copies take {shown.gather_seconds:.3g} s instead of {alone.gather_seconds:.3g} s"
    products = f"grouped products {shown.product_seconds:.3g} s instead of {alone.product_seconds:.3g} s"
    costs = f"all-to-all adds {shown.exchange_seconds:.3g} s, and the fullest rank has {shown.imbalance:.2f} times the mean rows"
    verdict = f"{shown.ep_size} ranks that divide the experts are {faster}"
    return f"{verdict}: {gathers}, {products}; {costs}"
