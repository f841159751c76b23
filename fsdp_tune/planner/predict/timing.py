"""Predict the time of a traced step: each operation by a roofline, each collective by its links, on streams
that wait for each other.

Times of collectives are those of `predict.collectives`.

The simulation is independent of FSDP. The trace has the operations of every stream in the order of issue, and
the waits between streams; the clocks of the streams then give hidden and exposed communication.

Every constant, the share of a GPU's peak figures that a step reaches among them, is here with its source.
There are three kinds.
Published: the fastest matrix multiplication of each GPU (`matmul_tflops` of hardware.yaml), attention (the
FlashAttention papers).
Assumed: fixed costs of kernels and of the host. Fitted: `FITTED` lists them; benchmarks/plan.py prints their
number, their sources, and the errors on other sources.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.families import CHOSEN_EXPERTS, expert_count
from fsdp_tune.core.flash_kernels import FLASH_ATTENTION
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.topology import Topology
from fsdp_tune.planner.predict.collectives import Volume, collective_seconds, in_buckets, sent_bytes
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.mixture import GROUPED_PRODUCT
from fsdp_tune.planner.trace_format import COLLECTIVES, DTYPES, GROUPS, PHASES, Records, Trace

FLASH_3 = next(each for each in FLASH_ATTENTION if each.version == 3)
_NEWER_UNITS = (None, 9, 10)
"""Major numbers of compute capabilities; None: a GPU of another vendor."""
MATMUL_SHARE_UNMEASURED = 0.8
"""Share of the peak for a GPU without a published measurement: near the middle of the measured NVIDIA GPUs,
0.78 to 0.87."""
ATTENTION_SHARE = {"ampere": (0.62, 0.52), "hopper": (0.34, 0.33)}
"""Share of the dense peak for forward and backward of FlashAttention-2 on long rows, causal, head size 128,
in its benchmarks (arXiv:2307.08691, figures 5 and 7: 190 to 225 TFLOPS on A100; arXiv:2407.08608, figure 5:
335 on H100, whose new units it does not use)."""
FLASH_3_GAIN = (1.84, 1.6)
"""FlashAttention-3 relative to FlashAttention-2 on Hopper: 616 and 335 TFLOPS forward (arXiv:2407.08608,
figure 5); backward assumed, within the paper's 1.5 to 2.0 times. No checked row uses it."""
TILE_TOKENS = 128
"""Tokens that a query attends to in vain: half of the tile on the diagonal, and the start of the pipeline.
With it the forward of rows of 512 to 4,096 tokens has 0.67 to 0.94 of the share of long ones; measured on
H100 0.57 to 0.95 (arXiv:2407.08608, figure 5)."""
MASKED_SHARE = 0.6
"""Factor on it for kernels with a mask (memory-efficient attention)."""
GROUPED_TILE_ROWS, GROUPED_TILE_ROWS_OF_BLACKWELL, FEW_ROWS = 128, 256, 128
"""Rows of a tile of torch's grouped product; groups of at most `FEW_ROWS` have tiles of half of it
(`GroupMM.cu`, `dispatch_bf16_grouped_kernel_on_tile_size`)."""
KERNEL_SECONDS = 3.0e-6
"""Fixed time of a kernel on the device: start and tail."""
ISSUE_SECONDS = 6.0e-6
"""Host time per operation: Python, autograd and dispatcher."""
COLLECTIVE_ISSUE_SECONDS = 60.0e-6
"""Host time of FSDP's hooks per collective."""

SUSTAINED = {"ampere": 0.93, "hopper": 0.75}
BANDWIDTH_SHARE = 0.75
OVERLAP_COST = 0.3

FITTED = {
    "SUSTAINED ampere": "multiplications and attention of a step relative to their benchmarks: other shapes, "
    "temperature, a power limit",
    "SUSTAINED hopper": "the same; at full load these GPUs reach their power limit sooner",
    "BANDWIDTH_SHARE": "share of the memory bandwidth that elementwise kernels reach",
    "OVERLAP_COST": "slowdown of concurrent compute per second of communication: NCCL's kernels use SMs "
    "and bandwidth",
}
"""Fitted on the sources listed in benchmarks/plan.py, each with the same weight."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the figures in the datasheet, fixed costs in seconds, and what was learned here."""

    matmul: float
    attention_forward: float
    attention_backward: float
    bandwidth: float = BANDWIDTH_SHARE
    kernel_seconds: float = KERNEL_SECONDS
    issue_seconds: float = ISSUE_SECONDS
    collective_issue_seconds: float = COLLECTIVE_ISSUE_SECONDS
    overlap_cost: float = OVERLAP_COST
    is_measured: bool = True
    """Whether a measured matrix multiplication of this GPU is published."""
    flash_3_gain: tuple[float, float] = (1.0, 1.0)
    """Factors on the shares of attention, forward and backward, with FlashAttention 3."""
    calibration: str = ""
    """What was learned about the time of this GPU model, and whether it is used; "" if nothing was."""
    reserved_factor: float = 1.0
    """Peak of reserved memory relative to the replayed trace, as measured; at least 1."""
    memory_calibration: str = ""
    """The same about its memory."""


