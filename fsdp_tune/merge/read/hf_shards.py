"""Sharded safetensors of torch's HuggingFaceStorageWriter (`save_distributed=True`): each rank's slices in a
file of its own.

The metadata of a file has `DCP_SHARDING_INFO`: {tensor: {"saved_offsets": position of the slice}} (torch
2.13, `distributed/checkpoint/_hf_utils.py`). The shape of a tensor is where its last slice ends.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence

from fsdp_tune.core.errors import FsdpTuneError, Where, failed_error
from fsdp_tune.core.tensors import safetensors_header as header
from fsdp_tune.core.tensors.dtypes import OF_SAFETENSORS, DType, Extent, Shape, row_major
from fsdp_tune.core.tensors.plain_pickle import Refused
from fsdp_tune.merge.read.dcp import gap_or_overlap, without_replicas
from fsdp_tune.merge.read.reader import Chunk, SourceFiles, SourceTensor
from fsdp_tune.merge.read.safetensors_files import read_header
from fsdp_tune.merge.weight_formats import HF_SHARD

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
                extent = Extent(
                    file, entry.first_byte, row_major(entry.shape), entry.first_byte, entry.size_bytes
                )
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


def _offsets(files: SourceFiles, file: str) -> dict[str, object]:
    try:
        metadata = header.read_user_metadata(
            lambda at, count: files.read(file, at, count), files.size_bytes(file)
        )
        found: object = json.loads(metadata[INFO])
    except (header.DamagedHeader, KeyError, ValueError, TypeError, RecursionError) as error:
        raise Refused(f"`{file}` has no usable {INFO} ({error})") from error
    if not isinstance(found, dict):
        raise Refused(f"{INFO} of `{file}` is not an object")
    return found


def _position(offsets: dict[str, object], entry: header.HeaderEntry) -> Shape:
    info = offsets.get(entry.name)
    position = info.get("saved_offsets") if isinstance(info, dict) else None
    if (
        not isinstance(position, list)
        or len(position) != len(entry.shape)
        or any(type(each) is not int or each < 0 for each in position)
    ):
        raise Refused(f"{INFO} has no position of `{entry.name}`")
    return tuple(position)


def _joined_tensor(
    files: SourceFiles, name: str, chunks: Sequence[Chunk], dtypes: set[DType]
) -> SourceTensor:
    if len(dtypes) > 1:
        raise Refused(f"the slices of `{name}` have several dtypes")
    if len({len(chunk.sizes) for chunk in chunks}) > 1:
        raise Refused(f"the slices of `{name}` have several numbers of dimensions")
    shape = tuple(
        max(chunk.offsets[dimension] + chunk.sizes[dimension] for chunk in chunks)
        for dimension in range(len(chunks[0].sizes))
    )
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
