"""The element types of stored tensors: torch's name, safetensors' name, bytes, and the numpy type; and where
the elements are in a file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """`name` is torch's name without `torch.`; `converts`: whether `--dtype` applies to it."""

    name: str
    safetensors: str
    item_bytes: int
    numpy: np.dtype[np.generic]
    converts: bool = False


def _dtype(name: str, safetensors: str, kind: type, *, converts: bool = False) -> DType:
    numpy = np.dtype(kind)
    return DType(name, safetensors, numpy.itemsize, numpy, converts)


# fp8 values and integers have no meaning without their scales, so `--dtype` leaves them as they are.
DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        _dtype("float64", "F64", np.float64, converts=True),
        _dtype("float32", "F32", np.float32, converts=True),
        _dtype("float16", "F16", np.float16, converts=True),
        _dtype("bfloat16", "BF16", ml_dtypes.bfloat16, converts=True),
        _dtype("float8_e4m3fn", "F8_E4M3", ml_dtypes.float8_e4m3fn),
        _dtype("float8_e5m2", "F8_E5M2", ml_dtypes.float8_e5m2),
        _dtype("float8_e4m3fnuz", "F8_E4M3FNUZ", ml_dtypes.float8_e4m3fnuz),
        _dtype("float8_e5m2fnuz", "F8_E5M2FNUZ", ml_dtypes.float8_e5m2fnuz),
        _dtype("float8_e8m0fnu", "F8_E8M0", ml_dtypes.float8_e8m0fnu),
        _dtype("complex64", "C64", np.complex64),
        _dtype("int64", "I64", np.int64),
        _dtype("int32", "I32", np.int32),
        _dtype("int16", "I16", np.int16),
        _dtype("int8", "I8", np.int8),
        _dtype("uint64", "U64", np.uint64),
        _dtype("uint32", "U32", np.uint32),
        _dtype("uint16", "U16", np.uint16),
        _dtype("uint8", "U8", np.uint8),
        _dtype("bool", "BOOL", np.bool_),
    )
}
OF_SAFETENSORS: dict[str, DType] = {dtype.safetensors: dtype for dtype in DTYPES.values()}
OF_OPTION: dict[str, DType] = {
    "bf16": DTYPES["bfloat16"],
    "fp16": DTYPES["float16"],
    "fp32": DTYPES["float32"],
}

# `torch.FloatStorage` and its like, the element types that `torch.save` writes in its older layout.
OF_STORAGE: dict[str, DType] = {
    "DoubleStorage": DTYPES["float64"],
    "FloatStorage": DTYPES["float32"],
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "LongStorage": DTYPES["int64"],
    "IntStorage": DTYPES["int32"],
    "ShortStorage": DTYPES["int16"],
    "CharStorage": DTYPES["int8"],
    "ByteStorage": DTYPES["uint8"],
    "BoolStorage": DTYPES["bool"],
    "ComplexFloatStorage": DTYPES["complex64"],
}

# NF4, the 4-bit NormalFloat of QLoRA (arXiv:2305.14314, appendix E): a weight is one of 16 values times the
# scale of its block.
NF4_BLOCK = 64
"""Weights of one row that share a scale, as in bitsandbytes."""
NF4_VALUES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""In fp32, by code (bitsandbytes 0.50, `functional.get_4bit_type`). A weight gets the nearest one, the lower
one between two."""
NF4_SMALLEST_SCALE = 1e-38
"""Bound of a scale in the division, so that a block of zeros is not divided by zero."""


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements: the first at byte `first_byte` of `file`, the others by `strides` (in elements).

    `storage_start` and `storage_bytes` bound the block of bytes that `crc32` (None: not recorded) was taken
    over.
    """

    file: str
    first_byte: int
    strides: Shape
    storage_start: int
    storage_bytes: int
    crc32: int | None = None


def row_major(shape: Shape) -> Shape:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_row_major(sizes: Shape, strides: Shape) -> bool:
    """Return whether elements are contiguous in row-major order. Strides of dimensions of size 1 are
    ignored."""
    return math.prod(sizes) == 0 or all(
        size == 1 or stride == wanted
        for size, stride, wanted in zip(sizes, strides, row_major(sizes), strict=True)
    )
