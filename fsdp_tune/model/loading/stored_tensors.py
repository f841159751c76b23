"""Tensors in safetensors files: where their elements are, and reading of consecutive ones.

The bytes are read, not mapped: pages of a mapped file count as memory of the rank that accessed them, and a
file that is not cached would be read in page faults of a few pages.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, failed_error
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS
from fsdp_tune.core.tensors.quantised_formats import Encodings
from fsdp_tune.core.tensors.quantised_weight import Encoded
from fsdp_tune.core.tensors.safetensors_header import DamagedHeader, HeaderEntry, read_header
from fsdp_tune.core.tensors.weight_files import Holders, UnusableIndexError, WeightList, find_weight_list
from fsdp_tune.core.values import is_mapping

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_COMPARED_BYTES = 16 << 20
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
        """Return the scales of rows [n, columns] of codes, from row `first` on, in fp32 as bytes [n, columns
        * 4]."""
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
        """Return the number of rows to read at a time, of which those in the file, or the decoded ones, take
        `buffer_bytes` at most."""
        row_bytes = (
            self.row_elements * self.read_dtype.itemsize or math.prod(self.shape[1:]) * self.dtype.itemsize
        )
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
            array = (
                codes.view(torch.uint8)
                .numpy()
                .view(OF_SAFETENSORS[self.weight.codes_dtype].numpy)
                .reshape(shape)
            )
        others = (None if stored is None else _read_array(stored) for stored in self.others)
        return torch.from_numpy(
            self.weight.decode(start, sizes, array, _read_array(self.scales), *others)
        ).reshape(-1)


@contextmanager
def decoding() -> Iterator[None]:
    """Read weights that are decoded. Their scales and codes are in memory up to the end of this context, and
    not for a later one: files may be other ones then."""
    try:
        yield
    finally:
        _read_array.cache_clear()


@functools.lru_cache(maxsize=6)
def _read_array(stored: Stored) -> npt.NDArray[np.generic]:
    """Return a tensor, as it is stored, in numpy: parts of one weight are decoded one after the other, and
    need the same scales."""
    kind = next(OF_SAFETENSORS[name].numpy for name, dtype in DTYPES.items() if dtype == stored.dtype)
    return read_whole(stored).view(torch.uint8).numpy().view(kind).reshape(stored.shape)


def decoded(tensors: Mapping[str, Stored], encodings: Encodings) -> dict[str, Stored]:
    """Return the tensors of a model's files with each quantised weight as one tensor in fp32, which is
    decoded while it is read.

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


Find = Callable[[str], Path | None]
"""Returns the path of a file of a model, None if it has none."""


@dataclass(frozen=True, slots=True)
class Located:
    """The tensors in the safetensors files of a model, by name: the file of each and its entry in the header
    of that.

    `problems`: of tensors that several files hold. `is_complete`: whether all files are there.
    """

    tensors: dict[str, tuple[Path, HeaderEntry]]
    problems: tuple[Problem, ...] = ()
    is_complete: bool = True

    def stored(self) -> dict[str, Stored]:
        """Return where the elements of each tensor are, except of a type that is not in DTYPES."""
        return {
            name: Stored(path, dtype, entry.shape, entry.first_byte)
            for name, (path, entry) in self.tensors.items()
            if (dtype := DTYPES.get(entry.dtype)) is not None
        }


def list_weights(find: Find, *, pickled: bool = True) -> WeightList | None:
    """Return the files of a model's weights (`core.tensors.weight_files`). Raises: FailedError for an
    unusable index."""

    def read(file: str) -> bytes | None:
        return path.read_bytes() if (path := find(file)) is not None else None

    try:
        return find_weight_list(lambda file: find(file) is not None, read, pickled=pickled)
    except UnusableIndexError as error:
        raise _damaged(find(error.file) or Path(error.file), str(error)) from error


