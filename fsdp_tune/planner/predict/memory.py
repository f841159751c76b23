"""Replay the allocations of a trace through the caching allocator: peak device memory by component and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_tune.planner.predict.allocator import Block, CachingAllocator, DeviceMemoryError
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.trace_format import EVALUATION, EVENT, KINDS, PHASES, Records, Segments, Trace

TIMELINE_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Timeline:
    """Device memory over the last traced step and the evaluation after it: at most `TIMELINE_POINTS` points, each the maximum of its
    interval."""

    at: npt.NDArray[np.int64]
    """Index in the common order of the full-depth trace."""
    phase: tuple[str, ...]
    allocated_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]
    components: dict[str, npt.NDArray[np.int64]]
    """Bytes by kind (of KINDS, and `workspace`), of the same length as `at`; their sum is the requested memory, which is
    `allocated_bytes` without rounding."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Per device, without the CUDA context and NCCL's buffers, which the caching allocator does not see."""

    peak_allocated_bytes: int
    """`torch.cuda.max_memory_allocated`."""
    peak_reserved_bytes: int
    """`torch.cuda.max_memory_reserved`."""
    components: dict[str, int]
    """Bytes by kind at the moment of the highest allocation, the largest first; they add up to `peak_allocated_bytes` (with `rounding`)."""
    where: str
    """That moment, described: `step 1, backward of layer 3 (mlp.down_proj)`."""
    out_of_memory: str | None
    """Where the replay ran out of memory after freeing cached blocks; the peaks are those up to there. None if it completed."""
    retries: int
    """Number of times cached memory was returned to the driver, which synchronises the device."""
    host_bytes: int
    """Highest host memory of this rank for offloaded parameters, gradients, optimizer state and activations; pinned blocks rounded up."""
    timeline: Timeline


def peak_memory(trace: Trace, *, segments: Segments = "expandable", capacity_bytes: int | None = None, workspace_bytes: int = 0) -> Memory:
    """Replay `trace` at the model's full depth.

    `capacity_bytes`: memory available to the allocator, that of the GPU without context and NCCL; None replays without a limit.
    `workspace_bytes`: cuBLAS's workspace, allocated with the first matrix product (`fits.workspace_bytes` of the GPU).
    """
    trace = full_depth(trace)
    events = _with_workspace(trace, workspace_bytes)
    device = events[~events["host"]]
    replayed = _replay(device, segments, capacity_bytes)
    done = device[: len(replayed.allocated)]
    moment = int(np.argmax(replayed.allocated)) if len(done) else 0
    levels = _levels(done)
    components = {name: int(level[moment]) for name, level in levels.items() if len(done) and level[moment]}
    rounding = replayed.peak_allocated - sum(components.values())
    components = dict(sorted(components.items(), key=lambda item: -item[1])) | ({"rounding": rounding} if rounding else {})
    return Memory(
        peak_allocated_bytes=replayed.peak_allocated,
        peak_reserved_bytes=replayed.peak_reserved,
        components=components,
        where=place(trace, done[moment]) if len(done) else "nothing was allocated",
        out_of_memory=place(trace, device[len(done)]) if replayed.full else None,
        retries=replayed.retries,
        host_bytes=_host_peak(events[events["host"]]),
        timeline=_timeline(done, replayed, levels),
    )


def _host_peak(events: Records) -> int:
    """Return the peak of host memory. Copied tensors are in pinned blocks, rounded to powers of two; optimizer state is not pinned."""
    sizes = events["bytes"].astype(np.float64)
    mantissa, exponent = np.frexp(np.abs(sizes))
    powers = np.copysign(np.ldexp(1.0, exponent - (mantissa == 0.5)), sizes)
    return int(np.cumsum(np.where(events["kind"] == KINDS.index("optimizer state"), sizes, powers)).max(initial=0))


def place(trace: Trace, record: Any) -> str:
    """Describe the position of a record in the run."""
    step, layer = int(record["step"]), int(record["layer"])
    phase, module = PHASES[int(record["phase"])], trace.modules[int(record["module"])]
    where = phase if step < 0 or phase == "evaluation" else f"step {step + 1}, {phase}"
    if layer >= 0:
        leaf = module.split(".", 3)[-1] if module.count(".") >= 3 else ""
        return f"{where} of layer {layer + 1} of {trace.layers}" + (f" ({leaf})" if leaf else "")
    return f"{where} ({module})" if module else where


@dataclass(slots=True)
class _Replayed:
    allocated: npt.NDArray[np.int64]
    reserved: npt.NDArray[np.int64]
    peak_allocated: int
    peak_reserved: int
    retries: int
    full: bool


def _replay(events: Records, segments: Segments, capacity_bytes: int | None) -> _Replayed:
    allocator = CachingAllocator(expandable=segments == "expandable", capacity_bytes=capacity_bytes)
    blocks: dict[int, Block] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    full = False
    columns: list[list[int]] = [events[name].tolist() for name in ("block", "bytes", "stream")]
    for block, size, stream in zip(*columns, strict=True):
        if size > 0:
            try:
                blocks[block] = allocator.allocate(size, stream)
            except DeviceMemoryError:
                full = True
                break
        else:
            allocator.free(blocks.pop(block))
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    levels = np.array(allocated, np.int64), np.array(reserved, np.int64)
    return _Replayed(*levels, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.retries, full)


def _with_workspace(trace: Trace, workspace_bytes: int) -> Records:
    """Insert cuBLAS's workspace, which it allocates with the first matrix product and keeps."""
    products: Records = trace.ops[trace.ops["flops"] > 0]
    if not workspace_bytes or not len(products):
        return trace.events
    record = np.zeros(1, EVENT)
    for name in ("step", "micro", "phase", "layer", "module", "stream"):
        record[name] = products[0][name]
    record["at"], record["bytes"], record["kind"] = products[0]["at"], workspace_bytes, WORKSPACE
    record["block"] = int(trace.events["block"].max(initial=0)) + 1
    index = np.searchsorted(trace.events["at"], np.array([record["at"][0]]))
    return np.insert(trace.events, index, record)


WORKSPACE = len(KINDS)


def _levels(events: Records) -> dict[str, npt.NDArray[np.int64]]:
    """Return the bytes of each kind after each event."""
    names = [*KINDS, "workspace"]
    return {
        name: np.cumsum(np.where(events["kind"] == index, events["bytes"], 0))
        for index, name in enumerate(names)
        if np.any(events["kind"] == index)
    }


def _timeline(events: Records, replayed: _Replayed, levels: dict[str, npt.NDArray[np.int64]]) -> Timeline:
    last = int(events["step"][events["phase"] != EVALUATION].max(initial=-1))
    window = np.flatnonzero(events["step"] >= last)
    stretches: list[npt.NDArray[np.int64]] = np.array_split(window, min(TIMELINE_POINTS, len(window))) if len(window) else []
    highest = [int(part[np.argmax(replayed.allocated[part])]) for part in stretches]
    picked = np.array(highest, np.int64)
    phases: list[int] = events["phase"][picked].tolist()
    return Timeline(
        at=events["at"][picked].astype(np.int64),
        phase=tuple(PHASES[index] for index in phases),
        allocated_bytes=replayed.allocated[picked],
        reserved_bytes=replayed.reserved[picked],
        components={name: level[picked] for name, level in levels.items()},
    )
