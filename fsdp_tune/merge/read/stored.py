"""Formats of checkpoints: DCP, safetensors, and the shards of a model directory.

The tensors of a torch.distributed.checkpoint (DCP) directory: the model's names, and chunks that cover each tensor exactly once.

Tensors of safetensors files, one or many behind an index; the headers are read by `core.tensors.file_formats`.

Sharded safetensors of torch's HuggingFaceStorageWriter (`save_distributed=True`): each rank's slices in a file of its own.

The metadata of a file has `DCP_SHARDING_INFO`: {tensor: {"saved_offsets": position of the slice}} (torch 2.13,
`distributed/checkpoint/_hf_utils.py`). The shape of a tensor is where its last slice ends.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.core.tensors import file_formats as header
from fsdp_tune.core.tensors.archive import Refused, StoredTensor, extent, open_archive, read_pickle
from fsdp_tune.core.tensors.dcp_metadata import MAX_METADATA_BYTES, METADATA_NAME, DcpMetadata
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS, DType, Extent, Shape, row_major
from fsdp_tune.merge.read.reader import ArchiveExtent, Chunk, ChunkPart, SourceFiles, SourceTensor, model_names, optimizer_state
from fsdp_tune.merge.source import HF_SHARD, INDEX_NAME, SINGLE_NAME
from fsdp_tune.run.manifest import is_inside

MOST_TENSOR_BYTES = 1 << 60


def damaged_metadata(root: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-metadata",
        f"the checkpoint's table of contents cannot be used: {why}",
        where=Where(str(root / METADATA_NAME)),
        hint="copy the complete checkpoint again from where it was written, or merge another one with `--step N`",
    )


def only_optimizer_state(root: Path) -> FsdpTuneError:
    return usage_error(
        "merge-optimizer-state",
        "this is the state of an optimizer, not a model",
        where=Where(str(root)),
        hint="give the folder of the weights, which is next to it, or the checkpoint that holds both",
    )


def read_dcp(files: SourceFiles) -> tuple[list[SourceTensor], list[str]]:
    """Return (tensors of the model in the order of the checkpoint, names of its other entries)."""
    root = files.root
    size_bytes = files.size_bytes(METADATA_NAME)
    if size_bytes > MAX_METADATA_BYTES:
        raise damaged_metadata(root, f"it is {size_bytes:,} bytes long")
    try:
        return _tensors(DcpMetadata(files.read(METADATA_NAME, 0, size_bytes)), files)
    except Refused as refused:
        raise damaged_metadata(root, str(refused)) from refused


def _tensors(metadata: DcpMetadata, files: SourceFiles) -> tuple[list[SourceTensor], list[str]]:
    names = model_names(list(metadata.entries), metadata.planner_data, files.root.name)
    tensors = [_dcp_tensor(files, metadata, key, name) for key, name in names.items() if metadata.is_tensor(key)]
    if not tensors:
        if optimizer_state(list(metadata.entries)):
            raise only_optimizer_state(files.root)
        raise Refused("it lists no tensor of a model")
    return tensors, [name for key, name in names.items() if not metadata.is_tensor(key)]


def _dcp_tensor(files: SourceFiles, metadata: DcpMetadata, key: str, name: str) -> SourceTensor:
    dtype, shape, stored = metadata.tensor(key)
    if math.prod(shape) * dtype.item_bytes > MOST_TENSOR_BYTES:
        raise Refused(f"`{name}` of shape {list(shape)} is larger than any disk")
    kept = without_replicas([Chunk(each.offsets, each.sizes, ArchiveExtent(each.file, each.start, each.length_bytes)) for each in stored])
    wrong = gap_or_overlap(shape, kept)
    if wrong is not None:
        raise Refused(f"`{name}`: {wrong}")
    return SourceTensor(name, dtype, shape, kept, files)


def locate(tensor: SourceTensor, chunk: Chunk) -> Extent:
    """Open the archive of one chunk, which must hold one tensor of the dtype and shape in `.metadata`."""
    files, place = tensor.files, chunk.place
    if isinstance(place, Extent):
        return place
    if isinstance(place, ChunkPart):
        whole = locate(tensor, replace(chunk, sizes=place.sizes, place=place.place))
        first = sum(index * stride for index, stride in zip(place.start, whole.strides, strict=True))
        strides = tuple(whole.strides[axis] for axis in place.axes)
        return replace(whole, first_byte=whole.first_byte + first * tensor.dtype.item_bytes, strides=strides)
    try:
        archive = open_archive(files, place.file, place.offset, place.length_bytes)
        stored = read_pickle(archive)
        if not isinstance(stored, StoredTensor):
            raise Refused("it holds no tensor")
        if stored.dtype != tensor.dtype or stored.sizes != chunk.sizes:
            raise Refused(
                f"it holds {stored.dtype.name} {list(stored.sizes)}, but the table of contents has {tensor.dtype.name} {list(chunk.sizes)}"
            )
        return extent(archive, stored)
    except Refused as refused:
        raise damaged_chunk(files.root / place.file, tensor.name, place.offset, str(refused)) from refused


def damaged_chunk(path: Path, name: str, offset: int, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-shard",
        f"the part of `{name}` at byte {offset:,} is damaged: {why}",
        where=Where(str(path)),
        hint="copy the file again from where it was written, or merge another checkpoint with `--step N`",
    )


# ---- Whether the chunks of a tensor cover it: each element once, however the mesh was shaped.


def without_replicas(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Keep one chunk for each (offsets, sizes), since under HSDP every replica may have written it, and drop empty chunks."""
    kept: dict[tuple[Shape, Shape], Chunk] = {}
    for chunk in chunks:
        if chunk.elements:
            kept.setdefault((chunk.offsets, chunk.sizes), chunk)
    return tuple(sorted(kept.values(), key=lambda chunk: chunk.offsets))


