"""Reads `.metadata` of a torch.distributed.checkpoint directory: which tensors there are, and which ranges hold them.

The format is `torch.distributed.checkpoint.filesystem` 1.0.0: a pickle of `Metadata`, whose `storage_data` maps
(name, offset) to (file, offset, length), and files that hold one `torch.save` archive after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error, usage_error
from fsdp_tune.merge.formats.archive import StoredTensor, extent, open_archive, read_pickle
from fsdp_tune.merge.formats.dtypes import DTYPES, DType
from fsdp_tune.merge.formats.names import OPTIMIZER_ROOTS, model_names
from fsdp_tune.merge.formats.pickles import Allowed, Record, Refused, load
from fsdp_tune.merge.formats.reader import SourceFiles
from fsdp_tune.merge.formats.tensors import Chunk, Extent, Packed, Shape, SourceTensor

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 256 << 20  # 1.8 million slices
MOST_TENSOR_BYTES = 1 << 60
Place = tuple[str, int, int]


def _size(arguments: tuple[Any, ...]) -> Shape:
    values: Any = arguments[0] if len(arguments) == 1 else None
    if not isinstance(values, tuple) or any(type(value) is not int or value < 0 for value in values):
        raise Refused("a torch.Size in it is no tuple of sizes")
    return values


def _names() -> dict[tuple[str, str], Allowed]:
    records: dict[str, dict[str, tuple[str, ...]]] = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata": ("state_dict_metadata", "planner_data", "storage_data"),
            "TensorStorageMetadata": ("properties", "size", "chunks"),
            "BytesStorageMetadata": (),
            "ChunkStorageMetadata": ("offsets", "sizes"),
            "TensorProperties": ("dtype",),
            "MetadataIndex": ("fqn", "offset"),
            "StorageMeta": (),
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo": ("relative_path", "offset", "length", "transform_descriptors")},
        "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties": ("dtype",)},  # torch up to 2.2
    }
    names = {(module, name): Allowed(name, fields=fields) for module, kinds in records.items() for name, fields in kinds.items()}
    calls: dict[tuple[str, str], Callable[[tuple[Any, ...]], Any]] = {
        ("torch", "Size"): _size,
        ("torch.serialization", "_get_layout"): lambda _: None,
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): lambda _: None,
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): lambda _: None,
        ("collections", "OrderedDict"): lambda _: {},
    }
    # Only where the checkpoint was written, which nobody needs.
    calls |= {
        (module, kind): lambda _: None for module in ("pathlib", "pathlib._local") for kind in ("PosixPath", "PurePosixPath", "WindowsPath")
    }
    names |= {key: Allowed(".".join(key), call=function) for key, function in calls.items()}
    return names | {("torch", name): Allowed(f"torch.{name}", value=dtype) for name, dtype in DTYPES.items()}


NAMES = _names()


def damaged_metadata(root: Path, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-metadata",
        f"the checkpoint's table of contents cannot be used: {why}",
        where=Where(str(root / METADATA_NAME)),
        hint="copy the whole checkpoint anew from where it was written, or merge another one with `--step N`",
    )


def read_dcp(files: SourceFiles) -> tuple[list[SourceTensor], list[str]]:
    """(tensors of the model in the order of the checkpoint, names of entries of the model that are no tensors)."""
    root = files.root
    size_bytes = files.size_bytes(METADATA_NAME)
    if size_bytes > MAX_METADATA_BYTES:
        raise damaged_metadata(root, f"it is {size_bytes:,} bytes long")
    try:
        metadata = load(files.read(METADATA_NAME, 0, size_bytes), NAMES)
        return _tensors(metadata, files)
    except Refused as refused:
        raise damaged_metadata(root, str(refused)) from refused


def _tensors(metadata: Any, files: SourceFiles) -> tuple[list[SourceTensor], list[str]]:
    entries, stored = _expect(metadata, "Metadata", "state_dict_metadata", dict), _expect(metadata, "Metadata", "storage_data", dict)
    places = _places(stored)
    if not all(isinstance(key, str) for key in entries):
        raise Refused("an entry has no name")
    names = model_names(list(entries), metadata.get("planner_data"), files.root.name)
    tensors: list[SourceTensor] = []
    others: list[str] = []
    for key, name in names.items():
        entry = entries[key]
        if isinstance(entry, Record) and entry.kind.name == "BytesStorageMetadata":
            others.append(name)
        else:
            tensors.append(_tensor(files, key, name, entry, places))
    if not tensors:
        if any(key.partition(".")[0] in OPTIMIZER_ROOTS for key in entries):
            raise usage_error(
                "merge-optimizer-state",
                "this is the state of an optimizer, not a model",
                where=Where(str(files.root)),
                hint="give the folder of the weights, which lies beside it, or the checkpoint that holds both",
            )
        raise Refused("it lists no tensor of a model")
    return tensors, others


def _places(stored: dict[Any, Any]) -> dict[tuple[str, Shape], Place]:
    """(key, offset of the chunk) → (file, offset, length)."""
    places: dict[tuple[str, Shape], Place] = {}
    for index, info in stored.items():
        key = _expect(index, "MetadataIndex", "fqn", str)
        offset = index.get("offset") or ()
        place = tuple(
            _expect(info, "_StorageInfo", name, kind) for name, kind in (("relative_path", str), ("offset", int), ("length", int))
        )
        if info.get("transform_descriptors"):
            raise Refused(f"`{key}` was written through {info.get('transform_descriptors')}, which is not understood")
        if not isinstance(offset, tuple) or place[1] < 0 or place[2] < 0:
            raise Refused(f"the place of `{key}` is no range of a file")
        places[key, offset] = place  # type: ignore[assignment]
    ranges = sorted(places.values())
    for (file, start, length), (next_file, next_start, _) in pairwise(ranges):
        if file == next_file and start + length > next_start:
            raise Refused(f"two of its entries share the bytes at {next_start:,} of `{file}`")
    return places


def _tensor(files: SourceFiles, key: str, name: str, entry: Any, places: dict[tuple[str, Shape], Place]) -> SourceTensor:
    shape, listed = _expect(entry, "TensorStorageMetadata", "size", tuple), _expect(entry, "TensorStorageMetadata", "chunks", list)
    dtype = _dtype(name, entry.get("properties"))
    chunks: list[Chunk] = []
    for item in listed:
        offsets, sizes = _expect(item, "ChunkStorageMetadata", "offsets", tuple), _expect(item, "ChunkStorageMetadata", "sizes", tuple)
        place = places.get((key, offsets)) or places.get((key, ()))
        if place is None:
            raise Refused(f"it does not say where the part of `{name}` at {list(offsets)} lies")
        chunks.append(Chunk(offsets, sizes, Packed(*place)))
    if math.prod(shape) * dtype.item_bytes > MOST_TENSOR_BYTES:
        raise Refused(f"`{name}` of shape {list(shape)} is larger than any disk")
    kept = without_replicas(chunks)
    wrong = gap_or_overlap(shape, kept)
    if wrong is not None:
        raise Refused(f"`{name}`: {wrong}")
    return SourceTensor(name, dtype, shape, kept, files)


def _dtype(name: str, properties: Any) -> DType:
    """The element type: the first field of `TensorProperties.__getstate__`'s tuple."""
    if not isinstance(properties, Record) or properties.kind.name != "TensorProperties":
        raise Refused(f"it does not say the element type of `{name}`")
    value = properties.get("dtype")
    dtype = value.value if isinstance(value, Allowed) else None
    if not isinstance(dtype, DType):
        raise Refused(f"it does not say the element type of `{name}`")
    return dtype


