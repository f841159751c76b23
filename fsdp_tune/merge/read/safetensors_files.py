"""Tensors of safetensors files, one or many behind an index; the headers are read by `core.tensors.file_formats`."""

from __future__ import annotations

import json

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.tensors import file_formats as header
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS, Extent, row_major
from fsdp_tune.merge.read.reader import Chunk, SourceFiles, SourceTensor
from fsdp_tune.merge.source import INDEX_NAME, SINGLE_NAME
from fsdp_tune.run.manifest import is_inside

MAX_INDEX_BYTES = 100_000_000


_ITEM_BYTES = {name: dtype.item_bytes for name, dtype in OF_SAFETENSORS.items()}


def read_header(files: SourceFiles, file: str) -> list[header.HeaderEntry]:
    """Return the tensors of one file in the order of their bytes. Raises: FailedError for gaps, overlaps, duplicates and wrong sizes."""
    try:
        found = header.read_header(lambda at, count: files.read(file, at, count), files.size_bytes(file), _ITEM_BYTES)
    except header.DamagedHeader as error:
        raise _damaged_file(files, file, str(error)) from error
    if unknown := next((entry for entry in found if entry.dtype not in OF_SAFETENSORS), None):
        raise _damaged_file(files, file, f"the header of `{unknown.name}` is not understood")
    return found


def read_safetensors(files: SourceFiles, single: str = SINGLE_NAME) -> list[SourceTensor]:
    """Return the tensors of `single`, or of the files in the index, which must agree with them."""
    if single != SINGLE_NAME or not (files.root / INDEX_NAME).is_file():
        return [_tensor(files, single, entry) for entry in read_header(files, single)]
    weight_map = read_index(files)
    tensors: list[SourceTensor] = []
    for file in dict.fromkeys(weight_map.values()):
        entries = read_header(files, file)
        listed = {name for name, where in weight_map.items() if where == file}
        if listed != {entry.name for entry in entries}:
            odd = sorted(listed ^ {entry.name for entry in entries})[0]
            raise _damaged_file(files, INDEX_NAME, f"it and `{file}` disagree about `{odd}`")
        tensors.extend(_tensor(files, file, entry) for entry in entries)
    return tensors


def read_index(files: SourceFiles) -> dict[str, str]:
    """Return {tensor: file} of the index; files must be in the same directory."""
    size_bytes = files.size_bytes(INDEX_NAME)
    if size_bytes > MAX_INDEX_BYTES:
        raise _damaged_file(files, INDEX_NAME, f"it is {size_bytes:,} bytes long")
    try:
        weight_map = json.loads(files.read(INDEX_NAME, 0, size_bytes), object_pairs_hook=header.without_duplicates)["weight_map"]
        pairs = list(weight_map.items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged_file(files, INDEX_NAME, f"it is not an index ({error})") from error
    for name, file in pairs:
        if not f"{name}{file}".isprintable():
            raise _damaged_file(files, INDEX_NAME, f"it has a name that cannot be printed: {name!r} in {file!r}")
        if not isinstance(file, str) or "/" in file or not is_inside(file):
            raise failed_error(
                "merge-path-traversal",
                f"the index puts `{name}` into `{file}`, which is not a file in this directory",
                where=Where(str(files.root / INDEX_NAME)),
            )
    return dict(pairs)


def _tensor(files: SourceFiles, file: str, entry: header.HeaderEntry) -> SourceTensor:
    extent = Extent(file, entry.first_byte, row_major(entry.shape), entry.first_byte, entry.size_bytes)
    chunks = (Chunk((0,) * len(entry.shape), entry.shape, extent),) if entry.size_bytes else ()
    return SourceTensor(entry.name, OF_SAFETENSORS[entry.dtype], entry.shape, chunks, files)


def _damaged_file(files: SourceFiles, file: str, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-safetensors",
        f"this safetensors file cannot be used: {why}",
        where=Where(str(files.root / file)),
        hint="copy it again from where it was written, or merge another checkpoint with `--step N`",
    )
