"""Read `.metadata` of a torch.distributed.checkpoint (DCP) directory: which tensors it holds, and in which
ranges of which files.

The format is `torch.distributed.checkpoint.filesystem` 1.0.0: a pickle of `Metadata`, whose `storage_data`
maps (name, offset) to (file, offset, length), and files that hold one `torch.save` archive after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

from fsdp_tune.core.tensors.dtypes import DTYPES, DType, Shape
from fsdp_tune.core.tensors.plain_pickle import AllowedGlobal, Record, Refused, load

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 256 << 20  # 1.8 million slices


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The box at `offsets` of shape `sizes` (both in elements): one `torch.save` archive at byte `start` of
    `file`."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length_bytes: int


def _tuple_of_sizes(values: object) -> Shape:
    sizes = cast("Shape | None", values if isinstance(values, tuple) else None)
    if sizes is None or any(type(size) is not int or size < 0 for size in sizes):
        raise Refused("a torch.Size in it is not a tuple of sizes")
    return sizes


_ENUMS = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
)


def _member_of_enum(arguments: tuple[object, ...]) -> None:
    """Take a member of an enum as Python 3.11.0 to 3.11.3 pickle it: `getattr(Enum, "NAME")`. Raises: Refused
    for any other attribute."""
    match arguments:
        case (AllowedGlobal(name=kind), str()) if kind in map(".".join, _ENUMS):
            return
        case _:
            raise Refused("it takes an attribute of something else than an enum of torch")


def _names() -> dict[tuple[str, str], AllowedGlobal]:
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
        "torch.distributed.checkpoint.filesystem": {
            "_StorageInfo": ("relative_path", "offset", "length", "transform_descriptors")
        },
        # torch up to 2.2
        "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties": ("dtype",)},
    }
    names = {
        (module, name): AllowedGlobal(name, fields=fields)
        for module, kinds in records.items()
        for name, fields in kinds.items()
    }
    calls: dict[tuple[str, str], Callable[[tuple[object, ...]], object]] = {
        ("torch", "Size"): lambda arguments: _tuple_of_sizes(*arguments),
        ("torch.serialization", "_get_layout"): lambda _: None,
        **{each: lambda _: None for each in _ENUMS},
        ("builtins", "getattr"): _member_of_enum,
        ("collections", "OrderedDict"): lambda _: {},
    }
    # The path that the checkpoint was written to, which is not used.
    calls |= {
        (module, kind): lambda _: None
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "WindowsPath")
    }
    names |= {key: AllowedGlobal(".".join(key), call=function) for key, function in calls.items()}
    return names | {
        ("torch", name): AllowedGlobal(f"torch.{name}", value=dtype) for name, dtype in DTYPES.items()
    }


NAMES = _names()


class ChunkedTensor(NamedTuple):
    """Dtype, shape and chunks of a tensor of a checkpoint, the chunks in the order of `.metadata`."""

    dtype: DType
    shape: Shape
    chunks: list[StoredChunk]


class DcpMetadata:
    """The contents of one `.metadata`. Raises: Refused if it is damaged or names anything but tensors'
    metadata."""

    def __init__(self, raw: bytes) -> None:
        metadata = load(raw, NAMES)
        entries: dict[Any, Any] = _field(metadata, "Metadata", "state_dict_metadata", dict)
        self.planner_data: object = metadata.get("planner_data")
        self._ranges = _ranges(_field(metadata, "Metadata", "storage_data", dict))
        if not all(isinstance(name, str) for name in entries):
            raise Refused("an entry has no name")
        self.entries: dict[str, object] = entries

    def is_tensor(self, name: str) -> bool:
        entry = self.entries[name]
        return not isinstance(entry, Record) or entry.kind.name != "BytesStorageMetadata"

    def tensor(self, name: str) -> ChunkedTensor:
        """Return one entry. Raises: Refused if it is damaged or its bytes have no location."""
        entry, chunks = self.entries[name], list[StoredChunk]()
        for item in _field(entry, "TensorStorageMetadata", "chunks", list):
            offsets, sizes = (
                _shape(item, "ChunkStorageMetadata", "offsets"),
                _shape(item, "ChunkStorageMetadata", "sizes"),
            )
            found = self._ranges.get((name, offsets)) or self._ranges.get((name, ()))
            if found is None:
                raise Refused(f"it does not give the location of the part of `{name}` at {list(offsets)}")
            chunks.append(StoredChunk(offsets, sizes, *found))
        dtype = _field(
            _field(entry, "TensorStorageMetadata", "properties", Record),
            "TensorProperties",
            "dtype",
            AllowedGlobal,
        ).value
        if not isinstance(dtype, DType):
            raise Refused(f"it does not give the element type of `{name}`")
        return ChunkedTensor(dtype, _shape(entry, "TensorStorageMetadata", "size"), chunks)


def _ranges(stored: dict[Any, Any]) -> dict[tuple[str, Shape], tuple[str, int, int]]:
    """{(name, offsets of the chunk): (file, start, length)}."""
    ranges: dict[tuple[str, Shape], tuple[str, int, int]] = {}
    for index, info in stored.items():
        name, offsets = _field(index, "MetadataIndex", "fqn", str), _tuple_of_sizes(index.get("offset") or ())
        file, start, length = (
            _field(info, "_StorageInfo", key, kind)
            for key, kind in (("relative_path", str), ("offset", int), ("length", int))
        )
        if info.get("transform_descriptors"):
            raise Refused(
                f"`{name}` was written through {info.get('transform_descriptors')}, which is not supported"
            )
        if start < 0 or length < 0:
            raise Refused(f"the location of `{name}` is not a range of a file")
        ranges[name, offsets] = file, start, length
    for (file, start, length), (next_file, next_start, _) in pairwise(sorted(ranges.values())):
        if file == next_file and start + length > next_start:
            raise Refused(f"two of its entries share the bytes at {next_start:,} of `{file}`")
    return ranges


def _field(value: object, kind: str, name: str, wanted: type) -> Any:
    if not isinstance(value, Record) or value.kind.name != kind:
        raise Refused(f"it has something else where a {kind} is due")
    found = value.get(name)
    if not isinstance(found, wanted) or isinstance(found, bool):
        raise Refused(f"the {name} of a {kind} is not a {wanted.__name__}")
    return found


def _shape(record: object, kind: str, name: str) -> Shape:
    return _tuple_of_sizes(_field(record, kind, name, tuple))
