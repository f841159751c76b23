"""Tensors in the files of a base: read, checked, and those that the model ties.

Tensors in safetensors files: where their elements are, and reading of consecutive ones.

The bytes are read, not mapped: pages of a mapped file count as memory of the rank that accessed them, and a file that is not
cached would be read in page faults of a few pages.

Check that the weight files of a model directory are there and are weights: a stat and eight bytes of each, before ranks load them.

Untie a model whose files store an output head that differs from the input embedding, whatever its config.json states.

transformers compares the two tensors too (`tie_weights`, modeling_utils.py, 5.23) and loads them untied, but its config still ties them,
so that a model without weights, a later `tie_weights` and the size of a plan would follow the flag. Merging has the same rule
(`merge/copy/ties.py`).
"""

from __future__ import annotations

import functools
import json
import math
import pickle
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME

from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem, Where, failed_error, usage_error
from fsdp_tune.core.families import TIE_KEY, is_embedding, is_head, tied_candidates
from fsdp_tune.core.hub import cached_model_file
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS
from fsdp_tune.core.tensors.encodings import Encoded, Encodings
from fsdp_tune.core.tensors.file_formats import MAX_HEADER_BYTES, WEIGHTS_FILE, DamagedHeader, HeaderEntry, read_header
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import run_of

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
        """Elements of a row in the file."""
        if self.codes is not None:
            return math.prod(self.codes.weight.codes_shape[1:])
        return math.prod(self.shape[1:]) if self.nested is None else self.nested.columns

    @property
    def read_dtype(self) -> torch.dtype:
        """Type of the elements in the file."""
        return self.dtype if self.codes is None else DTYPES[self.codes.weight.codes_dtype]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor in the file; `nested` scales are not in it."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Codes:
    """What decodes the codes of a quantised weight: its rule, and its scales and zero points in the files."""

    weight: Encoded
    scales: Stored
    zero_points: Stored | None = None

    def of_rows(self, first: int, count: int, codes: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight in fp32, flat, from their codes."""
        start, sizes = (first, *(0,) * (len(self.weight.shape) - 1)), (count, *self.weight.shape[1:])
        _, shape = self.weight.box_of_codes(start, sizes)
        kind = OF_SAFETENSORS[self.weight.codes_dtype].numpy
        array = codes.view(torch.uint8).numpy().view(kind).reshape(shape)
        zero_points = None if self.zero_points is None else _read_array(self.zero_points)
        return torch.from_numpy(self.weight.decode(start, sizes, array, _read_array(self.scales), zero_points)).reshape(-1)


@functools.lru_cache(maxsize=4)
def _read_array(stored: Stored) -> Any:
    """Return a small tensor, as it is stored, in numpy: parts of one weight are decoded one after the other."""
    kind = next(OF_SAFETENSORS[name].numpy for name, dtype in DTYPES.items() if dtype == stored.dtype)
    return read_whole(stored).view(torch.uint8).numpy().view(kind).reshape(stored.shape)


def decoded(tensors: Mapping[str, Stored], encodings: Encodings) -> dict[str, Stored]:
    """Return the tensors of a model's files with each quantised weight as one tensor in fp32, which is decoded while it is read."""
    found = {name: stored for name, stored in tensors.items() if name not in encodings.parts}
    for name, weight in encodings.weights.items():
        codes, zero_points = tensors[weight.codes], tensors[weight.zero_points] if weight.zero_points else None
        found[name] = Stored(codes.file, torch.float32, weight.shape, codes.start, codes=Codes(weight, tensors[weight.scales], zero_points))
    return found


def read_weight_map(index: Path) -> dict[str, str]:
    """Return {tensor: file} of an index of weights; {} if the index is damaged, which the loader reports."""
    try:
        found: Any = json.loads(index.read_bytes())["weight_map"]
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


_POINTER = b"version "
"""The first eight bytes of a git-lfs pointer: `version https://git-lfs.github.com/spec/v1`."""
_FORMATS = ((SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME), (WEIGHTS_INDEX_NAME, WEIGHTS_NAME))


def check_weight_files(recipe: Recipe) -> list[Problem]:
    """Return the problems of the files that the ranks would load: of a local model directory and of `lora.adapter`.

    Files of the hub's cache are complete: they are renamed into place when their download has ended.
    """
    name = recipe.model.name_or_path
    problems: list[Problem] = []
    if name is not None and recipe.model.from_config is None and Path(name).is_dir() and run_of(Path(name)) is None:
        problems += _check_model(Path(name))
    adapter = recipe.lora.adapter if recipe.lora is not None else None
    if adapter is not None and (file := Path(adapter) / WEIGHTS_FILE).is_file():
        problems += _check_file(file)
    return problems


def _check_model(folder: Path) -> list[Problem]:
    for index, single in _FORMATS:  # in the order in which transformers looks for them
        if (folder / single).is_file():
            return _check_file(folder / single)
        if (folder / index).is_file():
            return _check_shards(folder, folder / index)
    return []  # a configuration alone can be planned


def _check_shards(folder: Path, index: Path) -> list[Problem]:
    if problems := _check_pointer(index):
        return problems
    try:
        found: Any = json.loads(index.read_bytes())
        names = sorted(set(found["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"the index of the weights cannot be read ({type(error).__name__}: {error})"
        return [Problem("model-weights-damaged", message, Where(str(index)), "download or copy the file again")]
    missing = [name for name in names if not (folder / str(name)).is_file()]
    problems = [problem for name in names if name not in missing for problem in _check_file(folder / str(name))]
    if missing:
        shown = ", ".join(f"`{name}`" for name in missing[:3]) + (", …" if len(missing) > 3 else "")
        message = f"the index names {len(names)} files of weights, and {len(missing)} are not there: {shown}"
        problems.append(Problem("model-weights-missing", message, Where(str(index)), "download or copy these files"))
    return problems


def _check_file(file: Path) -> list[Problem]:
    if problems := _check_pointer(file):
        return problems
    if file.suffix != ".safetensors":
        return []
    size_bytes, first = file.stat().st_size, _first_bytes(file)
    header_bytes = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
    if len(first) == 8 and 0 < header_bytes <= min(size_bytes - 8, MAX_HEADER_BYTES):
        return []
    message = f"it is not a complete safetensors file: {size_bytes:,} bytes, with a header of {header_bytes:,}"
    return [Problem("model-weights-damaged", message, Where(str(file)), "download or copy the file again")]


def _check_pointer(file: Path) -> list[Problem]:
    if _first_bytes(file) != _POINTER:
        return []
    message = "it is a git-lfs pointer of the file, which was not downloaded"
    hint = f"`git lfs pull` in {file.parent}, or `hf download` the model"
    return [Problem("model-weights-pointer", message, Where(str(file)), hint)]


def _first_bytes(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(8)


BLOCK_ELEMENTS = 1 << 22


def untie(recipe: Recipe, config: PreTrainedConfig) -> Notice | None:
    """Set `tie_word_embeddings: false` in a config whose files decide so, and return the notice about it.

    Only files on this machine are read. Raises: usage error if the recipe itself ties what the files store apart.
    """
    stated = recipe.model.config_overrides.get(TIE_KEY)
    places = [place for place in (config, config.get_text_config()) if getattr(place, TIE_KEY, False)]
    if stated is False or not places or (apart := _stored_apart(recipe)) is None:
        return None
    both = f"{recipe.model.name_or_path} stores `{apart.head}` and `{apart.embedding}` with different values"
    if stated is True:
        raise usage_error(
            "tie-contradicts-weights",
            f"model.config_overrides: `{TIE_KEY}: true` would drop the output head: {both}",
            where=Where(key="model.config_overrides"),
            hint=f"leave `{TIE_KEY}` out of model.config_overrides",
        )
    for place in places:
        setattr(place, TIE_KEY, False)
    message = f"{both}, so the head is a weight of its own, although the model's configuration has `{TIE_KEY}: true`"
    return Notice("weights-untied", message, hint=f"`--set model.config_overrides.{TIE_KEY}=false` states the same")


@dataclass(frozen=True, slots=True)
class StoredPair:
    """An output head and an input embedding of one shape, by their names in the files."""

    head: str
    embedding: str


def _stored_apart(recipe: Recipe) -> StoredPair | None:
    """Return the first head of the model's files that differs from an embedding, or None."""
    name = recipe.model.name_or_path
    if name is None or recipe.model.from_config is not None or run_of(Path(name)) is not None:
        return None

    def local(file: str) -> Path | None:
        if Path(name).is_dir():
            return path if (path := Path(name) / file).is_file() else None
        return cached_model_file(name, recipe.model.revision, file)

    safe = _files(local, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    pickled = [] if safe else _files(local, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    return _first_apart(tuple((path, path.stat().st_size, path.stat().st_mtime_ns) for path in safe or pickled), is_pickled=bool(pickled))


def _files(local: Callable[[str], Path | None], single: str, index: str) -> list[Path]:
    """Return the files that hold heads and embeddings."""
    if (found := local(index)) is None:
        return [path] if (path := local(single)) is not None else []
    names = sorted({file for name, file in read_weight_map(found).items() if is_head(name) or is_embedding(name)})
    return [path for path in map(local, names) if path is not None]


@functools.lru_cache(maxsize=8)
def _first_apart(files: tuple[tuple[Path, int, int], ...], *, is_pickled: bool) -> StoredPair | None:
    """Compare heads with embeddings. The sizes and times of the files are part of the key under which an answer is cached."""
    tensors: dict[str, Stored | torch.Tensor] = {}
    for path, _, _ in files:
        tensors.update(_pickled_tensors(path) if is_pickled else tensors_of(path))
    for head, embedding in tied_candidates({name: tuple(tensor.shape) for name, tensor in tensors.items()}).items():
        if not _are_equal(tensors[head], tensors[embedding]):
            return StoredPair(head, embedding)
    return None


def _pickled_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, pickle.UnpicklingError):
        return {}  # from before zip archives, which cannot be mapped, or damaged: transformers reads it, or reports it
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and (is_head(name) or is_embedding(name))}


def _are_equal(one: Stored | torch.Tensor, other: Stored | torch.Tensor) -> bool:
    """Return whether two tensors of one shape have equal values; of one dtype, equal bytes. Stops at the first block that differs."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.data_ptr() == other.data_ptr():
        return True
    return all(_same(left, right) for left, right in zip(_blocks(one), _blocks(other), strict=True))


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.dtype == right.dtype:
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    return torch.equal(left.double(), right.double())


def _blocks(tensor: Stored | torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in order, BLOCK_ELEMENTS at a time."""
    total = math.prod(tensor.shape)
    starts = range(0, total, BLOCK_ELEMENTS)
    if isinstance(tensor, torch.Tensor):
        yield from (tensor.reshape(-1)[start : start + BLOCK_ELEMENTS] for start in starts)
        return
    with open(tensor.file, "rb", buffering=0) as file:
        for start in starts:
            count = min(BLOCK_ELEMENTS, total - start)
            yield read_elements(file, tensor, tensor.start + start * tensor.dtype.itemsize, count, bytearray(0))
