"""Predict the time of a traced step: each operation by a roofline, each collective by its links, on streams
that wait for each other.

Times of operations are those of `predict.roofline`, times of collectives those of `predict.collectives`.

The simulation is independent of FSDP. The trace has the operations of every stream in the order of issue, and
the waits between streams; the clocks of the streams then give hidden and exposed communication.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.topology import Topology
from fsdp_tune.planner.predict.collectives import Volume, collective_seconds, in_buckets, sent_bytes
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.efficiency import Efficiency, UnknownFigure
from fsdp_tune.planner.predict.roofline import ON_HOST, Seconds, op_kinds, op_seconds
from fsdp_tune.planner.trace_format import COLLECTIVES, GROUPS, PHASES, Records, Trace


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of one optimizer step with all micro-batches, for one rank; all ranks are assumed to be equal."""

    step_seconds: float
    phases: dict[str, float]
    """Time from the first to the last operation of forward, loss, backward, clip and optimizer on the compute
    stream."""
    compute_seconds: float
    """Busy time of the compute stream."""
    communication_seconds: float
    """Time in collectives, hidden or not."""
    exposed_seconds: float
    """The compute stream waiting for other streams: communication that is not hidden, and copies."""
    issue_seconds: float
    """The compute stream waiting for the host to issue work."""
    volume: Volume
    """Bytes that this device sends in a step."""


@dataclass(frozen=True, slots=True)
class Exchanges:
    """Exchanges of tokens that the compute stream waits for, one of each per row: they start at once and
    delay other collectives."""

    at: npt.NDArray[np.int64]
    """Position in the order of the trace: after the operation with this position."""
    phase: npt.NDArray[np.int64]
    micro: npt.NDArray[np.int64]
    seconds: Seconds
    sent: Volume
    """Bytes that this device sends in each."""
    needs_host: npt.NDArray[np.bool_]
    """Whether the host waits for the compute stream before it issues them."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The last traced step at the model's full depth, with the time of everything in it."""

    trace: Trace
    ops: Records
    op_seconds: Seconds
    collectives: Records
    collective_seconds: Seconds
    sent: list[Volume]
    """Bytes that this device sends in each collective."""
    waits: Records
    exchanges: Exchanges | None = None


def undivided_work(trace: Trace, hardware: Hardware, machines: int, efficiency: Efficiency) -> StepWork:
    """Return the last traced step with its times, in which every rank has all experts. Raises: UnknownFigure
    for a missing figure of the GPU."""
    trace = full_depth(trace)
    topology = replace(trace.shapes.topology, machines=machines)
    ops, collectives, waits = (trace.steady(table) for table in (trace.ops, trace.collectives, trace.waits))
    ops = ops[ops["kernels"] > 0]
    collectives = in_buckets(trace, collectives)
    durations = op_seconds(trace, ops, hardware, efficiency, topology.local_world_size)
    transfers = _transfer_seconds(collectives, topology, hardware)
    columns = _columns(collectives, "kind", "bytes", "group")
    sent = [
        sent_bytes(COLLECTIVES[kind], size, topology.group(GROUPS[group])) for kind, size, group in columns
    ]
    return StepWork(trace, ops, durations, collectives, transfers, sent, waits)


