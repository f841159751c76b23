"""Predict the memory of a step over time and by component, whether it fits, and disk use, host memory and the
steps of a run.

The allocations of a trace are replayed through the caching allocator. Whether a recipe fits follows from
reserved memory, memory outside the allocator, and the error of the prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.tensors.dtypes import OF_OPTION
from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.planner.predict.allocator import Block, CachingAllocator, DeviceMemoryError
from fsdp_tune.planner.predict.depth import full_depth
from fsdp_tune.planner.predict.divided_memory import divided_memory
from fsdp_tune.planner.trace_format import EVALUATION, EVENT, KINDS, PHASES, Records, Segments, Trace
from fsdp_tune.recipe.schema.optimizers import optimizer_name, state_bytes
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value

TIMELINE_POINTS = 2000


@dataclass(frozen=True, slots=True)
class Timeline:
    """Device memory over the last traced step and the evaluation after it: at most `TIMELINE_POINTS` points,
    each the maximum of its interval."""

    at: npt.NDArray[np.int64]
    """Index in the common order of the full-depth trace."""
    phase: tuple[str, ...]
    allocated_bytes: npt.NDArray[np.int64]
    reserved_bytes: npt.NDArray[np.int64]
    components: dict[str, npt.NDArray[np.int64]]
    """Bytes by kind (of KINDS, and `workspace`), of the same length as `at`; their sum is the requested
    memory, which is `allocated_bytes` without rounding."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Per device, without the CUDA context and NCCL's buffers, which the caching allocator does not see."""

    peak_allocated_bytes: int
    """`torch.cuda.max_memory_allocated`."""
    peak_reserved_bytes: int
    """`torch.cuda.max_memory_reserved`."""
    components: dict[str, int]
    """Bytes by kind at the moment of the highest allocation, the largest first; they add up to
    `peak_allocated_bytes` (with `rounding`)."""
    where: str
    """That moment, described: `step 1, backward of layer 3 (mlp.down_proj)`."""
    out_of_memory: str | None
    """Where the replay ran out of memory after freeing cached blocks; the peaks are those up to there. None
    if it completed."""
    retries: int
    """Number of times cached memory was returned to the driver, which synchronises the device."""
    host_bytes: int
    """Highest host memory of this rank for offloaded parameters, gradients, optimizer state and activations;
    pinned blocks rounded up."""
    timeline: Timeline


def peak_memory(
    trace: Trace,
    *,
    segments: Segments = "expandable",
    capacity_bytes: int | None = None,
    workspace_bytes: int = 0,
) -> Memory:
    """Replay `trace` at the model's full depth, with the experts of its `ep_size`.

    `capacity_bytes`: memory available to the allocator, that of the GPU without context and NCCL; None
    replays without a limit.
    `workspace_bytes`: cuBLAS's workspace, allocated with the first matrix product (`cublas_workspace_bytes`
    of the GPU).
    """
    trace = divided_memory(full_depth(trace))
    events = _with_workspace(trace, workspace_bytes)
    device = events[~events["host"]]
    replayed = _replay(device, segments, capacity_bytes)
    done = device[: len(replayed.allocated)]
    moment = int(np.argmax(replayed.allocated)) if len(done) else 0
    levels = _levels(done)
    components = {name: int(level[moment]) for name, level in levels.items() if len(done) and level[moment]}
    rounding = replayed.peak_allocated - sum(components.values())
    components = dict(sorted(components.items(), key=lambda item: -item[1])) | (
        {"rounding": rounding} if rounding else {}
    )
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
    """Return the peak of host memory. Copied tensors are in pinned blocks, rounded to powers of two;
    optimizer state is not pinned."""
    sizes = events["bytes"].astype(np.float64)
    mantissa, exponent = np.frexp(np.abs(sizes))
    powers = np.copysign(np.ldexp(1.0, exponent - (mantissa == 0.5)), sizes)
    return int(
        np.cumsum(np.where(events["kind"] == KINDS.index("optimizer state"), sizes, powers)).max(initial=0)
    )


def place(trace: Trace, record: np.void) -> str:
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
    return _Replayed(
        *levels, allocator.peak_allocated_bytes, allocator.peak_reserved_bytes, allocator.retries, full
    )


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
    stretches: list[npt.NDArray[np.int64]] = (
        np.array_split(window, min(TIMELINE_POINTS, len(window))) if len(window) else []
    )
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