def efficiency_of(hardware: Hardware) -> Efficiency:
    """Return the constants of a GPU; without published measurements those of its kind, with `is_measured`
    False."""
    peak = hardware.bf16_tflops or hardware.fp16_tflops
    is_measured = hardware.matmul_tflops is not None and peak is not None
    share = (
        hardware.matmul_tflops / peak
        if hardware.matmul_tflops is not None and peak is not None
        else MATMUL_SHARE_UNMEASURED
    )
    # FlashAttention-2 uses the units of Ampere, so that it reaches a smaller share of GPUs that have others.
    major = None if hardware.capability is None else hardware.capability[0]
    kind = "hopper" if major in _NEWER_UNITS else "ampere"
    forward, backward = (share_of_peak * SUSTAINED[kind] for share_of_peak in ATTENTION_SHARE[kind])
    gain = FLASH_3_GAIN if major in FLASH_3.generations else (1.0, 1.0)
    return Efficiency(share * SUSTAINED[kind], forward, backward, is_measured=is_measured, flash_3_gain=gain)


Seconds = npt.NDArray[np.float64]


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


class UnknownFigure(Exception):
    """A required figure of the GPU is unknown; the message names it."""


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


def op_kinds(trace: Trace, ops: Records) -> npt.NDArray[np.int8]:
    return np.array([_kind(name) for name in trace.op_names] or [PLAIN], np.int8)[ops["name"]]


def rows_of_expert(trace: Trace) -> float:
    """Return the mean number of rows that a rank multiplies with an expert of a layer in a forward; all
    tokens of a dense model."""
    shapes, config = trace.shapes, trace.facts.config
    tokens = shapes.micro_batch * shapes.tokens / shapes.topology.row_parts
    return tokens * (CHOSEN_EXPERTS.of(config) or 1) / expert_count(config) * shapes.ep_size


def tile_share(rows: float, hardware: Hardware) -> float:
    """Return the share of the tiles of a grouped product that is not padding, for groups of `rows` rows on
    average.

    The last tile of a group is half full on average, since groups differ.
    """
    is_blackwell = hardware.capability is not None and hardware.capability[0] == 10
    tile = GROUPED_TILE_ROWS_OF_BLACKWELL if is_blackwell else GROUPED_TILE_ROWS
    tile = tile // 2 if rows <= FEW_ROWS else tile
    return rows / (rows + tile / 2)


def op_seconds(
    trace: Trace, ops: Records, hardware: Hardware, efficiency: Efficiency, local_ranks: int = 1
) -> Seconds:
    """Return the time of each operation: the larger of compute and memory traffic, plus the kernels' fixed
    cost."""
    kinds = op_kinds(trace, ops)
    backward = np.array(["backward" in name for name in trace.op_names] or [False])[ops["name"]]
    forward_gain, backward_gain = efficiency.flash_3_gain if trace.facts.flash_version == 3 else (1.0, 1.0)
    attention = np.where(
        backward, efficiency.attention_backward * backward_gain, efficiency.attention_forward * forward_gain
    )
    grouped = efficiency.matmul * tile_share(rows_of_expert(trace), hardware)
    of_kind = [attention, attention * MASKED_SHARE, np.full(len(ops), grouped)]
    share = np.select([kinds == FLASH, kinds == MASKED, kinds == GROUPED], of_kind, efficiency.matmul)
    peaks = np.array([hardware.peak_flops(dtype) or np.nan for dtype in DTYPES])[ops["dtype"]]
    with np.errstate(invalid="ignore"):
        multiplying = np.where(ops["flops"] > 0, ops["flops"] / (peaks * share), 0.0)
    if np.isnan(multiplying).any():
        dtype = DTYPES[int(ops["dtype"][np.isnan(multiplying)][0])]
        raise UnknownFigure(f"{hardware.name} has no known peak in {dtype}")
    link = hardware.host_link_bytes_per_second
    if link is None and (kinds == TO_HOST).any():
        raise UnknownFigure(f"the link speed of {hardware.name} to host memory is unknown")
    moved = ops["moved_bytes"].astype(np.float64)
    moving = moved / (hardware.bandwidth_bytes_per_second * efficiency.bandwidth)
    copying = moved / 2 / (link or 1.0) / efficiency.bandwidth
    on_host = moved / (HOST_BYTES_PER_SECOND / local_ranks)
    device = (
        np.select([kinds == TO_HOST], [copying], np.maximum(multiplying, moving))
        + ops["kernels"] * efficiency.kernel_seconds
    )
    return np.where(kinds == ON_HOST, on_host, device)


PLAIN, FLASH, MASKED, TO_HOST, ON_HOST, GROUPED = range(6)
HOST_BYTES_PER_SECOND = 200e9
"""Assumed bandwidth, listed in every plan with work on the host: half of that of two sockets with eight
channels of DDR4-3200 each (410 GB/s), shared by the ranks of a machine."""


def _kind(name: str) -> int:
    if name.startswith("host "):
        return ON_HOST
    if "flash_attention" in name:
        return FLASH
    if "attention" in name:
        return MASKED
    if GROUPED_PRODUCT in name:
        return GROUPED
    return TO_HOST if name in ("copy_to_host", "copy_to_device") else PLAIN


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