def _expect(value: Any, kind: str, name: str, wanted: type) -> Any:
    if not isinstance(value, Record) or value.kind.name != kind:
        raise Refused(f"a {kind} is due where it has something else")
    found = value.get(name)
    if not isinstance(found, wanted) or isinstance(found, bool):
        raise Refused(f"the {name} of a {kind} is no {wanted.__name__}")
    return found


def locate(tensor: SourceTensor, chunk: Chunk) -> Extent:
    """Opens the archive of one chunk. The archive must hold one tensor of the dtype and shape that `.metadata` says."""
    files, place = tensor.files, chunk.place
    if isinstance(place, Extent):
        return place
    try:
        archive = open_archive(files, place.file, place.offset, place.length_bytes)
        stored = read_pickle(archive)
        if not isinstance(stored, StoredTensor):
            raise Refused("it holds no tensor")
        if stored.dtype != tensor.dtype or stored.sizes != chunk.sizes:
            raise Refused(
                f"it holds {stored.dtype.name} {list(stored.sizes)}, and the table of contents says {tensor.dtype.name} {list(chunk.sizes)}"
            )
        return extent(archive, stored)
    except Refused as refused:
        raise damaged_chunk(files.root / place.file, tensor.name, place.offset, str(refused)) from refused


def damaged_chunk(path: Path, name: str, offset: int, why: str) -> FsdpTuneError:
    return failed_error(
        "merge-damaged-shard",
        f"the part of `{name}` at byte {offset:,} is damaged: {why}",
        where=Where(str(path)),
        hint="copy the file anew from where it was written, or merge another checkpoint with `--step N`",
    )


# ---- Whether the chunks of a tensor cover it: each element once, however the mesh was shaped.


def without_replicas(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """One of each (offsets, sizes): under HSDP every replica may have written its own. Empty chunks say nothing and go."""
    kept: dict[tuple[Shape, Shape], Chunk] = {}
    for chunk in chunks:
        if chunk.elements:
            kept.setdefault((chunk.offsets, chunk.sizes), chunk)
    return tuple(sorted(kept.values(), key=lambda chunk: chunk.offsets))


def gap_or_overlap(shape: Shape, chunks: Sequence[Chunk]) -> str | None:
    """None when `chunks` cover `shape` exactly, else what is wrong, in words."""
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