DTYPE_BYTES = {name: dtype.item_bytes for name, dtype in OF_OPTION.items()}


@dataclass(frozen=True, slots=True)
class DiskUse:
    checkpoint_bytes: int
    """One checkpoint: all parameters (with `lora:` those that are trained) in their storage dtype, and the
    optimizer state."""
    most_checkpoints: int | None
    """Most checkpoints at one time, including the one being written; None: all are kept."""
    merged_bytes: int
    cache_bytes: int | None
    """Prepared rows: 4 bytes per token id and 1 for the trained flag (`data.store`). None before the data is
    prepared."""


def disk(recipe: Recipe, trace: Trace, tokens: int | None) -> DiskUse:
    """Predict disk use. `tokens` is that of the prepared data, if known."""
    counts, size = trace.counts, DTYPE_BYTES[recipe.model.dtype]
    saved_bytes = counts.parameter_bytes if recipe.lora is None else counts.trained_parameters * size
    as_wanted = (
        counts.parameter_bytes
        if recipe.merge.dtype == "keep"
        else counts.parameters * DTYPE_BYTES[recipe.merge.dtype]
    )
    return DiskUse(
        checkpoint_bytes=saved_bytes + _state_bytes(recipe, trace, size),
        most_checkpoints=most_checkpoints(recipe),
        merged_bytes=as_wanted if recipe.merge.at_end else 0,
        cache_bytes=None if tokens is None else 5 * tokens,
    )


def most_checkpoints(recipe: Recipe) -> int | None:
    """Return the most checkpoints at one time, including the one being written; None: all are kept."""
    # any number may wait for its evaluation
    kept = None if recipe.evaluation.is_on else recipe.training.save_total_limit
    if training_value(recipe.training, "save_strategy") == "no":
        return 1  # that of the last step
    best = (
        1
        if training_value(recipe.training, "load_best_model_at_end") or recipe.training.early_stopping
        else 0
    )
    return None if kept is None else kept + best + 1


def least_checkpoint_bytes(recipe: Recipe, parameters: int, trained_parameters: int) -> int:
    """Return the bytes of a checkpoint without a trace: with Muon, a part of its state is left out."""
    size = DTYPE_BYTES[recipe.model.dtype]
    saved = parameters if recipe.lora is None else trained_parameters
    return saved * size + round(state_bytes(recipe.training, size) * trained_parameters)


def _state_bytes(recipe: Recipe, trace: Trace, size: int) -> int:
    """Return the bytes of the optimizer state of all ranks. With Muon, the embedding and the head have
    AdamW's second moment too."""
    counts = trace.counts
    found = round(state_bytes(recipe.training, size) * counts.trained_parameters)
    if optimizer_name(recipe.training) == "muon" and recipe.lora is None:
        found += size * counts.vocabulary * counts.hidden_size * (1 if counts.tied_embeddings else 2)
    return found


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory of the machine with most, without that of Python, torch and CUDA (about 1 GiB per rank or
    more)."""

    loading_bytes: int
    """While the weights are read: the slices of all local ranks, or the full model in each rank or in rank
    0."""
    offloaded_bytes: int
    """Offloaded tensors, pinned for the full run."""
    staging_bytes: int
    """The copy of parameters and optimizer state for background saves, kept from the first on; the full state
    on rank 0 if it gathers."""

    @property
    def peak_bytes(self) -> int:
        return self.offloaded_bytes + max(self.loading_bytes, self.staging_bytes)


def host_memory(recipe: Recipe, trace: Trace, memory: Memory) -> HostMemory:
    local, shards = recipe.local_world_size, trace.shapes.shards
    counts = trace.counts
    reads_whole = not recipe.fsdp.cpu_ram_efficient_loading or recipe.fsdp.version == 1
    if reads_whole:
        loading = counts.parameter_bytes * local
    else:
        loading = (
            counts.parameter_bytes
            if recipe.model.from_config is not None
            else counts.parameter_bytes // shards * local
        )
    checkpoint = disk(recipe, trace, None).checkpoint_bytes
    staging = checkpoint // shards * local if recipe.checkpoint.async_ else 0
    if recipe.fsdp.state_dict_type == "FULL_STATE_DICT":
        staging = checkpoint
    return HostMemory(loading, memory.host_bytes * local, staging)


def total_steps(recipe: Recipe, rows: int | None) -> int | None:
    """Return the optimizer steps of a run, counted as the Trainer does; None if they depend on data that is
    not prepared."""
    wanted = training_value(recipe.training, "max_steps")
    if isinstance(wanted, int) and wanted > 0:
        return wanted
    if rows is None:
        return None
    epochs = float(training_value(recipe.training, "num_train_epochs") or 0)
    return math.ceil(-(-rows // recipe.global_batch_size) * epochs)


CONTEXT_BYTES = int(0.55 * GIB)
"""CUDA context and kernels of one process: 0.4 to 0.6 GiB, more on newer cards."""
NCCL_BYTES = int(0.35 * GIB)
"""Buffers of a communicator set: 0.2 to 0.5 GiB."""
SPARE = 0.08
"""90th percentile of the relative error of predicted reserved memory, in both directions."""
TOO_HIGH = 0.07
"""90th percentile of the relative error by which allocated memory is predicted too high."""
WORKSPACE_BYTES = {"hopper": 32 * MIB, "other": int(8.125 * MIB)}
"""cuBLAS's workspace in torch: `getChosenWorkspaceSize` in CUDABlas."""

