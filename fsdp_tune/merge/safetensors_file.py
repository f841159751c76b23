"""Reads the headers of safetensors files, distrusting every number in them (format: https://github.com/huggingface/safetensors)."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_tune.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.manifest import is_inside
from fsdp_tune.merge.dtypes import OF_SAFETENSORS, DType
from fsdp_tune.merge.layout import INDEX_NAME, SINGLE_NAME
from fsdp_tune.merge.reader import SourceFiles
from fsdp_tune.merge.tensors import Chunk, Extent, Shape, SourceTensor, row_major

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
MAX_INDEX_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `first_byte` counts from the start of the file."""

    name: str
    dtype: DType
    shape: Shape
    first_byte: int
    size_bytes: int


def read_header(files: SourceFiles, file: str) -> list[Entry]:
    """The tensors of one file, in the order of their bytes. FailedError for holes, overlaps, duplicates and wrong sizes."""
    size_bytes = files.size_bytes(file)
    if size_bytes < 8:
        raise _damaged(files, file, "it is too short")
    (length,) = struct.unpack("<Q", files.read(file, 0, 8))
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise _damaged(files, file, f"its header claims {length:,} bytes")
    try:
        header = json.loads(files.read(file, 8, length), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(files, file, f"its header is no JSON object ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(files, file, "its header is no JSON object")
    base = 8 + length
    entries = [_entry(files, file, name, value, base) for name, value in header.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.first_byte, entry.size_bytes))
    at = base
    for entry in entries:
        if entry.first_byte != at:
            raise _damaged(
                files, file, f"`{entry.name}` begins at byte {entry.first_byte:,} where byte {at:,} is due (a hole or an overlap)"
            )
        at += entry.size_bytes
    if at != size_bytes:
        raise _damaged(files, file, f"it is {size_bytes:,} bytes long where its header describes {at:,}")
    return entries


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice")
    return value


def _entry(files: SourceFiles, file: str, name: str, value: Any, base: int) -> Entry:
    try:
        dtype, shape, (start, end) = OF_SAFETENSORS[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(files, file, f"the header of `{name}` is not understood") from error
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise _damaged(files, file, f"the header of `{name}` is not understood")
    if end - start != math.prod(shape) * dtype.item_bytes:  # Python's integers do not overflow
        raise _damaged(files, file, f"`{name}` of shape {list(shape)} cannot be {end - start:,} bytes long")
    return Entry(name, dtype, shape, base + start, end - start)


def read_safetensors(files: SourceFiles, single: str = SINGLE_NAME) -> list[SourceTensor]:
    """The tensors of `single`, or of the files that an index names; index and files must agree."""
    if single != SINGLE_NAME or not (files.root / INDEX_NAME).is_file():
        return [_tensor(files, single, entry) for entry in read_header(files, single)]
    weight_map = read_index(files)
    tensors: list[SourceTensor] = []
    for file in dict.fromkeys(weight_map.values()):
        entries = read_header(files, file)
        listed = {name for name, where in weight_map.items() if where == file}
        if listed != {entry.name for entry in entries}:
            odd = sorted(listed ^ {entry.name for entry in entries})[0]
            raise _damaged(files, INDEX_NAME, f"it and `{file}` disagree about `{odd}`")
        tensors.extend(_tensor(files, file, entry) for entry in entries)
    return tensors


def read_index(files: SourceFiles) -> dict[str, str]:
    """{tensor: file} of the index; file names must be plain names in the same directory."""
    size_bytes = files.size_bytes(INDEX_NAME)
    if size_bytes > MAX_INDEX_BYTES:
        raise _damaged(files, INDEX_NAME, f"it is {size_bytes:,} bytes long")
    try:
        weight_map = json.loads(files.read(INDEX_NAME, 0, size_bytes), object_pairs_hook=_without_duplicates)["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(files, INDEX_NAME, f"it is no index ({error})") from error
    for name, file in pairs:
        if not isinstance(file, str) or "/" in file or not is_inside(file):
            raise failed_error(
                "merge-path-traversal",
                f"the index puts `{name}` into `{file}`, which is no file of this directory",
                where=Where(str(files.root / INDEX_NAME)),
            )
    return dict(pairs)


def _tensor(files: SourceFiles, file: str, entry: Entry) -> SourceTensor:
    extent = Extent(file, entry.first_byte, row_major(entry.shape), entry.first_byte, entry.size_bytes)
    chunks = (Chunk((0,) * len(entry.shape), entry.shape, extent),) if entry.size_bytes else ()
    return SourceTensor(entry.name, entry.dtype, entry.shape, chunks, files)


def _damaged(files: SourceFiles, file: str, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-safetensors",
        f"this safetensors file cannot be used: {why}",
        where=Where(str(files.root / file)),
        hint="copy it anew from where it was written, or merge another checkpoint with `--step N`",
    )