def simulate(work: StepWork, efficiency: Efficiency) -> StepTime:
    """Return the time of a step with all micro-batches."""
    shapes, collectives, exchanges = work.trace.shapes, work.collectives, work.exchanges

    def simulated(which: npt.NDArray[np.bool_]) -> _Clocks:
        clocks = _Clocks(len(work.trace.streams))
        clocks.run(_in_order(work, which), efficiency)
        return clocks

    # The untraced micro-batches equal the second of three; of two, the last one without the collectives that
    # only it sends.
    like, times = min(1, shapes.traced_micro_batches - 1), shapes.accumulation - shapes.traced_micro_batches
    everywhere = ~_only_in_last(collectives, shapes.traced_micro_batches - 1)
    whole = simulated(np.ones(len(collectives), bool))
    middle = whole if everywhere.all() or not times else simulated(everywhere)
    sums = _Sums.of([(each, 1) for each in whole.sums.values()] + [(middle.sums.get(like, _Sums()), times)])
    weights = 1 + np.where((collectives["micro"] == like) & everywhere, times, 0)
    talking = float((work.collective_seconds * weights).sum())
    sent = list(zip(work.sent, weights.tolist(), strict=True))
    waited = 0.0
    if exchanges is not None:
        repeats = 1 + np.where(exchanges.micro == like, times, 0)
        waited = float((exchanges.seconds * repeats).sum())
        sent.append((exchanges.sent, int(repeats.sum())))
    return StepTime(
        step_seconds=whole.end + times * middle.micro_seconds(like) + efficiency.overlap_cost * talking,
        phases={name: seconds for name, seconds in sums.phases.items() if seconds},
        compute_seconds=sums.compute,
        communication_seconds=talking + waited,
        exposed_seconds=sums.exposed,
        issue_seconds=sums.host_bound,
        volume=Volume(
            sum(each.machine_link_bytes * count for each, count in sent),
            sum(each.network_bytes * count for each, count in sent),
        ),
    )


def _only_in_last(collectives: Records, last: int) -> npt.NDArray[np.bool_]:
    """Select the collectives of the last micro-batch alone: sums over ranks or replicas that need the full
    gradient."""
    kinds = collectives["kind"].astype(np.int64) * len(GROUPS) + collectives["group"]
    of_last = collectives["micro"] == last
    return (
        of_last & ~np.isin(kinds, kinds[collectives["micro"] == 0])
        if last
        else np.zeros(len(collectives), bool)
    )


def _transfer_seconds(collectives: Records, topology: Topology, hardware: Hardware) -> Seconds:
    groups = {index: topology.group(name) for index, name in enumerate(GROUPS)}
    known: dict[tuple[int, int, int], float] = {}
    seconds = np.zeros(len(collectives))
    for index, (kind, group, size) in enumerate(_columns(collectives, "kind", "group", "bytes")):
        key = (kind, group, size)
        if key not in known:
            found = collective_seconds(COLLECTIVES[kind], size, groups[group], hardware)
            if found is None:
                where = "another machine" if groups[group].machines > 1 else "another device of the machine"
                raise UnknownFigure(f"the link speed of {hardware.name} to {where} is unknown")
            known[key] = found
        seconds[index] = known[key]
    return seconds


def _columns(table: Records, *names: str) -> list[tuple[int, ...]]:
    """Return rows of Python integers, which iterate ten times as fast as a record array."""
    return list(zip(*(table[name].tolist() for name in names), strict=True))


class _StreamWork(NamedTuple):
    """Work that is issued to a stream; a wait if `source` is set."""

    at: int
    stream: int
    seconds: float = 0.0
    phase: int = 0
    micro: int = -1
    is_collective: bool = False
    on_host: bool = False
    is_exchange: bool = False
    needs_host: bool = False
    source: int | None = None
    until: int = 0


def _in_order(work: StepWork, which: npt.NDArray[np.bool_]) -> list[_StreamWork]:
    """Return all work in the order of issue, of the collectives those of `which`."""
    ops, collectives, waits, exchanges = work.ops, work.collectives[which], work.waits, work.exchanges
    on_host = (op_kinds(work.trace, ops) == ON_HOST).tolist()
    columns = (ops[name].tolist() for name in ("at", "stream", "phase", "micro"))
    found = [
        _StreamWork(at, stream, seconds, phase, micro, on_host=host)
        for at, stream, phase, micro, seconds, host in zip(
            *columns, work.op_seconds.tolist(), on_host, strict=True
        )
    ]
    columns = (collectives[name].tolist() for name in ("at", "stream", "phase", "micro"))
    found += [
        _StreamWork(at, stream, seconds, phase, micro, is_collective=True)
        for at, stream, phase, micro, seconds in zip(
            *columns, work.collective_seconds[which].tolist(), strict=True
        )
    ]
    columns = (waits[name].tolist() for name in ("at", "stream", "source", "until"))
    found += [
        _StreamWork(at, stream, source=source, until=until)
        for at, stream, source, until in zip(*columns, strict=True)
    ]
    if exchanges is not None:
        columns = (
            getattr(exchanges, name).tolist() for name in ("at", "seconds", "phase", "micro", "needs_host")
        )
        found += [
            _StreamWork(at, 0, seconds, phase, micro, is_exchange=True, needs_host=host)
            for at, seconds, phase, micro, host in zip(*columns, strict=True)
        ]
    return sorted(found, key=lambda item: item.at)


