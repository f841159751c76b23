"""Tensors in safetensors files: where their elements are, and reading of consecutive ones.

The bytes are read, not mapped: pages of a mapped file count as memory of the rank that accessed them, and a file that is not
cached would be read in page faults of a few pages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.tensors.safetensors_header import DamagedHeader, read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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

    @property
    def row_elements(self) -> int:
        """Elements of a row in the file."""
        return math.prod(self.shape[1:]) if self.nested is None else self.nested.columns

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file; `nested` scales are not in it."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_weight_map(index: Path) -> dict[str, str]:
    """Return {tensor: file} of an index of weights; {} if the index is damaged, which the loader reports."""
    try:
        found: Any = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        return {}
    return cast("dict[str, str]", found) if isinstance(found, dict) else {}


def tensors_of(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file by name, except those of a type that is not in DTYPES. Raises: FailedError for a damaged header."""
    with open(path, "rb") as file:

        def read(at: int, count: int) -> bytes:
            file.seek(at)
            return file.read(count)

        try:
            entries = read_header(read, path.stat().st_size, {name: dtype.itemsize for name, dtype in DTYPES.items()})
        except DamagedHeader as error:
            raise _damaged(path, str(error)) from error
    for entry in entries:
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
    size_bytes = elements * stored.dtype.itemsize
    place = memoryview(buffer if size_bytes <= len(buffer) else bytearray(size_bytes))[:size_bytes]
    file.seek(start)
    done = 0
    while done < size_bytes:
        got = file.readinto(place[done:])
        if not got:
            raise _damaged(stored.file, f"it ends at byte {start + done:,}")
        done += got
    return torch.frombuffer(place, dtype=stored.dtype)


def read_whole(stored: Stored) -> torch.Tensor:
    with open(stored.file, "rb", buffering=0) as file:
        return read_elements(file, stored, stored.start, math.prod(stored.shape), bytearray(0)).clone()
