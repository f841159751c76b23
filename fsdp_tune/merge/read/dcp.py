"""The tensors of a torch.distributed.checkpoint (DCP) directory: the model's names, and chunks that cover
each tensor exactly once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.core.tensors.archive import StoredTensor, extent, open_archive, read_pickle
from fsdp_tune.core.tensors.dcp_metadata import MAX_METADATA_BYTES, METADATA_NAME, DcpMetadata
from fsdp_tune.core.tensors.dtypes import Extent, Shape
from fsdp_tune.core.tensors.plain_pickle import Refused
from fsdp_tune.merge.read.reader import (
    ArchiveExtent,
    Chunk,
    ChunkPart,
    SourceFiles,
    SourceTensor,
    model_names,
    optimizer_state,
)

MOST_TENSOR_BYTES = 1 << 60


def damaged_metadata(root: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-metadata",
        f"the checkpoint's table of contents cannot be used: {why}",
        where=Where(str(root / METADATA_NAME)),
        hint="copy the complete checkpoint again from where it was written, or merge another one with "
        "`--step N`",
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
    tensors = [
        _dcp_tensor(files, metadata, key, name) for key, name in names.items() if metadata.is_tensor(key)
    ]
    if not tensors:
        if optimizer_state(list(metadata.entries)):
            raise only_optimizer_state(files.root)
        raise Refused("it lists no tensor of a model")
    return tensors, [name for key, name in names.items() if not metadata.is_tensor(key)]


def _dcp_tensor(files: SourceFiles, metadata: DcpMetadata, key: str, name: str) -> SourceTensor:
    dtype, shape, stored = metadata.tensor(key)
    if math.prod(shape) * dtype.item_bytes > MOST_TENSOR_BYTES:
        raise Refused(f"`{name}` of shape {list(shape)} is larger than any disk")
    kept = without_replicas(
        [
            Chunk(each.offsets, each.sizes, ArchiveExtent(each.file, each.start, each.length_bytes))
            for each in stored
        ]
    )
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
                f"it holds {stored.dtype.name} {list(stored.sizes)}, but the table of contents has "
                f"{tensor.dtype.name} {list(chunk.sizes)}"
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


def without_replicas(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Keep one chunk for each (offsets, sizes), since under HSDP every replica may have written it, and drop
    empty chunks."""
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
            return (
                f"the chunk at {list(chunk.offsets)} of shape {list(chunk.sizes)} reaches out of the "
                f"tensor of shape {list(shape)}"
            )
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
