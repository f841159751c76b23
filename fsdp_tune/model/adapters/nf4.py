"""Weights in 4 bits (NF4) as plain bytes: quantise rows, and compute the weights from the bytes again.

A weight [out, in] is two uint8 tensors, `packed` [out, in / 2] with two codes a byte, the first in the high bits, and `scales`
[out, in / 64 * bytes of a scale], the largest magnitude of each block in fp32 or bf16. A row depends on no other row, so FSDP2
shards both tensors by rows like any parameter, and a rank quantises its rows as one process would. They are integers because FSDP2
casts floating-point parameters to the compute dtype when it gathers them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from fsdp_tune.core.tensors.dtypes import NF4_BLOCK, NF4_SMALLEST_SCALE, NF4_VALUES

PACKED, SCALES = "weight_nf4", "weight_scales"
"""Names of the two parameters in their layer."""
_PIECE = 4096
"""Blocks that are converted at a time on a CPU: intermediate values of 1 MiB stay in its cache, which is 8 times as fast."""


@torch.no_grad()
def quantise(rows: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (packed, scales) of rows [n, in] of any float dtype; `in` is a multiple of 64, n may be 0.

    With fp32 scales the bytes are those of bitsandbytes (`quantize_4bit`, blocks of 64).
    """
    blocks = rows.reshape(-1, NF4_BLOCK)
    packed = torch.empty(len(blocks), NF4_BLOCK // 2, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(len(blocks), dtype=scale_dtype, device=rows.device)
    values = torch.tensor(NF4_VALUES)
    edges = ((values[1:] + values[:-1]) / 2).tolist()
    at_once = _PIECE if rows.device.type == "cpu" else max(1, len(blocks))
    for first in range(0, len(blocks), at_once):
        piece = blocks[first : first + at_once].float()
        scales[first : first + at_once] = largest = piece.abs().amax(dim=1).to(scale_dtype)
        scaled = piece * (1.0 / largest.float().clamp(min=NF4_SMALLEST_SCALE))[:, None]
        codes = torch.zeros_like(scaled, dtype=torch.uint8)
        for edge in edges:  # a comparison with each is twice as fast as a search
            codes += scaled > edge
        packed[first : first + at_once] = codes[:, ::2] << 4 | codes[:, 1::2]
    columns = rows.shape[1]
    return packed.view(len(rows), columns // 2), scales.view(torch.uint8).view(len(rows), columns // NF4_BLOCK * scale_dtype.itemsize)


def dequantise(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [out, in]: value times scale in fp32, rounded to `dtype`, as bitsandbytes computes them."""
    weight: torch.Tensor = torch.ops.fsdp_tune.dequantise_nf4(packed, scales, dtype)
    return weight


def elements(name: str, parameter: torch.Tensor) -> int:
    """Return the number of weights that a parameter holds: two a byte in 4 bits, and none in scales."""
    end = name.rpartition(".")[2]
    return 0 if end == SCALES else parameter.numel() * (2 if end == PACKED else 1)


def count_elements(named: Iterable[tuple[str, torch.Tensor]]) -> int:
    return sum(elements(name, parameter) for name, parameter in named)


# An operator of its own: torch.compile does not break at it, and the planner's trace sees no intermediate values.
_LIBRARY = torch.library.Library("fsdp_tune", "DEF")
_LIBRARY.define("dequantise_nf4(Tensor packed, Tensor scales, ScalarType dtype) -> Tensor")


def _blocks(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes [blocks, 32] and scales [blocks]."""
    blocks = packed.reshape(-1, NF4_BLOCK // 2)
    scale_dtype = torch.float32 if scales.numel() == 4 * len(blocks) else torch.bfloat16
    return blocks, scales.reshape(-1).view(scale_dtype)


@cache
def _pairs() -> torch.Tensor:
    """Return the two fp32 values of each byte, as one number of 8 bytes, so that one look-up finds both."""
    values, byte = torch.tensor(NF4_VALUES), torch.arange(256)
    return torch.stack((values[byte >> 4], values[byte & 15]), dim=1).view(torch.int64).view(-1)


def _on_cpu(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks, by_block = _blocks(packed, scales)
    weight = torch.empty(len(blocks), NF4_BLOCK, dtype=dtype)
    for first in range(0, len(blocks), _PIECE):
        piece = slice(first, first + _PIECE)
        values = _pairs().index_select(0, blocks[piece].reshape(-1).int()).view(torch.float32).view(-1, NF4_BLOCK)
        weight[piece] = values * by_block[piece, None].float()
    return weight.view(len(packed), 2 * packed.shape[1])


def in_one_formula(blocks: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights [blocks, 64]. Compiled, it is one kernel, which reads the bytes and writes the weights."""
    codes = torch.stack((blocks >> 4, blocks & 15), dim=-1).view(-1, NF4_BLOCK)
    return (values[codes.int()] * scales.float()[:, None]).to(dtype)


@cache
def _compiled() -> Any:
    return torch.compile(in_one_formula, dynamic=True, fullgraph=True)


@cache
def _values_on(device: torch.device) -> torch.Tensor:
    return torch.tensor(NF4_VALUES, device=device)


def _on_cuda(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks, by_block = _blocks(packed, scales)
    weight: torch.Tensor = _compiled()(blocks, by_block, _values_on(packed.device), dtype)
    return weight.view(len(packed), 2 * packed.shape[1])


def _elsewhere(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    blocks, by_block = _blocks(packed, scales)
    return in_one_formula(blocks, by_block, _values_on(packed.device), dtype).view(len(packed), 2 * packed.shape[1])


_LIBRARY.impl("dequantise_nf4", _on_cpu, "CPU")
_LIBRARY.impl("dequantise_nf4", _on_cuda, "CUDA")
_LIBRARY.impl("dequantise_nf4", _elsewhere, "CompositeExplicitAutograd")


@torch.library.register_fake("fsdp_tune::dequantise_nf4", lib=_LIBRARY)
def _shape(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG001  the operator's arguments
    return packed.new_empty((packed.shape[0], packed.shape[1] * 2), dtype=dtype)
