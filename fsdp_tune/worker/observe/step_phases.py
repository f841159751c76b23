"""The phases of a step: which one a rank is in, for its heartbeat, and how long each takes, from a profile.

`train --profile steps=10:13` writes a Chrome trace of each rank, and the breakdown of its steps into compute, collectives and idle time.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fsdp_tune.core.atomic import write_json
from fsdp_tune.core.command import ProfiledSteps
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.events import Profiled
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter
from fsdp_tune.worker.step_observer import StepObserver

if TYPE_CHECKING:
    from fsdp_tune.worker.trainer import FsdpTrainer


class AttachedCallback(StepObserver, TrainerCallback):
    """An observer of steps that follows the Trainer's events and keeps the trainer."""

    trainer: FsdpTrainer

    def attach(self, trainer: FsdpTrainer) -> None:
        self.trainer = trainer


class StepProgress(StepObserver, TrainerCallback):
    """Record in the heartbeat which part of a step this rank is in."""

    def __init__(self, heartbeat: HeartbeatWriter) -> None:
        self._heartbeat = heartbeat

    def attach(self, trainer: FsdpTrainer) -> None:
        """Install hooks on the wrapped model: a forward is progress, also in evaluation; in training a backward follows it."""
        model = trainer.wrapped

        def before(*_: object) -> None:
            self._heartbeat.mark("forward") if model.training else self._heartbeat.tick()

        def after(*_: object) -> None:
            if model.training:
                self._heartbeat.mark("backward")

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._heartbeat.mark("optimizer step")


PHASE_PREFIX = "fsdp-tune::"
STEP, FORWARD, BACKWARD, OPTIMIZER, REST = "step", "forward", "backward", "optimizer", "rest"
PHASES = (FORWARD, BACKWARD, OPTIMIZER, REST)
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather", "reduce_scatter", "all_reduce"
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
_DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})

Interval = tuple[float, float]
"""Begin and end, in the trace's microseconds."""


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds of one phase over all profiled steps. A collective that overlaps with compute counts as `compute` only."""

    total: float
    compute: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    idle: float


def breakdown(events: Iterable[dict[str, Any]]) -> dict[str, Share]:
    """Return phase → its time. `events`: the `traceEvents` of a trace by torch.profiler.

    With device kernels in the trace, times are the device's: NCCL's kernels are the collectives, all others compute. Without,
    they are the host's: collectives are the calls that wait for them, operators compute, and what is neither is Python.
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


def _device_work(events: Sequence[dict[str, Any]]) -> tuple[dict[str, list[Interval]], list[Interval]]:
    collectives: dict[str, list[Interval]] = {kind: [] for kind in COLLECTIVES}
    compute: list[Interval] = []
    for event in events:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        name = str(event["name"]).lower()
        kind = _kind_of(name) if "nccl" in name or "rccl" in name else None
        (collectives[kind] if kind else compute).append(_interval(event))
    return {kind: union(intervals) for kind, intervals in collectives.items()}, union(compute)


def _host_work(events: Sequence[dict[str, Any]]) -> tuple[dict[str, list[Interval]], list[Interval]]:
    """Return intervals of collectives (c10d's operators, and FSDP2's reduction, which waits inside) and of compute."""
    collectives: dict[str, list[Interval]] = {kind: [] for kind in COLLECTIVES}
    threads = {event["tid"] for event in events if str(event["name"]).startswith(PHASE_PREFIX)}
    compute: list[Interval] = []
    for event in events:
        name = str(event["name"]).lower()
        if event.get("cat") == "user_annotation" and name.startswith("fsdp::") and (kind := _FSDP_CALLS.get(name.split(" ")[0])):
            collectives[kind].append(_interval(event))
        elif event["tid"] not in threads:
            continue  # gloo's own threads: whether a caller waits for them is not visible there
        elif name.startswith("c10d::") and (kind := _kind_of(name)):
            collectives[kind].append(_interval(event))
        elif event.get("cat") == "cpu_op":
            compute.append(_interval(event))
    waiting = {kind: union(intervals) for kind, intervals in collectives.items()}
    # What runs inside such a call on the same thread is a part of it.
    return waiting, difference(union(compute), union(interval for intervals in waiting.values() for interval in intervals))


_FSDP_CALLS = {"fsdp::all_gather": ALL_GATHER, "fsdp::post_backward_reduce": REDUCE_SCATTER}


def _kind_of(name: str) -> str | None:
    plain = name.replace("_", "")
    return next((kind for kind in COLLECTIVES if kind.replace("_", "") in plain), ALL_REDUCE if "nccl" in plain else None)


def _phases(events: Sequence[dict[str, Any]], category: str, *, on_device: bool) -> dict[str, list[Interval]]:
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
    return [(end, nearest) for _, end in spans if (nearest := next((begin for begin in begins if begin >= end), None)) is not None]


def _interval(event: dict[str, Any]) -> Interval:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def hull(intervals: Iterable[Interval]) -> Interval:
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
    return sum(end - begin for begin, end in intervals)


class Profile(AttachedCallback):
    """Record the requested steps; the event `profiled` in metrics.jsonl has the breakdown of rank 0."""

    def __init__(self, run: RunDir, steps: ProfiledSteps, rank: int) -> None:
        self._steps = steps
        self._trace = run.path / "profile" / f"steps-{steps.first}-{steps.last}" / f"rank-{rank:04d}.trace.json.gz"
        self._profiler: Any = None
        self._phase: record_function | None = None
        self._step: record_function | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        wrapped = self.trainer.wrapped
        wrapped.register_forward_pre_hook(lambda *_: self._enter(FORWARD), prepend=True)
        wrapped.register_forward_hook(lambda *_: self._enter(BACKWARD))
        micro_step = self.trainer.training_step

        def training_step(*arguments: Any, **named: Any) -> torch.Tensor:
            loss = micro_step(*arguments, **named)
            self._leave()
            return loss

        self.trainer.training_step = training_step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        step = state.global_step + 1
        if self._profiler is None and self._steps.first <= step <= self._steps.last:
            on_cuda = args.device.type == "cuda"
            self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])])
            self._profiler.start()
        if self._profiler is not None:
            self._step = record_function(f"{PHASE_PREFIX}{STEP}")
            self._step.__enter__()

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._enter(OPTIMIZER)

    def on_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._leave()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None
        if self._profiler is not None and state.global_step >= min(self._steps.last, state.max_steps):
            self._finish(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._profiler is not None:  # stopped in the middle
            self._finish(state.global_step)

    def _enter(self, phase: str) -> None:
        self._leave()
        if self._profiler is not None:
            self._phase = record_function(f"{PHASE_PREFIX}{phase}")
            self._phase.__enter__()

    def _leave(self) -> None:
        if self._phase is not None:
            self._phase.__exit__(None, None, None)
            self._phase = None

    def _finish(self, step: int) -> None:
        started = time.monotonic()
        self._profiler.stop()
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self._trace))
        self._profiler = None
        with gzip.open(self._trace, "rt", encoding="utf-8") as file:
            shares = breakdown(json.load(file)["traceEvents"])
        steps = step - self._steps.first + 1
        seconds = {phase: asdict(share) for phase, share in shares.items()}
        write_json(_breakdown_path(self._trace), {"steps": steps, "seconds": seconds})
        self.trainer.parts.metrics.event(Profiled(step, str(self._trace), steps, seconds))
        self.trainer.lines.leave_out(time.monotonic() - started)


def _breakdown_path(trace: Path) -> Path:
    return trace.with_name(trace.name.replace(".trace.json.gz", ".breakdown.json"))
