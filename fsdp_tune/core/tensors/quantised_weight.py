"""A quantised weight of files: the tensors that it is decoded from, by a rule, and the arithmetic of each
rule.

`scaled`: codes in fp8 or int8, times the scale of their block, row or tensor (DeepSeek, Qwen FP8, MXFP8;
compressed-tensors `float-quantized`, `int-quantized`, `naive-quantized`). `packed`: integers of 2, 4 or 8
bits in words of 32, less the zero point of their group, times its scale (compressed-tensors
`pack-quantized`). `fp4`: two values of 4 bits a byte, times the scale of their group (experts of DeepSeek
V4). `nvfp4`: the same with scales in fp8, which have a scale of the tensor (NVIDIA's ModelOpt;
compressed-tensors `nvfp4-pack-quantized`). `mxfp4`: stacks of experts, times a power of two for each 32
(gpt-oss). `gptq`, `awq`: integers in words of 32 with zero points, [in, out], by groups of inputs. Pure, in
numpy: ranks and merges decode the same values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.tensors.dtypes import Shape

Array = np.ndarray[Any, np.dtype[Any]]
Rule = Literal["scaled", "packed", "fp4", "nvfp4", "mxfp4", "gptq", "awq"]

FLOATS = ("F64", "F32", "F16", "BF16")
MXFP4_BLOCK = 32
_BIAS_OF_EXPONENT = 127
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_ORDER_OF_AWQ = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Position in a word of AWQ, in units of four bits, of each of eight consecutive outputs."""
_HINT_OF_GROUPS = "download or copy the files again, or name the model in 16 bits"


