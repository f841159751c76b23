"""How much of a card's figures a training step reaches: every constant of the timing model, and where it comes from.

Three kinds. Measured by others: the best matrix multiplication of each card (`matmul_tflops` of hardware.yaml), attention (the
FlashAttention papers). Assumed: fixed costs of kernels and of the host. Fitted: `FITTED` lists them; benchmarks/plan.py prints how
many, on which sources, and the errors on sources that they were not fitted on.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_tune.planner.hardware.gpus import Hardware

MATMUL_SHARE_UNMEASURED = 0.8
"""Of the peak, where nobody has published a measurement for the card: about the middle of the NVIDIA cards that somebody has measured,
0.78 to 0.87."""
ATTENTION_SHARE = {"ampere": (0.62, 0.52), "hopper": (0.36, 0.33)}
"""Forward and backward of FlashAttention-2, causal, head size 128, of the dense peak, in benchmarks of its own (arXiv:2307.08691, figures 5
and 7: 190 to 225 TFLOPS on A100; arXiv:2407.08608: 335 to 400 on H100, for whose new units it was not rewritten)."""
MASKED_SHARE = 0.6
"""Of that, for kernels that take a mask (memory-efficient attention)."""
KERNEL_SECONDS = 3.0e-6
"""Start and tail of a kernel, on the device."""
ISSUE_SECONDS = 6.0e-6
"""Python, autograd and dispatcher for an operation, on the host."""
COLLECTIVE_ISSUE_SECONDS = 60.0e-6
"""FSDP's hooks around a collective, on the host."""

MATMUL_SUSTAINED = {"ampere": 0.93, "hopper": 0.75}
ATTENTION_SUSTAINED = {"ampere": 0.56, "hopper": 0.46}
BANDWIDTH_SHARE = 0.75
OVERLAP_COST = 0.3

FITTED = {
    "MATMUL_SUSTAINED ampere": "a step's multiplications against the best one: other shapes, a hot card, a power limit",
    "MATMUL_SUSTAINED hopper": "the same; at full load these cards run into their power limit sooner",
    "ATTENTION_SUSTAINED ampere": "attention in training against its own benchmark",
    "ATTENTION_SUSTAINED hopper": "the same",
    "BANDWIDTH_SHARE": "what elementwise kernels reach of the memory's bandwidth",
    "OVERLAP_COST": "what a second of communication costs the compute beside it: NCCL's kernels take units and bandwidth",
}
"""Fitted on the sources that benchmarks/plan.py names, each source with the same weight."""


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
    overlap_cost: float = OVERLAP_COST
    is_measured: bool = True
    """Whether somebody has published a multiplication of this card."""


def efficiency_of(hardware: Hardware) -> Efficiency:
    """The constants for a card; a card that nobody measured gets those of its kind, and `is_measured` says so."""
    peak = hardware.bf16_tflops or hardware.fp16_tflops
    is_measured = hardware.matmul_tflops is not None and peak is not None
    share = hardware.matmul_tflops / peak if hardware.matmul_tflops is not None and peak is not None else MATMUL_SHARE_UNMEASURED
    # FlashAttention-2 uses the units of Ampere; on what came after, from 700 dense TFLOPS, it reaches a smaller share.
    kind = "hopper" if (peak or 0) > 700 else "ampere"
    forward, backward = (value * ATTENTION_SUSTAINED[kind] for value in ATTENTION_SHARE[kind])
    return Efficiency(share * MATMUL_SUSTAINED[kind], forward, backward, is_measured=is_measured)