def read_objects(find: Find) -> Callable[[str], Mapping[str, object] | None]:
    """Return what reads the JSON files of a model. It raises FailedError for one that holds no object."""

    def read(name: str) -> Mapping[str, object] | None:
        if (path := find(name)) is None:
            return None
        try:
            found: object = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise _damaged(path, f"`{name}` is not valid JSON: {error}") from error
        if not is_mapping(found):
            raise _damaged(path, f"`{name}` is not a JSON object")
        return found

    return read


def locate(find: Find) -> Located:
    """Return the tensors in the safetensors files of a model. Raises: FailedError for an unusable index, and
    for a damaged header."""
    listed = list_weights(find, pickled=False)
    if listed is None:
        return Located({})
    paths = {file: path for file in listed.files if (path := find(file)) is not None}
    entries = {file: {entry.name: entry for entry in headers_of(path)} for file, path in paths.items()}
    held = listed.holders(entries)
    tensors = {
        name: (path, entry)
        for file, path in paths.items()
        for name, entry in entries[file].items()
        if held.files[name] == file
    }
    problems = twice_problems(
        held, find(listed.first) or Path(listed.first), lambda name, file: (paths[file], entries[file][name])
    )
    return Located(tensors, problems, is_complete=len(paths) == len(listed.files))


def twice_problems(
    held: Holders, index: Path, place: Callable[[str, str], tuple[Path, HeaderEntry]] | None = None
) -> tuple[Problem, ...]:
    """Return the problem of tensors that several files hold, if no index decides, or if it names a file that
    transformers does not read.

    The latter does no harm to copies that are equal. `place`: the path and entry of a tensor in a file; None
    where they cannot be read.
    """
    found = {each.name: each for each in held.twice if each.listed is None}
    others = [each for each in held.twice if each.listed not in (None, each.files[-1])]
    if place is not None:
        found |= {
            each.name: each
            for each in others
            if not _are_equal(place(each.name, str(each.listed)), place(each.name, each.files[-1]))
        }
    if not found:
        return ()
    first = found[min(found)]
    why = (
        f"{index.name} names neither of them for it"
        if first.listed is None
        else f"its values differ: {index.name} names `{first.listed}`, and transformers reads "
        f"`{first.files[-1]}`"
    )
    message = (
        f"`{first.name}` is in both `{first.files[0]}` and `{first.files[-1]}`, and {why} "
        f"({len(found):,} such tensors)"
    )
    hint = (
        "remove the tensor from the file that is wrong and name the other one in the index, or download "
        "the model again"
    )
    return (Problem("model-weights-twice", message, Where(str(index), key="model.name_or_path"), hint),)


def _are_equal(one: tuple[Path, HeaderEntry], other: tuple[Path, HeaderEntry]) -> bool:
    """Return whether two stored tensors have the same type, shape and bytes."""
    (path, entry), (other_path, other_entry) = one, other
    if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
        return False
    with open(path, "rb") as file, open(other_path, "rb") as second:
        file.seek(entry.first_byte)
        second.seek(other_entry.first_byte)
        sizes = (
            min(_COMPARED_BYTES, entry.size_bytes - at) for at in range(0, entry.size_bytes, _COMPARED_BYTES)
        )
        return all(file.read(size) == second.read(size) for size in sizes)


def headers_of(path: Path) -> list[HeaderEntry]:
    """Return name, type and shape of the tensors of a file. Raises: FailedError for a damaged header."""
    with open(path, "rb") as file:

        def read(at: int, count: int) -> bytes:
            file.seek(at)
            return file.read(count)

        try:
            return read_header(
                read, path.stat().st_size, {name: dtype.itemsize for name, dtype in DTYPES.items()}
            )
        except DamagedHeader as error:
            raise _damaged(path, str(error)) from error


def tensors_of(path: Path) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file by name, except those of a type that is not in DTYPES. Raises: FailedError
    for a damaged header."""
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