@dataclass(frozen=True, slots=True)
class StoredType:
    """Type (safetensors' name) and shape of a tensor of a file."""

    dtype: str
    shape: Shape

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type that needs no scale."""
        return self.dtype in FLOATS


@dataclass(frozen=True, slots=True)
class Unread:
    """A tensor that no rule reads, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Encoded:
    """A weight `name` of `shape`, as plain files have it, and the tensors that it is decoded from."""

    name: str
    shape: Shape
    rule: Rule
    codes: str
    codes_shape: Shape
    codes_dtype: str
    scales: str
    zero_points: str | None = None
    tensor_scale: str | None = None
    """One number for the complete tensor, by which its scales are multiplied (`nvfp4`)."""
    divides: bool = False
    """Divide the scales by `tensor_scale` instead."""
    block: Shape = ()
    """Elements of the weight that share a scale, by dimension. Not used with `groups`, nor by `mxfp4`."""
    bits: int = 8
    """Of one value (`packed`, `gptq`, `awq`)."""
    adds_one: bool = False
    """Add one to the stored zero points (`gptq`)."""
    groups: str | None = None
    """Group of each input, [in]; without it, groups are of consecutive inputs."""
    rounds_to_scales: bool = False
    """Round the product to the type of the scales, as compressed-tensors does (`_dequantize`)."""
    unused: tuple[str, ...] = ()
    """Further tensors of the files that belong to the weight and are not needed to decode it."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all tensors of the files that belong to the weight."""
        return (self.codes, self.scales, *filter(None, self.others), *self.unused)

    @property
    def others(self) -> tuple[str | None, ...]:
        """Names of the tensors that `decode` takes after codes and scales, in its order."""
        return self.zero_points, self.tensor_scale, self.groups

    @property
    def is_read_in_full(self) -> bool:
        """Whether each box is decoded from all codes: a row of the weight is a column of its words."""
        return self.rule in ("gptq", "awq")

    def box_of_codes(self, start: Sequence[int], sizes: Sequence[int]) -> tuple[Shape, Shape]:
        """Return (start, sizes) of the codes of a box of the weight."""
        if self.is_read_in_full:
            return (0,) * len(self.codes_shape), self.codes_shape
        if self.rule == "scaled":
            return tuple(start), tuple(sizes)
        if self.rule in ("packed", "fp4", "nvfp4"):
            per_word = self._values_of_a_code
            first, last = start[-1] // per_word, -(-(start[-1] + sizes[-1]) // per_word)
            return (*start[:-1], first), (*sizes[:-1], last - first)
        first, last = start[1] // MXFP4_BLOCK, -(-(start[1] + sizes[1]) // MXFP4_BLOCK)
        return (start[0], start[2], first, 0), (sizes[0], sizes[2], last - first, MXFP4_BLOCK // 2)

    @property
    def _values_of_a_code(self) -> int:
        return 32 // self.bits if self.rule == "packed" else 2

    def decode(
        self,
        start: Sequence[int],
        sizes: Sequence[int],
        codes: Array,
        scales: Array,
        zero_points: Array | None = None,
        tensor_scale: Array | None = None,
        groups: Array | None = None,
    ) -> Array:
        """Return a box of the weight in fp32. `codes`: those of `box_of_codes`, of `codes_dtype`; the other
        tensors in full.

        Raises: usage error for a `g_idx` with groups that have no scales, or that are of different sizes
        (`packed`, `scaled`).
        """
        if self.is_read_in_full:
            assert zero_points is not None
            return self._decode_by_inputs(start, sizes, codes, scales, zero_points, groups)
        if self.rule == "mxfp4":
            return self._decode_mxfp4(start, sizes, codes, scales)
        if self.rule in ("packed", "fp4", "nvfp4"):
            values = (
                _unpacked(codes, self.bits) if self.rule == "packed" else _unpacked_fp4(codes.view(np.uint8))
            )
            skipped = start[-1] % self._values_of_a_code
            values = values[..., skipped : skipped + sizes[-1]]
        else:
            values = _as_float(codes)
        by_dimension = [
            np.arange(at, at + size) // step for at, size, step in zip(start, sizes, self.block, strict=True)
        ]
        if groups is not None:
            by_dimension[-1] = self._ordered_groups(groups)[start[-1] : start[-1] + sizes[-1]]
        index = np.ix_(*by_dimension)
        if zero_points is not None:
            values = values - self._zeros(zero_points, index)
        factors = _as_scales(_grid(scales, self.shape)[index])
        if tensor_scale is not None:
            of_tensor = _as_scales(tensor_scale).reshape(())
            factors = factors / of_tensor if self.divides else factors * of_tensor
        return self._rounded(values * factors, scales)

    def _rounded(self, product: Array, scales: Array) -> Array:
        return (
            product.astype(scales.dtype).astype(np.float32)
            if self.rounds_to_scales and scales.dtype.itemsize == 2
            else product
        )

    def _zeros(self, stored: Array, index: tuple[Array, ...]) -> Array:
        """Return the zero point of each element of a box. `pack-quantized` packs those of a column in words,
        the first in the lowest bits; `index`: of rows and columns in the scales."""
        if stored.dtype != np.int32:
            return _grid(stored, self.shape)[index].astype(np.float32)
        rows, columns = index
        at, shifts = divmod(rows, 32 // self.bits)
        words = stored.view(np.uint32)[at[:, 0]] >> (shifts * self.bits).astype(np.uint32)
        return _as_signed(words & np.uint32((1 << self.bits) - 1), self.bits)[:, columns[0]]

    def _ordered_groups(self, groups: Array) -> Array:
        """Return the group of each input (`_process_group` of compressed-tensors: -1 means that the order was
        not used).

        Raises: usage error for groups of different sizes, which its sort would take apart.
        """
        consecutive = np.arange(self.shape[1]) // self.block[1]
        if (groups == -1).any():
            return consecutive
        if not np.array_equal(np.sort(groups), consecutive):
            message = (
                f"`{self.groups}` does not have {self.block[1]} inputs in each of "
                f"{consecutive[-1] + 1} groups"
            )
            raise usage_error("model-quantised", message, hint=_HINT_OF_GROUPS)
        return groups

    def _decode_by_inputs(
        self,
        start: Sequence[int],
        sizes: Sequence[int],
        codes: Array,
        scales: Array,
        zero_points: Array,
        groups: Array | None,
    ) -> Array:
        """(code - zero point) * scale, each zero point and scale of a group of inputs and an output
        (`dequantize_weight` of GPTQModel, `dequantize_gemm` of AutoAWQ). `codes`: GPTQ packs inputs, [in *
        bits / 32, out], and AWQ outputs, [in, out * bits / 32]."""
        outputs, inputs = (slice(at, at + size) for at, size in zip(start, sizes, strict=True))
        if self.rule == "gptq":
            values = self._from_words(np.ascontiguousarray(codes[:, outputs].T), inputs)
        else:
            values = self._from_words(codes[inputs], outputs).T
        words = zero_points.view(np.uint32) + np.uint32(self._ones) if self.adds_one else zero_points
        of_group = self._group_of_each(groups, len(scales))[inputs]
        zeros, factors = (
            self._from_words(words, outputs)[of_group].T,
            _as_scales(scales[:, outputs])[of_group].T,
        )
        return self._rounded((values - zeros) * factors, scales)

    def _group_of_each(self, groups: Array | None, count: int) -> Array:
        """Return the group of each input. A `g_idx` of zeros for several groups was not filled: kernels that
        need no order (exllama) read consecutive groups then. Raises: usage error for groups that have no
        scales."""
        inputs = self.shape[1]
        is_unfilled = groups is not None and count > 1 and not groups.any()
        if groups is None or (is_unfilled and self.block[1] * count >= inputs):
            return np.arange(inputs) // self.block[1]
        if is_unfilled or groups.min() < 0 or groups.max() >= count:
            message = (
                f"`{self.groups}` has groups from {groups.min()} to {groups.max()}, and there are scales "
                f"for {count}"
            )
            raise usage_error("model-quantised", message, hint=_HINT_OF_GROUPS)
        return groups

    def _from_words(self, words: Array, part: slice) -> Array:
        """Return columns `part` of the values of words [rows, columns * bits / 32] in fp32."""
        per_word = 32 // self.bits
        first, last = part.start // per_word, -(-part.stop // per_word)
        values = _integers(words[:, first:last], self.bits)
        if self.rule == "awq":
            values = values.reshape(len(values), -1, per_word)[..., _ORDER_OF_AWQ].reshape(len(values), -1)
        skipped = part.start - first * per_word
        return values[:, skipped : skipped + part.stop - part.start].astype(np.float32)

    @property
    def _ones(self) -> int:
        """A word with one in each of its values: GPTQModel subtracts it when it saves, and borrows between
        them (`sym: false`)."""
        return sum(1 << at for at in range(0, 32, self.bits))

    def _decode_mxfp4(self, start: Sequence[int], sizes: Sequence[int], codes: Array, scales: Array) -> Array:
        first, box = self.box_of_codes(start, sizes)
        part = tuple(slice(at, at + size) for at, size in zip(first[:3], box[:3], strict=True))
        pairs = _unpacked_fp4(codes).reshape(*box[:3], MXFP4_BLOCK)
        values = np.ldexp(pairs, scales[part].astype(np.int32)[..., None] - _BIAS_OF_EXPONENT)
        rows = values.reshape(box[0], box[1], -1).transpose(0, 2, 1)
        skipped = start[1] % MXFP4_BLOCK
        return np.ascontiguousarray(rows[:, skipped : skipped + sizes[1]])


def _as_float(codes: Array) -> Array:
    """Upcast 8-bit codes by a table: ml_dtypes converts one at a time."""
    if codes.dtype == np.int8:
        return codes.astype(np.float32)
    return np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)[codes.view(np.uint8)]


def _as_scales(scales: Array) -> Array:
    """Return scales in fp32; bytes are exponents of two."""
    if scales.dtype == ml_dtypes.float8_e4m3fn:
        return _as_float(scales)
    if scales.dtype == np.uint8 or scales.dtype == ml_dtypes.float8_e8m0fnu:
        return np.ldexp(np.float32(1), scales.view(np.uint8).astype(np.int32) - _BIAS_OF_EXPONENT)
    return scales.astype(np.float32)


def _integers(words: Array, bits: int) -> Array:
    """Return the integers of words of 32 bits, the lowest bits first: [..., n] as [..., n * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return values.reshape(*words.shape[:-1], -1)


def _unpacked(words: Array, bits: int) -> Array:
    """Return the signed integers of int32 words in fp32."""
    return _as_signed(_integers(words, bits), bits)


def _as_signed(values: Array, bits: int) -> Array:
    """Return integers in fp32, less the offset that compressed-tensors adds before it packs them."""
    return values.astype(np.float32) - np.float32(1 << (bits - 1))


def _unpacked_fp4(codes: Array) -> Array:
    """Return the values of bytes, the lower four bits first: [..., n] as [..., 2 n] in fp32."""
    return np.stack([_FP4[codes & 0x0F], _FP4[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)


def _grid(scales: Array, shape: Shape) -> Array:
    return scales.reshape(_grid_shape(scales.shape, shape) or scales.shape)


def _grid_shape(scales: Shape, shape: Shape) -> Shape | None:
    """Return the shape of scales with as many dimensions as the weight; None if they do not fit."""
    if math.prod(scales) == 1:
        return (1,) * len(shape)
    # FP8_PB_WO of ModelOpt: [rows, 1, columns, 1]
    if len(scales) == 2 * len(shape) and set(scales[1::2]) == {1}:
        scales = scales[::2]
    if len(scales) == 1 and scales[0] == shape[0]:
        return (scales[0], *(1,) * (len(shape) - 1))
    return scales if len(scales) == len(shape) else None


def blocks_of(shape: Shape, scales: Shape, configured: Sequence[int]) -> Shape | None:
    """Return the elements that share a scale, by dimension; None if the scales do not fit. `configured`: of
    the last dimensions.

    The last block may be shorter: 576 rows have 5 scales for blocks of 128.
    """
    grid = _grid_shape(scales, shape)
    if grid is None:
        return None
    sizes = [0] * (len(shape) - len(configured)) + list(configured)
    found: list[int] = []
    for size, count, wanted in zip(shape, grid, sizes[-len(shape) :], strict=True):
        if wanted > 0 and count == -(-size // wanted):
            found.append(wanted)
        elif count > 0 and size % count == 0:
            found.append(max(size // count, 1))
        else:
            return None
    return tuple(found)
