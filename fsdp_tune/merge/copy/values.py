"""Values of a tensor of a merge: converted between float types, rounded to 4 bits, NaN and infinity found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from fsdp_tune.core.tensors.dtypes import NF4_BLOCK, NF4_SMALLEST_SCALE, NF4_VALUES, DType

Array = np.ndarray[Any, np.dtype[Any]]
# The largest finite magnitude of the 16-bit floats, as an integer: comparing bits is 10 times as fast as
# `isfinite` on them.
_LARGEST_FINITE_BITS = {"bfloat16": 0x7F7F, "float16": 0x7BFF}
_FLOATS_8_BIT = (
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2fnuz,
)
_NF4 = np.array(NF4_VALUES, np.float32)
_NF4_EDGES = (_NF4[1:] + _NF4[:-1]) / np.float32(2)
_NF4_PIECE = 1024
"""Blocks at a time: intermediate values of 256 KiB stay in the core's cache."""
_NF4_SCALE_DTYPES: dict[str, np.dtype[np.generic]] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(slots=True)
class NonFinite:
    """Counts of one tensor: `nan` and `inf` as they were read, `overflow` finite values that the target type
    cannot hold."""

    nan: int = 0
    inf: int = 0
    overflow: int = 0

    def __bool__(self) -> bool:
        return bool(self.nan or self.inf or self.overflow)

    def __str__(self) -> str:
        parts = [(self.nan, "NaN"), (self.inf, "infinite"), (self.overflow, "too large for the target dtype")]
        return ", ".join(f"{count:,} {word}" for count, word in parts if count)


def all_finite(values: Array, scratch: Array) -> bool:
    """Return whether every element is finite. `scratch` has at least as many bytes as `values` and is
    overwritten."""
    name = values.dtype.name
    if name in _LARGEST_FINITE_BITS:
        bits = values.view(np.uint16)
        magnitudes = scratch[: bits.nbytes].view(np.uint16)
        np.bitwise_and(bits, 0x7FFF, out=magnitudes)
        return int(magnitudes.max(initial=0)) <= _LARGEST_FINITE_BITS[name]
    if values.dtype.kind in "fc" or values.dtype.type in _FLOATS_8_BIT:
        # Into existing memory: a new array would take fresh pages from the kernel.
        return bool(np.isfinite(values, out=scratch[: values.size].view(np.bool_)).all())
    return True


def count_non_finite(values: Array, counts: NonFinite) -> None:
    counts.nan += int(np.count_nonzero(np.isnan(values)))
    # The 8-bit floats of the `fn` kinds have no infinity, and numpy's isinf is not defined for them.
    counts.inf += int(np.count_nonzero(~np.isfinite(values))) - int(np.count_nonzero(np.isnan(values)))


def convert(values: Array, target: Array) -> None:
    """Round to nearest, ties to even, as torch's `.to` does: float64 goes to the 16-bit types through
    float32.

    NaN stays NaN; values that are too large become infinite, and the caller counts them.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.dtype == np.float64 and target.dtype.itemsize == 2
        np.copyto(target, values.astype(np.float32) if narrow else values, casting="unsafe")


def rounded_to_nf4(values: Array, scales_in: Literal["fp32", "bf16"]) -> Array:
    """Return whole blocks of values, quantised and dequantised, in fp32: what `model.adapters.nf4` makes of
    them."""
    rounded = values.astype(np.float32)
    blocks = rounded.reshape(-1, NF4_BLOCK)
    for first in range(0, len(blocks), _NF4_PIECE):
        piece = blocks[first : first + _NF4_PIECE]
        scales = np.abs(piece).max(axis=1).astype(_NF4_SCALE_DTYPES[scales_in]).astype(np.float32)
        scaled = piece * (np.float32(1.0) / np.maximum(scales, np.float32(NF4_SMALLEST_SCALE)))[:, None]
        codes = np.zeros(scaled.shape, np.uint8)
        for edge in _NF4_EDGES:
            codes += scaled > edge
        np.multiply(_NF4[codes], scales[:, None], out=piece)
    return rounded


def is_checked(dtype: DType) -> bool:
    """Return whether values of this type can be NaN or infinite."""
    return dtype.numpy.kind in "fc" or dtype.numpy.type in (ml_dtypes.bfloat16, *_FLOATS_8_BIT)
