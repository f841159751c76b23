"""Tensors of safetensors files, one or many behind an index; the headers are read by
`core.tensors.safetensors_header`."""

from __future__ import annotations

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.tensors import safetensors_header as header
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS, Extent, row_major
from fsdp_tune.core.tensors.weight_files import MAX_INDEX_BYTES, UnusableIndexError, WeightList, is_index
from fsdp_tune.core.tensors.weight_files import read_index as parse_index
from fsdp_tune.merge.read.reader import Chunk, SourceFiles, SourceTensor
from fsdp_tune.merge.weight_formats import INDEX_NAME, SINGLE_NAME

_ITEM_BYTES = {name: dtype.item_bytes for name, dtype in OF_SAFETENSORS.items()}


def read_header(files: SourceFiles, file: str) -> list[header.HeaderEntry]:
    """Return the tensors of one file in the order of their bytes. Raises: FailedError for gaps, overlaps,
    duplicates and wrong sizes."""
    try:
        found = header.read_header(
            lambda at, count: files.read(file, at, count), files.size_bytes(file), _ITEM_BYTES
        )
    except header.DamagedHeader as error:
        raise _damaged_file(files, file, str(error)) from error
    if unknown := next((entry for entry in found if entry.dtype not in OF_SAFETENSORS), None):
        raise _damaged_file(files, file, f"the header of `{unknown.name}` is not understood")
    return found


def read_safetensors(
    files: SourceFiles, first: str = SINGLE_NAME, *, may_lack: bool = False
) -> list[SourceTensor]:
    """Return the tensors of a file, or of the files of an index, whatever it lists for each of them, as
    loading does.

    `may_lack`: whether the index may list tensors that no file holds. Raises: FailedError for a tensor that
    several files hold, if the index names none of them for it.
    """
    if not is_index(first):
        return [_tensor(files, first, entry) for entry in read_header(files, first)]
    listed = WeightList(first, read_index(files, first))
    entries = {file: read_header(files, file) for file in dict.fromkeys(listed.weight_map.values())}
    held = listed.holders({file: {entry.name for entry in found} for file, found in entries.items()})
    if twice := next((each for each in held.twice if each.listed is None), None):
        raise _damaged_file(
            files,
            first,
            f"`{twice.name}` is in both `{twice.files[0]}` and `{twice.files[-1]}`, and it names "
            "neither for it",
        )
    if held.absent and not may_lack:
        name = held.absent[0]
        raise _damaged_file(
            files, first, f"it and `{listed.weight_map[name]}` disagree about `{name}`, which no file holds"
        )
    return [
        _tensor(files, file, entry)
        for file, found in entries.items()
        for entry in found
        if held.files[entry.name] == file
    ]


def read_index(files: SourceFiles, index: str = INDEX_NAME) -> dict[str, str]:
    """Return {tensor: file} of the index; files must be in the same directory, or below it."""
    size_bytes = files.size_bytes(index)
    if size_bytes > MAX_INDEX_BYTES:
        raise _damaged_file(files, index, f"it is {size_bytes:,} bytes long")
    try:
        return parse_index(files.read(index, 0, size_bytes), index)
    except UnusableIndexError as error:
        if error.leaves_directory:
            raise failed_error(
                "merge-path-traversal",
                f"the index cannot be used: {error}",
                where=Where(str(files.root / index)),
            ) from error
        raise _damaged_file(files, index, str(error)) from error


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
