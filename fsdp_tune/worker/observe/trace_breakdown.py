"""Break the Chrome trace of a profile down into compute, collectives and idle time of each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

PHASE_PREFIX = "fsdp-tune::"


STEP, FORWARD, BACKWARD, OPTIMIZER, REST = "step", "forward", "backward", "optimizer", "rest"


PHASES = (FORWARD, BACKWARD, OPTIMIZER, REST)


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"


COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


class TraceEvent(TypedDict):
    """A Chrome trace event; only the fields that are read."""

    ph: str
    """`X` for an event with a duration."""
    name: str
    tid: int | str
    """A thread of the host, or a stream of the device."""
    ts: float
    """Begin in microseconds."""
    cat: NotRequired[str]
    dur: NotRequired[float]
    """Microseconds."""


Interval = tuple[float, float]
"""Begin and end, in the trace's microseconds."""


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of one phase over all profiled steps. A collective that overlaps with compute counts as
    `compute` only; `all_reduce` has those of other kinds too."""

    total: float
    compute: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    idle: float


def breakdown(events: Iterable[TraceEvent]) -> dict[str, Share]:
    """Return phase → its time. `events`: the `traceEvents` of a trace by torch.profiler.

    With device kernels in the trace, times are the device's: NCCL's kernels are the collectives, all others
    compute. Without, they are the host's: collectives are the calls that wait for them, operators compute,
    and what is neither is Python.
    """
    complete = [event for event in events if event.get("ph") == "X" and float(event.get("dur", 0)) > 0]
    on_device = any(event.get("cat") == "kernel" for event in complete)
    collectives, compute = _device_work(complete) if on_device else _host_work(complete)
    phases = _phases(complete, "gpu_user_annotation" if on_device else "user_annotation", on_device=on_device)
    return {name: _share(spans, compute, collectives) for name, spans in phases.items()}


def _share(spans: list[Interval], compute: list[Interval], collectives: dict[str, list[Interval]]) -> Share:
    """`compute` and each of `collectives` are unions."""
    waiting: list[float] = []
    covered = compute
    for kind in COLLECTIVES:
        exposed = difference(collectives[kind], covered)
        waiting.append(length(intersection(exposed, spans)))
        covered = union([*covered, *exposed])
    total, computing = length(spans), length(intersection(compute, spans))
    return Share(*(value / 1e6 for value in (total, computing, *waiting, total - computing - sum(waiting))))


def _device_work(events: Sequence[TraceEvent]) -> tuple[dict[str, list[Interval]], list[Interval]]:
    collectives: dict[str, list[Interval]] = {kind: [] for kind in COLLECTIVES}
    compute: list[Interval] = []
    for event in events:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        name = str(event["name"]).lower()
        kind = _kind_of(name) if "nccl" in name or "rccl" in name else None
        (collectives[kind] if kind else compute).append(_interval(event))
    return {kind: union(intervals) for kind, intervals in collectives.items()}, union(compute)


def _host_work(events: Sequence[TraceEvent]) -> tuple[dict[str, list[Interval]], list[Interval]]:
    """Return intervals of collectives (c10d's operators, and FSDP2's reduction, which waits inside) and of
    compute."""
    collectives: dict[str, list[Interval]] = {kind: [] for kind in COLLECTIVES}
    threads = {event["tid"] for event in events if str(event["name"]).startswith(PHASE_PREFIX)}
    compute: list[Interval] = []
    for event in events:
        name = str(event["name"]).lower()
        if (
            event.get("cat") == "user_annotation"
            and name.startswith("fsdp::")
            and (kind := _FSDP_CALLS.get(name.split(" ")[0]))
        ):
            collectives[kind].append(_interval(event))
        elif event["tid"] not in threads:
            continue  # gloo's own threads: whether a caller waits for them is not visible there
        elif name.startswith("c10d::"):
            collectives[_kind_of(name)].append(_interval(event))
        elif event.get("cat") == "cpu_op":
            compute.append(_interval(event))
    waiting = {kind: union(intervals) for kind, intervals in collectives.items()}
    # What runs inside such a call on the same thread is a part of it.
    return waiting, difference(
        union(compute), union(interval for intervals in waiting.values() for interval in intervals)
    )


_FSDP_CALLS = {"fsdp::all_gather": ALL_GATHER, "fsdp::post_backward_reduce": REDUCE_SCATTER}


def _kind_of(name: str) -> str:
    """Return the kind under which a collective counts; all-to-all and others count as all-reduce."""
    plain = name.replace("_", "")
    return next((kind for kind in COLLECTIVES if kind.replace("_", "") in plain), ALL_REDUCE)


def _phases(events: Sequence[TraceEvent], category: str, *, on_device: bool) -> dict[str, list[Interval]]:
    marked: dict[str, list[Interval]] = {name: [] for name in (STEP, *PHASES)}
    for event in events:
        name = str(event["name"])
        if event.get("cat") == category and name.startswith(PHASE_PREFIX):
            marked[name.removeprefix(PHASE_PREFIX)].append(_interval(event))
    if on_device:  # kernels of a backward are issued by another thread, and so in no annotation of ours
        marked[BACKWARD] = _after_each(marked[FORWARD], [*marked[FORWARD], *marked[OPTIMIZER]])
        marked[STEP] = [hull([*marked[FORWARD], *marked[OPTIMIZER]])] if marked[FORWARD] else []
    spans = {name: union(intervals) for name, intervals in marked.items()}
    known = union([*spans[FORWARD], *spans[BACKWARD], *spans[OPTIMIZER]])
    return {
        FORWARD: spans[FORWARD],
        BACKWARD: difference(spans[BACKWARD], spans[FORWARD]),
        OPTIMIZER: spans[OPTIMIZER],
        REST: difference(spans[STEP], known),
    }


def _after_each(spans: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the gaps between the end of each span and the start of the next."""
    begins = sorted(begin for begin, _ in others)
    return [
        (end, nearest)
        for _, end in spans
        if (nearest := next((begin for begin in begins if begin >= end), None)) is not None
    ]


def _interval(event: TraceEvent) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event.get("dur", 0))


def hull(intervals: Iterable[Interval]) -> Interval:
    """Return the interval from the first begin to the last end of one or more intervals."""
    begins, ends = zip(*intervals, strict=True)
    return min(begins), max(ends)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted and disjoint."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two unions of intervals."""
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the part of the first union outside the second."""
    left: list[Interval] = []
    j = 0
    for begin, end in one:
        while j < len(other) and other[j][1] <= begin:
            j += 1
        at, k = begin, j
        while k < len(other) and other[k][0] < end:
            if other[k][0] > at:
                left.append((at, other[k][0]))
            at = max(at, other[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the summed length of disjoint intervals, in microseconds."""
    return sum(end - begin for begin, end in intervals)
