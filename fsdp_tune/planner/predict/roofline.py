"""The time of a traced operation: the larger of its computation and its memory traffic, at the shares of a
GPU's peak figures that it reaches (a roofline), plus the fixed cost of its kernels. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.families import CHOSEN_EXPERTS, expert_count
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.planner.predict.efficiency import Efficiency, UnknownFigure
from fsdp_tune.planner.predict.mixture import GROUPED_PRODUCT
from fsdp_tune.planner.trace_format import DTYPES, Records, Trace

TILE_TOKENS = 128
"""Tokens that a query attends to in vain: half of the tile on the diagonal, and the start of the pipeline.
With it the forward of rows of 512 to 4,096 tokens has 0.67 to 0.94 of the share of long ones; measured on
H100 0.57 to 0.95 (arXiv:2407.08608, figure 5)."""
MASKED_SHARE = 0.6
"""Factor on the share of attention for kernels with a mask (memory-efficient attention)."""
GROUPED_TILE_ROWS, GROUPED_TILE_ROWS_OF_BLACKWELL, FEW_ROWS = 128, 256, 128
"""Rows of a tile of torch's grouped product; groups of at most `FEW_ROWS` have tiles of half of it
(`GroupMM.cu`, `dispatch_bf16_grouped_kernel_on_tile_size`)."""
PLAIN, FLASH, MASKED, TO_HOST, ON_HOST, GROUPED = range(6)
HOST_BYTES_PER_SECOND = 200e9
"""Assumed bandwidth, listed in every plan with work on the host: half of that of two sockets with eight
channels of DDR4-3200 each (410 GB/s), shared by the ranks of a machine."""
Seconds = npt.NDArray[np.float64]


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
