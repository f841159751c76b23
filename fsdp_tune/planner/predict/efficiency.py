"""What a GPU reaches of its peak figures in a training step, and the fixed costs of kernels and of the host.
Pure.

Every constant is here, or in `predict.roofline` if it is of one kind of operation, with its source. There are
three kinds.
Published: the fastest matrix multiplication of each GPU (`matmul_tflops` of hardware.yaml), attention (the
FlashAttention papers).
Assumed: fixed costs of kernels and of the host. Fitted: `FITTED` lists them; benchmarks/plan.py prints their
number, their sources, and the errors on other sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_tune.core.flash_kernels import FLASH_ATTENTION
from fsdp_tune.core.gpus import Hardware

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


class UnknownFigure(Exception):
    """A required figure of the GPU is unknown; the message names it."""
