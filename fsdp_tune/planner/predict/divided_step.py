"""The time of a traced step if `Shapes.ep_size` neighbouring ranks divide the experts of each layer among
them. Pure.

A rank sends each token to the ranks of its experts (`predict.mixture`). E experts, k of them chosen by a
token, T tokens of a rank, H the hidden size:

- Gathers, reductions and their copies: the part of a unit that experts are has 1 / ep of its bytes, among
  `shards / ep` ranks, and is copied once more.
- Grouped products: as many FLOPs, 1 / ep of the bytes of weights, and T k ep / E rows for each expert, which
  fill more of a tile (`roofline.tile_share`).
- All-to-all of T k H elements, of which (ep − 1) / ep leave the rank: two in the forward, two in the
  backward, and one in the recomputation of a layer, which ends before the results are needed again
  (`early_stop` of torch.utils.checkpoint). The rows are sorted once more at both ends. Before tokens are
  sent, the ranks exchange their numbers, and the host waits for these.
- The rank whose experts get most rows has `imbalance` times as many as the mean, and the others wait for it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.expert_names import are_stacked_experts
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.topology import Group, Topology
from fsdp_tune.planner.predict.collectives import Volume, collective_seconds, sent_bytes
from fsdp_tune.planner.predict.efficiency import Efficiency, UnknownFigure, efficiency_of
from fsdp_tune.planner.predict.mixture import (
    ITEM_BYTES,
    TracedExperts,
    copies_of_units,
    divided_mixture,
    imbalance,
    is_grouped,
    second_copies,
    traced_second_copies,
)
from fsdp_tune.planner.predict.roofline import Seconds, op_seconds
from fsdp_tune.planner.predict.timing import Exchanges, StepTime, StepWork, simulate, undivided_work
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, GROUPS, PHASES, Records, Trace

_Passes = list[tuple[npt.NDArray[np.int64], bool]]
"""Rows of the products of each pass through the experts of a layer, and whether it is the gradients'."""


def step_time(
    trace: Trace, hardware: Hardware, machines: int, efficiency: Efficiency | None = None
) -> StepTime:
    """Simulate the last traced step at the model's full depth. Raises: UnknownFigure for a missing figure of
    the GPU, and a usage error (exit 2) as `divided_mixture`."""
    efficiency = efficiency or efficiency_of(hardware)
    return simulate(step_work(trace, hardware, machines, efficiency), efficiency)


def step_work(trace: Trace, hardware: Hardware, machines: int, efficiency: Efficiency) -> StepWork:
    """Return the last traced step with its times, with divided experts. Raises: as `step_time`."""
    work = undivided_work(trace, hardware, machines, efficiency)
    mixture = divided_mixture(work.trace)
    if mixture is None:
        return work
    topology = replace(work.trace.shapes.topology, machines=machines)
    load = imbalance(work.trace.shapes.ep_size, mixture.experts)
    seconds, sent = _collectives(work, mixture, topology, hardware)
    passes = _passes(work.trace, work.ops)
    ops, exchanges = (
        _ops(work, mixture, passes, load),
        _exchanges(work, mixture, passes, load, topology, hardware, efficiency),
    )
    times = op_seconds(work.trace, ops, hardware, efficiency, topology.local_world_size)
    return replace(
        work, ops=ops, op_seconds=times, collective_seconds=seconds, sent=sent, exchanges=exchanges
    )


def elements(collectives: Records) -> list[float]:
    """Return the number of elements of each collective; 0 for dtypes without a size."""
    sizes = np.array([ITEM_BYTES.get(dtype, 0) or math.inf for dtype in DTYPES])[collectives["dtype"]]
    return (collectives["bytes"] / sizes).tolist()


def _collectives(
    work: StepWork, mixture: TracedExperts, topology: Topology, hardware: Hardware
) -> tuple[Seconds, list[Volume]]:
    """Return times and sent bytes of the collectives: experts are gathered and reduced apart from the rest of
    a unit."""
    ep, seconds, sent, table = (
        work.trace.shapes.ep_size,
        work.collective_seconds.copy(),
        list(work.sent),
        work.collectives,
    )
    for index, count in enumerate(elements(table)):
        share = mixture.share(count)
        group = topology.group(GROUPS[int(table["group"][index])])
        if share == 0 or group.ranks % ep:
            continue
        kind, size = COLLECTIVES[int(table["kind"][index])], int(table["bytes"][index])
        parts = [
            (round(size * (1 - share)), group),
            (round(size * share / ep), _with_same_experts(group, ep)),
        ]
        volumes = [sent_bytes(kind, part, among) for part, among in parts]
        seconds[index] = sum(
            _known(collective_seconds(kind, part, among, hardware), hardware) for part, among in parts if part
        )
        sent[index] = Volume(
            sum(each.machine_link_bytes for each in volumes), sum(each.network_bytes for each in volumes)
        )
    return seconds, sent


