"""Decide whether a recipe fits a GPU, from reserved memory, memory outside the allocator, and the error of the prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdp_tune.core.gpus import Hardware
from fsdp_tune.core.units import GIB, MIB
from fsdp_tune.planner.predict.memory import Memory, peak_memory
from fsdp_tune.planner.trace_format import Segments, Trace

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
    outside_bytes: int
    """CUDA context and NCCL buffers, which the allocator does not manage."""
    usable_bytes: int

    @property
    def device_bytes(self) -> int:
        """The usage that `nvidia-smi` would show on a large enough GPU."""
        return self.memory.peak_reserved_bytes + self.outside_bytes


def workspace_bytes(hardware: Hardware) -> int:
    return WORKSPACE_BYTES["hopper" if hardware.fp8_tflops is not None and (hardware.bf16_tflops or 0) > 700 else "other"]


def fit(trace: Trace, hardware: Hardware, *, segments: Segments = "expandable") -> Fit:
    """Return whether a step fits a GPU: yes with `SPARE` to spare; no if reserved memory exceeds the GPU's by more than its error, or
    allocated memory by more than `TOO_HIGH`; tight between the two."""
    return fit_into(trace, hardware.usable_bytes, segments=segments, workspace_bytes=workspace_bytes(hardware))


def fit_into(trace: Trace, usable: int, *, segments: Segments = "expandable", workspace_bytes: int = 0) -> Fit:
    """Return `fit` for the usable memory of a process, in bytes, without other figures of the device."""
    outside = CONTEXT_BYTES + (NCCL_BYTES if trace.shapes.world_size > 1 else 0)
    memory = peak_memory(trace, segments=segments, workspace_bytes=workspace_bytes)
    reserved, allocated = memory.peak_reserved_bytes, memory.peak_allocated_bytes
    most = reserved * (1 + SPARE) + outside
    least = max(reserved / (1 + SPARE), allocated / (1 + TOO_HIGH)) + outside
    if most <= usable:
        answer, because = "yes", f"{_gib(most)} including {SPARE:.0%} to spare, of {_gib(usable)}"
    elif least > usable:
        answer, because = "no", f"at least {_gib(least)}, of {_gib(usable)}"
    else:
        over = "fits only if the prediction is too high" if reserved + outside > usable else f"less than {SPARE:.0%} to spare"
        answer, because = "tight", f"{_gib(reserved + outside)} of {_gib(usable)}: {over}"
    return Fit(answer, because, memory, outside, usable)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
