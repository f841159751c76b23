"""Checkpoints of any size that take no space: real archives whose storages are holes of the file system."""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


def _archive_around(rows: int, columns: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the storage of a `torch.save` archive of zeros, without checksums."""
    torch.serialization.set_crc32_options(False)
    try:
        stream = io.BytesIO()
        torch.save(torch.zeros(rows, columns), stream)
    finally:
        torch.serialization.set_crc32_options(True)
    raw = stream.getvalue()
    size_bytes = rows * columns * 4
    directory = raw.rindex(b"PK\x05\x06")
    (start,) = struct.unpack_from("<I", raw, directory + 16)
    entry = raw.index(b"archive/data/0", start) - 46
    (header,) = struct.unpack_from("<I", raw, entry + 42)
    name_length, extra_length = struct.unpack_from("<HH", raw, header + 26)
    at = header + 30 + name_length + extra_length
    return raw[:at], raw[at + size_bytes :]


def write_sparse_checkpoint(
    folder: Path, *, tensors: int, chunks: int, size_bytes: int, columns: int = 4096
) -> None:
    """`tensors` fp32 matrices, each in `chunks` row slices over as many rank files, `size_bytes` in all."""
    folder.mkdir(parents=True)
    rows = size_bytes // tensors // chunks // columns // 4
    before, after = _archive_around(rows, columns)
    length = len(before) + rows * columns * 4 + len(after)
    entries, storage = {}, {}
    for number in range(tensors):
        name = f"model.layers.{number}.weight"
        pieces = [
            ChunkStorageMetadata(torch.Size([rank * rows, 0]), torch.Size([rows, columns]))
            for rank in range(chunks)
        ]
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=torch.float32), torch.Size([rows * chunks, columns]), pieces
        )
        for rank in range(chunks):
            storage[MetadataIndex(name, [rank * rows, 0])] = _StorageInfo(
                f"__{rank}_0.distcp", number * length, length
            )
    for rank in range(chunks):
        with open(folder / f"__{rank}_0.distcp", "wb") as file:
            for number in range(tensors):
                file.seek(number * length)
                file.write(before)
                file.seek((number + 1) * length - len(after))
                file.write(after)
    planner = {name: ("model", name.removeprefix("model.")) for name in entries}
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(entries, planner, storage, version="1.0.0")))
    assert dcp.FileSystemReader(folder).read_metadata() is not None