def _with_same_experts(group: Group, ep: int) -> Group:
    return Group(group.ranks // ep, min(group.machines, group.ranks // ep))


def _known(seconds: float | None, hardware: Hardware) -> float:
    if seconds is None:
        raise UnknownFigure(f"the link speed of {hardware.name} is unknown")
    return seconds


def _ops(work: StepWork, mixture: TracedExperts, passes: _Passes, load: float) -> Records:
    """Return the operations of the fullest rank, with 1 / ep of the experts' weights and of the copies of
    units."""
    trace, ops, ep = work.trace, work.ops.copy(), work.trace.shapes.ep_size
    products, copies, again = (
        is_grouped(trace, ops),
        copies_of_units(trace, mixture, ops),
        traced_second_copies(trace, mixture, ops),
    )
    items = np.array([ITEM_BYTES.get(dtype, 4) for dtype in DTYPES])[ops["dtype"]]
    # A product of `rows` rows has 2 × rows × inner × columns FLOPs, and a matrix of inner × columns for each
    # expert.
    weights = np.minimum(ops["flops"] / (2 * mixture.rows) * mixture.experts * items, ops["moved_bytes"])
    others = ops["moved_bytes"] - weights
    share = max(mixture.shares.values(), default=0.0)
    of_unit = ops["moved_bytes"] * (1 - share * (1 - 1 / ep)) + 2 * second_copies(trace, mixture, ops)
    cases = [products, copies, again, _between_products(work, passes) & ~products]
    scaled = [weights / ep + others * load, of_unit, ops["moved_bytes"] / ep, ops["moved_bytes"] * load]
    moved = np.select(cases, scaled, ops["moved_bytes"])
    ops["moved_bytes"] = np.rint(moved)
    ops["flops"] = np.where(products, ops["flops"] * load, ops["flops"])
    return ops


def _passes(trace: Trace, ops: Records) -> _Passes:
    """Return the passes of a step. A backward has those of a recomputation, which the experts make, before
    its own, which are the layer's.

    The recomputation of a layer ends early, often inside of its experts, and they are then the innermost
    module of the gradients, too.
    """
    found: _Passes = []
    rows = np.flatnonzero(is_grouped(trace, ops))
    keys = np.stack([ops[name][rows].astype(np.int64) for name in ("micro", "layer", "phase")], axis=1)
    of_experts = np.array([are_stacked_experts(name) for name in trace.modules], bool)
    forward, backward = PHASES.index("forward"), PHASES.index("backward")
    for micro, layer in {(int(micro), int(layer)) for micro, layer, _ in keys}:
        own = (keys[:, 0] == micro) & (keys[:, 1] == layer)
        first, second = rows[own & (keys[:, 2] == forward)], rows[own & (keys[:, 2] == backward)]
        again = len(first) if of_experts[ops["module"][second]].any() else 0
        passes = ((first, False), (second[:again], False), (second[again:], True))
        found += [(own_rows, is_gradient) for own_rows, is_gradient in passes if len(own_rows)]
    return found


def _between_products(work: StepWork, passes: _Passes) -> npt.NDArray[np.bool_]:
    """Select what is issued from the first product of a pass until its last: operations on the rows of
    experts."""
    found = np.zeros(len(work.ops), bool)
    for rows, _ in passes:
        found[rows[0] : rows[-1]] = work.ops["stream"][rows[0] : rows[-1]] == 0
    return found


def _exchanges(
    work: StepWork,
    mixture: TracedExperts,
    passes: _Passes,
    load: float,
    topology: Topology,
    hardware: Hardware,
    efficiency: Efficiency,
) -> Exchanges:
    trace, ops, ep = work.trace, work.ops, work.trace.shapes.ep_size
    group = topology.neighbours(ep)
    item = ITEM_BYTES.get(DTYPES[int(ops["dtype"][min(rows[0] for rows, _ in passes)])], 2)
    size = mixture.rows * trace.counts.hidden_size * item
    tokens = _known(collective_seconds("all_to_all", size * load, group, hardware), hardware)
    numbers = _known(collective_seconds("all_to_all", 8 * mixture.experts, group, hardware), hardware)
    # Rows are read and written once more, by the order of the experts where they arrive.
    sorting = (
        2 * size * load / (hardware.bandwidth_bytes_per_second * efficiency.bandwidth)
        + efficiency.kernel_seconds
    )
    where: list[tuple[int, float, bool]] = []
    for rows, is_gradient in passes:
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
