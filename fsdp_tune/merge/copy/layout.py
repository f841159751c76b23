"""Plan the output before a byte is written: files, headers, and the position of every tensor. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fsdp_tune.core.tensors.dtypes import OF_OPTION, DType, Shape
from fsdp_tune.core.tensors.safetensors_header import header_bytes
from fsdp_tune.merge.read.reader import SourceTensor
from fsdp_tune.merge.weight_formats import SINGLE_NAME

PAGE_BYTES = 4096
"""Direct I/O needs offset, length and address in whole blocks of the disk; no disk has larger ones."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor of the output: element type there, and the byte of `file` at which it begins."""

    name: str
    dtype: DType
    shape: Shape
    file: str
    first_byte: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class OutputFile:
    name: str
    header: bytes
    size_bytes: int
    tensors: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    files: tuple[OutputFile, ...]
    index: bytes | None
    total_size_bytes: int
    total_parameters: int

    @property
    def tensors(self) -> dict[str, Placed]:
        return {placed.name: placed for file in self.files for placed in file.tensors}

    @property
    def main_dtype(self) -> DType:
        """The float type of most bytes: what the config calls the model's dtype."""
        bytes_of: dict[DType, int] = {}
        for placed in self.tensors.values():
            bytes_of[placed.dtype] = bytes_of.get(placed.dtype, 0) + placed.size_bytes
        floats = {dtype: size for dtype, size in bytes_of.items() if dtype.converts}
        return max(floats or bytes_of, key=lambda dtype: bytes_of[dtype])

    @property
    def size_bytes(self) -> int:
        """Of all files that hold tensors, headers included."""
        return sum(file.size_bytes for file in self.files)


def target_dtype(dtype: DType, option: str, *, keeps_fp32: bool = False, is_updated: bool = False) -> DType:
    """Return the output dtype under `--dtype`: floats of 16 bits and more are converted, all others are kept.

    A tensor that the model's class keeps in fp32 (`keeps_fp32`) is not rounded to 16 bits. It leaves as the
    source stores it, so that what training did not change has the bytes of the base; with an update of an
    adapter (`is_updated`) it is in fp32, as trained.
    """
    if option == "keep" or not dtype.converts:
        return dtype
    wanted, fp32 = OF_OPTION[option], OF_OPTION["fp32"]
    if not keeps_fp32 or wanted.item_bytes >= fp32.item_bytes:
        return wanted
    return fp32 if is_updated or dtype.item_bytes > fp32.item_bytes else dtype


def _keeps_nothing(_name: str) -> bool:
    return False


def plan_layout(
    tensors: Sequence[SourceTensor],
    dtype_option: str,
    max_shard_bytes: int | None,
    *,
    single_name: str = SINGLE_NAME,
    keeps_fp32: Callable[[str], bool] = _keeps_nothing,
) -> Layout:
    """Assign tensors to files in order, as `save_pretrained` does; a tensor larger than the limit gets its
    own file.

    `max_shard_bytes` None writes one file. `keeps_fp32(name)`: whether the model's class keeps a tensor in
    fp32.
    """
    shards: list[list[tuple[SourceTensor, DType]]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        kept, has_update = keeps_fp32(tensor.name), tensor.update is not None
        target = target_dtype(tensor.dtype, dtype_option, keeps_fp32=kept, is_updated=has_update)
        dtype = tensor.dtype if tensor.is_carried else target
        size_bytes = tensor.elements * dtype.item_bytes
        if shards[-1] and max_shard_bytes is not None and filled_bytes + size_bytes > max_shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append((tensor, dtype))
        filled_bytes += size_bytes
    names = (
        [single_name]
        if len(shards) == 1
        else [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    )
    files = tuple(_plan_file(name, shard) for name, shard in zip(names, shards, strict=True))
    placed = [tensor for file in files for tensor in file.tensors]
    total_bytes, parameters = (
        sum(tensor.size_bytes for tensor in placed),
        sum(tensor.elements for tensor in tensors),
    )
    return Layout(
        files, _index(files, total_bytes, parameters) if len(files) > 1 else None, total_bytes, parameters
    )


def _plan_file(name: str, shard: Sequence[tuple[SourceTensor, DType]]) -> OutputFile:
    # Tensors of whole pages first, so that each starts at a page and can be written past the page cache; then
    # the widest elements first: readers map the file, and an element must start at a multiple of its own
    # size.
    ordered = sorted(
        shard, key=lambda pair: (pair[0].elements * pair[1].item_bytes % PAGE_BYTES > 0, -pair[1].item_bytes)
    )
    sizes = [tensor.elements * dtype.item_bytes for tensor, dtype in ordered]
    listed = (
        (tensor.name, dtype.safetensors, tensor.shape, size)
        for (tensor, dtype), size in zip(ordered, sizes, strict=True)
    )
    # tensors of whole pages then begin and end with one
    head = header_bytes(listed, {"format": "pt"}, alignment_bytes=PAGE_BYTES)
    placed: list[Placed] = []
    at = len(head)
    for (tensor, dtype), size_bytes in zip(ordered, sizes, strict=True):
        placed.append(Placed(tensor.name, dtype, tensor.shape, name, at, size_bytes))
        at += size_bytes
    return OutputFile(name, head, at, tuple(placed))


def _index(files: Sequence[OutputFile], total_bytes: int, parameters: int) -> bytes:
    weight_map = {tensor.name: file.name for file in files for tensor in file.tensors}
    value = {
        "metadata": {"total_parameters": parameters, "total_size": total_bytes},
        "weight_map": weight_map,
    }
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