def gap_or_overlap(shape: Shape, chunks: Sequence[Chunk]) -> str | None:
    """Return None if `chunks` cover `shape` exactly, else a description of the error."""
    for chunk in chunks:
        if len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape):
            return f"a chunk has {len(chunk.sizes)} dimensions where the tensor has {len(shape)}"
        bounds = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(offset < 0 or size < 0 or offset + size > limit for offset, size, limit in bounds):
            return f"the chunk at {list(chunk.offsets)} of shape {list(chunk.sizes)} reaches out of the tensor of shape {list(shape)}"
    if _overlaps(chunks):
        return "two chunks overlap"
    covered, wanted = sum(chunk.elements for chunk in chunks), math.prod(shape)
    return None if covered == wanted else f"the chunks cover {covered:,} of {wanted:,} elements"


def _overlaps(chunks: Sequence[Chunk]) -> bool:
    if len(chunks) < 2 or not chunks[0].sizes:
        return len(chunks) > 1
    starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)
    ends = starts + np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
    # The usual case, slices of one dimension, is settled by sorting; a mesh of two needs the pairs.
    for dimension in range(starts.shape[1]):
        order = np.argsort(starts[:, dimension], kind="stable")
        if bool(np.all(ends[order, dimension][:-1] <= starts[order, dimension][1:])):
            return False
    for index in range(len(chunks) - 1):
        meets = (starts[index] < ends[index + 1 :]) & (starts[index + 1 :] < ends[index])
        if bool(meets.all(axis=1).any()):
            return True
    return False


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


INFO = "DCP_SHARDING_INFO"


def read_hf_shards(files: SourceFiles) -> list[SourceTensor]:
    """Return the tensors, each covered by its slices exactly once. Raises: FailedError."""
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    dtypes: dict[str, set[DType]] = defaultdict(set)
    names = sorted(path.name for path in files.root.iterdir() if HF_SHARD.fullmatch(path.name))
    try:
        _check_numbers(names)
        for file in names:
            offsets = _offsets(files, file)
            for entry in read_header(files, file):
                extent = Extent(file, entry.first_byte, row_major(entry.shape), entry.first_byte, entry.size_bytes)
                chunks[entry.name].append(Chunk(_position(offsets, entry), entry.shape, extent))
                dtypes[entry.name].add(OF_SAFETENSORS[entry.dtype])
        return [_joined_tensor(files, name, chunks[name], dtypes[name]) for name in chunks]
    except Refused as refused:
        raise _damaged_shards(files, str(refused)) from refused


def _check_numbers(names: Sequence[str]) -> None:
    """Refuse files of which one in between is missing; offsets do not tell whether the last one is."""
    numbers = sorted({int(match[1]) for name in names if (match := HF_SHARD.fullmatch(name))})
    if missing := sorted(set(range(1, numbers[-1] + 1)) - set(numbers)):
        raise Refused(f"the file of shard {missing[0]} is missing")


def _offsets(files: SourceFiles, file: str) -> dict[str, Any]:
    try:
        metadata = header.read_user_metadata(lambda at, count: files.read(file, at, count), files.size_bytes(file))
        found: Any = json.loads(metadata[INFO])
    except (header.DamagedHeader, KeyError, ValueError, TypeError, RecursionError) as error:
        raise Refused(f"`{file}` has no usable {INFO} ({error})") from error
    if not isinstance(found, dict):
        raise Refused(f"{INFO} of `{file}` is not an object")
    return found


def _position(offsets: dict[str, Any], entry: header.HeaderEntry) -> Shape:
    info = offsets.get(entry.name)
    position = info.get("saved_offsets") if isinstance(info, dict) else None
    if not isinstance(position, list) or len(position) != len(entry.shape) or any(type(each) is not int or each < 0 for each in position):
        raise Refused(f"{INFO} has no position of `{entry.name}`")
    return tuple(position)


def _joined_tensor(files: SourceFiles, name: str, chunks: Sequence[Chunk], dtypes: set[DType]) -> SourceTensor:
    if len(dtypes) > 1:
        raise Refused(f"the slices of `{name}` have several dtypes")
    if len({len(chunk.sizes) for chunk in chunks}) > 1:
        raise Refused(f"the slices of `{name}` have several numbers of dimensions")
    shape = tuple(max(chunk.offsets[dimension] + chunk.sizes[dimension] for chunk in chunks) for dimension in range(len(chunks[0].sizes)))
    kept = without_replicas(chunks)
    if math.prod(shape) and (wrong := gap_or_overlap(shape, kept)) is not None:
        raise Refused(f"`{name}`: {wrong}")
    return SourceTensor(name, next(iter(dtypes)), shape, kept, files)


def _damaged_shards(files: SourceFiles, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-safetensors",
        f"the sharded safetensors files cannot be merged: {why}",
        where=Where(str(files.root)),
        hint="copy the complete directory again from where it was written",
    )