@dataclass(slots=True)
class _Sums:
    """Times of the compute stream, in one micro-batch or in all."""

    compute: float = 0.0
    exposed: float = 0.0
    host_bound: float = 0.0
    phases: dict[str, float] = field(default_factory=dict[str, float])

    @staticmethod
    def of(parts: list[tuple[_Sums, int]]) -> _Sums:
        """Add each part the given number of times; -1 subtracts it."""
        total = _Sums()
        for part, times in parts:
            total.compute += times * part.compute
            total.exposed += times * part.exposed
            total.host_bound += times * part.host_bound
            for phase, seconds in part.phases.items():
                total.phases[phase] = total.phases.get(phase, 0.0) + times * seconds
        return total


@dataclass(slots=True)
class _Clocks:
    """Times at which streams become free, and at which their work is done."""

    streams: int
    end: float = 0.0
    sums: dict[int, _Sums] = field(default_factory=dict[int, _Sums])
    """By micro-batch; -1 is the time outside of micro-batches."""
    _micro_ends: dict[int, float] = field(default_factory=dict[int, float])
    _compute_end: float = 0.0

    def run(self, work: list[_StreamWork], efficiency: Efficiency) -> None:
        free = [0.0] * self.streams
        issued: list[list[int]] = [[] for _ in range(self.streams)]
        done: list[list[float]] = [[] for _ in range(self.streams)]
        host = links = 0.0
        for item in work:
            stream = item.stream
            if item.source is not None:
                last = bisect_left(issued[item.source], item.until)
                if last:
                    free[stream] = max(free[stream], done[item.source][last - 1])
                continue
            host += (
                efficiency.collective_issue_seconds
                if item.is_collective or item.is_exchange
                else efficiency.issue_seconds
            )
            # offloaded tensors have arrived by then, and nothing else is issued in the meantime
            if item.on_host:
                host = max([host, *free]) + item.seconds
                continue
            if item.needs_host:
                host = max(host, free[stream])
            start = max(free[stream], host)
            if item.is_collective:
                start = max(start, links)  # one communicator runs one collective at a time
                links = start + item.seconds
            elif item.is_exchange:
                links = max(links, start) + item.seconds
            if stream == 0:
                self._account(item, start, ready=free[0])
            free[stream] = start + item.seconds
            issued[stream].append(item.at)
            done[stream].append(free[stream])
        self.end = max([host, *free])

    def _account(self, item: _StreamWork, start: float, ready: float) -> None:
        """Attribute the compute stream's time to work, waiting for other streams (until `ready`), or waiting
        for the host."""
        finished, phase = start + item.seconds, PHASES[item.phase]
        sums = self.sums.setdefault(item.micro, _Sums())
        if item.is_exchange:
            sums.exposed += item.seconds
        else:
            sums.compute += item.seconds
        sums.host_bound += max(0.0, start - max(ready, self._compute_end))
        sums.exposed += max(0.0, min(start, ready) - self._compute_end)
        sums.phases[phase] = sums.phases.get(phase, 0.0) + finished - self._compute_end
        self._compute_end = self._micro_ends[item.micro] = finished

    def micro_seconds(self, micro: int) -> float:
        """Return the time between the ends of the previous micro-batch and this one, on the compute
        stream."""
        return self._micro_ends.get(micro, 0.0) - (self._micro_ends.get(micro - 1, 0.0) if micro > 0 else 0.0)
