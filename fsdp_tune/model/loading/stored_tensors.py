"""Tensors in safetensors files: where their elements are, and reading of consecutive ones.

The bytes are read, not mapped: pages of a mapped file count as memory of the rank that accessed them, and a file that is not
cached would be read in page faults of a few pages.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS
from fsdp_tune.core.tensors.encoded import Encoded
from fsdp_tune.core.tensors.encodings import Encodings
from fsdp_tune.core.tensors.file_formats import DamagedHeader, HeaderEntry, read_header

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class NestedScales:
    """Scales of `columns` blocks a row that are quantised themselves (`bnb_4bit_use_double_quant`)."""

    columns: int
    values: torch.Tensor
    """[256] in fp32, by code."""
    of_blocks: torch.Tensor
    """In fp32, for `blocksize` codes each."""
    blocksize: int
    offset: float

    def of_rows(self, first: int, codes: torch.Tensor) -> torch.Tensor:
        """Return the scales of rows [n, columns] of codes, from row `first` on, in fp32 as bytes [n, columns * 4]."""
        index = torch.arange(codes.numel()) + first * self.columns
        scales = self.values[codes.reshape(-1).int()] * self.of_blocks[index // self.blocksize] + self.offset
        return scales.view(torch.uint8).view(len(codes), -1)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file: its elements are stored row-major from byte `start`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nested: NestedScales | None = None
    """Scales in 8 bits, of which a rank makes those of `shape`."""
    codes: Codes | None = None
    """Codes of a quantised weight, of which a rank makes `shape` in fp32."""

    @property
    def row_elements(self) -> int:
        """Elements of a row in the file; none if a row of the weight has codes in many of them."""
        if self.codes is not None and self.codes.in_full is not None:
            return 0
        if self.codes is not None:
            return math.prod(self.codes.weight.codes_shape[1:])
        return math.prod(self.shape[1:]) if self.nested is None else self.nested.columns

    @property
    def read_dtype(self) -> torch.dtype:
        """Type of the elements in the file."""
        return self.dtype if self.codes is None else DTYPES[self.codes.weight.codes_dtype]

    def rows_in(self, buffer_bytes: int) -> int:
        """Return the number of rows to read at a time, of which those in the file, or the decoded ones, take `buffer_bytes` at most."""
        row_bytes = self.row_elements * self.read_dtype.itemsize or math.prod(self.shape[1:]) * self.dtype.itemsize
        return max(1, buffer_bytes // row_bytes)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file; `nested` scales are not in it."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Codes:
    """What decodes the codes of a quantised weight: its rule, and the further tensors that it needs."""

    weight: Encoded
    scales: Stored
    others: tuple[Stored | None, ...]
    """As `weight.others`."""
    in_full: Stored | None
    """The codes, if no rows of them can be read alone (`is_read_in_full`)."""

    def of_rows(self, first: int, count: int, codes: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight in fp32, flat, from their codes."""
        start, sizes = (first, *(0,) * (len(self.weight.shape) - 1)), (count, *self.weight.shape[1:])
        if self.in_full is not None:
            array = _read_array(self.in_full)
        else:
            _, shape = self.weight.box_of_codes(start, sizes)
            array = codes.view(torch.uint8).numpy().view(OF_SAFETENSORS[self.weight.codes_dtype].numpy).reshape(shape)
        others = (None if stored is None else _read_array(stored) for stored in self.others)
        return torch.from_numpy(self.weight.decode(start, sizes, array, _read_array(self.scales), *others)).reshape(-1)


@contextmanager
def decoding() -> Iterator[None]:
    """Read weights that are decoded. Their scales and codes are in memory up to the end of this context, and not for a later one: files
    may be other ones then."""
    try:
        yield
    finally:
        _read_array.cache_clear()


@functools.lru_cache(maxsize=6)
def _read_array(stored: Stored) -> npt.NDArray[np.generic]:
    """Return a tensor, as it is stored, in numpy: parts of one weight are decoded one after the other, and need the same scales."""
    kind = next(OF_SAFETENSORS[name].numpy for name, dtype in DTYPES.items() if dtype == stored.dtype)
    return read_whole(stored).view(torch.uint8).numpy().view(kind).reshape(stored.shape)


def decoded(tensors: Mapping[str, Stored], encodings: Encodings) -> dict[str, Stored]:
    """Return the tensors of a model's files with each quantised weight as one tensor in fp32, which is decoded while it is read.

    Those that quantise what layers compute are included: a class may have parameters of their names.
    """
    of_weights = encodings.of_weights
    found = {name: stored for name, stored in tensors.items() if name not in of_weights}
    for name, weight in encodings.weights.items():
        stored = tensors[weight.codes]
        others = tuple(tensors[part] if part else None for part in weight.others)
        codes = Codes(weight, tensors[weight.scales], others, stored if weight.is_read_in_full else None)
        found[name] = Stored(stored.file, torch.float32, weight.shape, stored.start, codes=codes)
    return found


def read_weight_map(index: Path) -> dict[str, str]:
    """Return {tensor: file} of an index of weights; {} if the index is damaged, which the loader reports."""
    try:
        found: object = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        return {}
    return cast("dict[str, str]", found) if isinstance(found, dict) else {}


def headers_of(path: Path) -> list[HeaderEntry]:
    """Return name, type and shape of the tensors of a file. Raises: FailedError for a damaged header."""
    with open(path, "rb") as file:

        def read(at: int, count: int) -> bytes:
            file.seek(at)
            return file.read(count)

        try:
            return read_header(read, path.stat().st_size, {name: dtype.itemsize for name, dtype in DTYPES.items()})
        except DamagedHeader as error:
            raise _damaged(path, str(error)) from error


def tensors_of(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file by name, except those of a type that is not in DTYPES. Raises: FailedError for a damaged header."""
    for entry in headers_of(path):
        if (dtype := DTYPES.get(entry.dtype)) is not None:
            yield entry.name, Stored(path, dtype, entry.shape, entry.first_byte)


def _damaged(path: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "model-weights-damaged",
        f"the model's weights cannot be read: {why}",
        where=Where(str(path)),
        hint="download or copy the file again",
    )


def read_elements(file: FileIO, stored: Stored, start: int, elements: int, buffer: bytearray) -> torch.Tensor:
    """Read consecutive elements into the buffer, or into a separate one if they do not fit."""
    size_bytes = elements * stored.read_dtype.itemsize
    if not size_bytes:
        return torch.empty(0, dtype=stored.read_dtype)
    place = memoryview(buffer if size_bytes <= len(buffer) else bytearray(size_bytes))[:size_bytes]
    file.seek(start)
    done = 0
    while done < size_bytes:
        got = file.readinto(place[done:])
        if not got:
            raise _damaged(stored.file, f"it ends at byte {start + done:,}")
        done += got
    return torch.frombuffer(place, dtype=stored.read_dtype)


def read_whole(stored: Stored) -> torch.Tensor:
    """Return all elements of a tensor, flat; of a quantised weight, decoded."""
    rows = stored.shape[0] if stored.shape else 1
    with open(stored.file, "rb", buffering=0) as file:
        found = read_elements(file, stored, stored.start, rows * stored.row_elements, bytearray(0)).clone()
    return found if stored.codes is None else stored.codes.of_rows(0, rows, found)
