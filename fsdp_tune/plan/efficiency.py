"""How much of a card's figures a training step reaches: every constant of the timing model, and where it comes from.

Two kinds. Measured by others: the best matrix multiplication of each card (`matmul_tflops` of hardware.yaml), attention (the
FlashAttention papers). Fitted here: `FITTED` lists them; benchmarks/plan_timing.py prints how many, on which sources, and the errors on
sources that were not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_tune.plan.hardware import Hardware

MATMUL_SHARE_UNMEASURED = 0.8
"""Of the peak, where nobody has published a measurement for the card: the median of the NVIDIA cards that somebody has measured."""
ATTENTION_SHARE = {"ampere": (0.62, 0.52), "hopper": (0.36, 0.33)}
"""Forward and backward of FlashAttention-2, causal, head size 128, of the dense peak (arXiv:2307.08691, figures 5 and 7: up to 190–225
TFLOPS on A100; arXiv:2407.08608: 335–400 on H100, where it was not rewritten for the new units)."""
MASKED_SHARE = 0.6
"""Of the above, for kernels that take a mask (memory-efficient attention)."""

MATMUL_SUSTAINED = 0.88
BANDWIDTH_SHARE = 0.8
KERNEL_SECONDS = 3.0e-6
ISSUE_SECONDS = 6.0e-6
COLLECTIVE_ISSUE_SECONDS = 60.0e-6

FITTED = {
    "MATMUL_SUSTAINED": "a step's multiplications against the best one: other shapes, a hot card, a power limit",
    "BANDWIDTH_SHARE": "what elementwise kernels reach of the memory's bandwidth",
    "KERNEL_SECONDS": "start and tail of a kernel, on the device",
    "ISSUE_SECONDS": "Python, autograd and dispatcher for an operation, on the host",
    "COLLECTIVE_ISSUE_SECONDS": "FSDP's hooks around a collective, on the host",
}


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the datasheet's figures; seconds of fixed cost."""

    matmul: float
    attention_forward: float
    attention_backward: float
    bandwidth: float = BANDWIDTH_SHARE
    kernel_seconds: float = KERNEL_SECONDS
    issue_seconds: float = ISSUE_SECONDS
    collective_issue_seconds: float = COLLECTIVE_ISSUE_SECONDS
    is_measured: bool = True
    """Whether somebody has published a multiplication of this card."""


def efficiency_of(hardware: Hardware) -> Efficiency:
    """The constants for a card; a card that nobody measured gets those of its kind, and `is_measured` says so."""
    peak = hardware.bf16_tflops or hardware.fp16_tflops
    is_measured = hardware.matmul_tflops is not None and peak is not None
    share = hardware.matmul_tflops / peak if hardware.matmul_tflops is not None and peak is not None else MATMUL_SHARE_UNMEASURED
    # FlashAttention-2 uses the units of Ampere; on what came after, from 900 dense TFLOPS, it reaches a smaller share.
    forward, backward = ATTENTION_SHARE["hopper" if (peak or 0) > 900 else "ampere"]
    return Efficiency(share * MATMUL_SUSTAINED, forward, backward, is_measured=is_measured)
