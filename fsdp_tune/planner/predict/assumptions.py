"""What a plan assumes, in sentences: kernels, allocator, and figures of the GPU that no source gives."""

from __future__ import annotations

from fsdp_tune.core.families import expert_count
from fsdp_tune.core.gpus import CPU, Hardware
from fsdp_tune.planner.predict.efficiency import Efficiency
from fsdp_tune.planner.predict.mixture import LOADS_ASSUMED
from fsdp_tune.planner.predict.roofline import HOST_BYTES_PER_SECOND
from fsdp_tune.planner.trace_format import Segments, Trace
from fsdp_tune.recipe.schema.recipe import Recipe


def assumptions_of(
    recipe: Recipe, trace: Trace, hardware: Hardware, efficiency: Efficiency, segments: Segments
) -> list[str]:
    """Return what a plan assumes, one sentence each."""
    version = trace.facts.flash_version
    attention = [
        f"FlashAttention {version}" if kernel == "flash" else kernel
        for kernel in trace.facts.attention or ["unknown"]
    ]
    found = [
        f"attention kernels: {', '.join(attention)}",
        f"allocator: {'expandable segments' if segments == 'expandable' else 'plain segments'}",
        "every row is as long as data.max_length",
    ]
    found += filter(None, (efficiency.calibration, efficiency.memory_calibration))
    if not efficiency.is_measured and hardware.name != CPU:
        found.append(
            f"no measured matrix multiplication of {hardware.name} is published; the share of its "
            "peak is that of other GPUs"
        )
    experts, shards = expert_count(trace.facts.config), trace.shapes.shards
    if experts > 1 and experts % shards and not trace.facts.experts_inside and trace.shapes.ep_size == 1:
        fullest = -(-experts // shards)
        found.append(
            f"stacked experts are not split: the plan is for the fullest of {shards} ranks, with "
            f"{fullest} of a layer's {experts}"
        )
    if trace.shapes.ep_size > 1:
        found.append(LOADS_ASSUMED)
    if any(name.startswith("host ") for name in trace.op_names):
        found.append(
            f"host memory bandwidth is {HOST_BYTES_PER_SECOND / 1e9:g} GB/s, shared by the ranks of a machine"
        )
    if recipe.kernels.compile:
        found.append(
            "a compiled layer runs one kernel between two matrix products, and uses as much memory "
            "as an eager one"
        )
    elif "_scaled_mm" in trace.op_names:
        found.append(
            "each cast to fp8 is a separate pass over memory; compiled layers fuse casts, so with "
            "`kernels.compile` a step is shorter",
        )
    if hardware.name == CPU:
        found.append("allocator and attention kernel of the host use as much memory as CUDA's")
    if hardware.usable_gib is None:
        found.append(
            f"the usable memory of {hardware.name} is unknown: {hardware.memory_gb:g} × 10⁹ bytes are assumed"
        )
    return found