Fits = Literal["yes", "tight", "no"]


@dataclass(frozen=True, slots=True)
class Fit:
    answer: Fits
    because: str
    memory: Memory
    """Replayed without a limit on device memory."""
    reserved_bytes: float
    """Its peak of reserved memory, with the learned factor."""
    outside_bytes: int
    """CUDA context and NCCL buffers, which the allocator does not manage."""
    usable_bytes: int

    @property
    def device_bytes(self) -> int:
        """The usage that `nvidia-smi` would show on a large enough GPU."""
        return round(self.reserved_bytes) + self.outside_bytes


def cublas_workspace_bytes(hardware: Hardware) -> int:
    return WORKSPACE_BYTES[
        "hopper" if hardware.fp8_tflops is not None and (hardware.bf16_tflops or 0) > 700 else "other"
    ]


def fit(
    trace: Trace, hardware: Hardware, *, segments: Segments = "expandable", reserved_factor: float = 1.0
) -> Fit:
    """Return whether a step fits a GPU: yes with `SPARE` to spare; no if reserved memory exceeds the GPU's by
    more than its error, or allocated memory by more than `TOO_HIGH`; tight between the two.

    `reserved_factor`: as in `fit_into`.
    """
    return fit_into(
        trace,
        hardware.usable_bytes,
        segments=segments,
        workspace_bytes=cublas_workspace_bytes(hardware),
        reserved_factor=reserved_factor,
    )


def fit_into(
    trace: Trace,
    usable_bytes: int,
    *,
    segments: Segments = "expandable",
    workspace_bytes: int = 0,
    reserved_factor: float = 1.0,
) -> Fit:
    """Return `fit` for the usable memory of a process, without other figures of the device.

    `segments`: of torch's allocator (`PYTORCH_CUDA_ALLOC_CONF`); `workspace_bytes`: as in `peak_memory`.
    `reserved_factor`: measured reserved memory relative to a plan, at least 1. It can turn `yes` into
    `tight`, and refuses nothing: an allocator that is short of memory returns what it caches.
    """
    outside = CONTEXT_BYTES + (NCCL_BYTES if trace.shapes.topology.world_size > 1 else 0)
    memory = peak_memory(trace, segments=segments, workspace_bytes=workspace_bytes)
    reserved, allocated = memory.peak_reserved_bytes, memory.peak_allocated_bytes
    measured = reserved * reserved_factor
    most = measured * (1 + SPARE) + outside
    least = max(reserved / (1 + SPARE), allocated / (1 + TOO_HIGH)) + outside
    if most <= usable_bytes:
        answer, because = "yes", f"{_gib(most)} including {SPARE:.0%} to spare, of {_gib(usable_bytes)}"
    elif least > usable_bytes:
        answer, because = "no", f"at least {_gib(least)}, of {_gib(usable_bytes)}"
    else:
        over = (
            "fits only if the prediction is too high"
            if measured + outside > usable_bytes
            else f"less than {SPARE:.0%} to spare"
        )
        answer, because = "tight", f"{_gib(measured + outside)} of {_gib(usable_bytes)}: {over}"
    return Fit(answer, because, memory, measured, outside, usable_bytes)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
