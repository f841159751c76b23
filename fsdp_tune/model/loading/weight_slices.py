"""Load weights directly from safetensors: each rank reads the bytes of its own shard, and no rank holds the
full model.

This requires that the tensors of the files equal the model's parameters in name and shape. Checkpoints that
transformers converts while loading (renamed prefixes, fused experts) are loaded through rank 0 instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.utils.hub import cached_file

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.model_parts import is_embedding, is_head
from fsdp_tune.core.tensors.quantised_formats import settings_of_files
from fsdp_tune.core.tensors.quantised_weight import StoredType
from fsdp_tune.model.adapters.lora import name_in_base
from fsdp_tune.model.adapters.nf4 import Nf4Linear, layers_in_4_bits
from fsdp_tune.model.internals.transformers_internals import NO_ERROR_FOR_MISSING
from fsdp_tune.model.loading.nf4_files import by_layer
from fsdp_tune.model.loading.pickled_codes import refuse_pickled_codes
from fsdp_tune.model.loading.pickled_files import pickled_paths, read_pickled
from fsdp_tune.model.loading.stored_tensors import (
    Find,
    Located,
    Stored,
    decoded,
    decoding,
    locate,
    read_elements,
    read_objects,
)
from fsdp_tune.model.loading.tensor_account import BaseTensors, unread_problems
from fsdp_tune.model.shard.local import NF4_PACKED, NF4_SCALES, offset_of
from fsdp_tune.recipe.schema.recipe import Recipe

BUFFER_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The tensors of a model directory, by name: those of a plain model, where a quantised weight is one
    tensor that is decoded."""

    tensors: dict[str, Stored]
    base: BaseTensors | None = None
    """The tensors as the files have them, also those of pickled files, of which `tensors` is empty; None of
    an adapter's file."""

    @property
    def has_codes(self) -> bool:
        return any(stored.codes is not None for stored in self.tensors.values())


def find_weight_files(recipe: Recipe) -> WeightFiles | None:
    """Return the weight files of `model.name_or_path`, downloaded if necessary; None if it has none.

    The tensors of pickled files are known by name alone (`base`): transformers loads them. Raises: usage
    error for tensors of an encoding that no rule reads, or that several files hold, and for codes in pickled
    files.
    """
    name, revision = str(recipe.model.name_or_path), recipe.model.revision
    # the hub is asked once for each file
    find = functools.cache(lambda file: file_of_model(name, revision, file))
    located = locate(find)
    if not located.tensors:
        pickled = read_pickled(pickled_paths(find))
        refuse_pickled_codes(name, find, pickled)
        return WeightFiles({}, pickled) if pickled is not None else None
    base = base_tensors(located, find)
    encodings = base.encodings()
    if problems := [*base.problems, *unread_problems(encodings.unread, base.files)]:
        raise FsdpTuneError(*problems)
    return WeightFiles(decoded(by_layer(located.stored()), encodings), base)


def file_of_model(name: str, revision: str, file: str) -> Path | None:
    """Return the path of a file of a model, downloaded if necessary; None if the model has none. Raises:
    OSError."""
    found = cached_file(name, file, revision=revision, **NO_ERROR_FOR_MISSING.value(False))
    return Path(found) if found is not None else None


def read_headers(find: Find) -> BaseTensors:
    """Return the tensors of a model's safetensors files. Raises: FailedError for a damaged file."""
    return base_tensors(locate(find), find)


def base_tensors(located: Located, find: Find) -> BaseTensors:
    """Return the tensors with the settings under which they are quantised."""
    types = {name: StoredType(entry.dtype, entry.shape) for name, (_, entry) in located.tensors.items()}
    settings = settings_of_files(read_objects(find), types) if types else {}
    return BaseTensors(
        types, {name: path for name, (path, _) in located.tensors.items()}, settings, located.problems
    )


def fits(model: nn.Module, weights: WeightFiles) -> bool:
    """Return whether every parameter and persistent buffer is in the files with the same name and shape, and
    tied ones once.

    Of heads and embeddings, which files may store twice, it is known that the copies are equal
    (`loading.untie`). transformers compares others.
    """
    first = {name for name, _ in model.named_parameters()}
    tied = [
        name_in_base(name) for name, _ in model.named_parameters(remove_duplicate=False) if name not in first
    ]
    if any(
        name in weights.tensors and not (is_head(name) or is_embedding(name))
        for name in tied
        if name is not None
    ):
        return False
    wanted = {
        name: (t.out_features, t.in_features) if isinstance(t, Nf4Linear) else tuple(t.shape)
        for name, t in _wanted(model, weights).items()
    }
    return all(
        name in weights.tensors and weights.tensors[name].shape == shape for name, shape in wanted.items()
    )


def _wanted(model: nn.Module, weights: WeightFiles) -> dict[str, torch.Tensor | Nf4Linear]:
    """Return what the files must have, by name: parameters and persistent buffers, except those of adapters;
    for a layer in 4 bits its weight, or its two parameters where the files are in 4 bits too."""
    persistent = set(model.state_dict())
    tensors = [
        (name, tensor)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if name in persistent
    ]
    layers = {
        name: layer
        for name, layer in layers_in_4_bits(model).items()
        if name_in_base(f"{name}.{NF4_PACKED}") not in weights.tensors
    }
    own = {f"{name}.{part}" for name in layers for part in (NF4_PACKED, NF4_SCALES)}
    found = [
        *((name, tensor) for name, tensor in tensors if name not in own),
        *((f"{name}.weight", layer) for name, layer in layers.items()),
    ]
    return {stored: target for name, target in found if (stored := name_in_base(name))}


@torch.no_grad()
def read_slices(model: nn.Module, weights: WeightFiles) -> None:
    """Fill the (sharded) parameters and persistent buffers of a wrapped model, except those of adapters, with
    this rank's part of the files.

    Tensors are read in the order of the files, so that reads are sequential, and converted to the dtype of
    the parameter. In addition to its shard, a rank holds BUFFER_BYTES in two buffers, and of a weight in GPTQ
    or AWQ all codes.
    """
    read_tensors(_wanted(model, weights), weights)


@torch.no_grad()
def read_tensors(targets: Mapping[str, torch.Tensor | Nf4Linear], weights: WeightFiles) -> None:
    """Fill tensors and layers in 4 bits, by their names in the files, with this rank's part.

    A thread reads the next rows while this one copies, converts or quantises those before: both leave
    Python's lock to the other.
    """
    stored = weights.tensors
    names = sorted(targets, key=lambda name: (stored[name].file, stored[name].start))
    buffer_bytes = BUFFER_BYTES // 2
    buffers = itertools.cycle([bytearray(buffer_bytes), bytearray(buffer_bytes)])
    parts = itertools.chain.from_iterable(_parts(targets[name], stored[name], buffer_bytes) for name in names)
    with decoding(), _FileReader() as reader, ThreadPoolExecutor(1) as pool:
        before: tuple[StoredRows, Future[torch.Tensor]] | None = None
        for rows in parts:
            reading = pool.submit(reader.read, rows, next(buffers))
            if before is not None:
                _put(before[0], before[1].result())
            before = rows, reading
        if before is not None:
            _put(before[0], before[1].result())


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Consecutive rows of a stored tensor, and the rows of this rank's part that are made of them."""

    target: torch.Tensor | Nf4Linear
    local: torch.Tensor
    """This rank's part."""
    stored: Stored
    first: int
    """Row in the file."""
    into: int
    """Row in this rank's part."""
    count: int
    columns: tuple[slice, ...]


def _parts(target: torch.Tensor | Nf4Linear, stored: Stored, buffer_bytes: int) -> Iterator[StoredRows]:
    """Yield the rows of this rank's part of a tensor, as many at a time as fit into the buffer. A scalar is
    one row."""
    whole = target.weight_nf4 if isinstance(target, Nf4Linear) else target
    local, offset = whole.to_local() if isinstance(whole, DTensor) else whole, offset_of(whole)
    if local.numel() == 0:
        return
    if not stored.shape:
        yield StoredRows(target, local, stored, 0, 0, 1, ())
        return
    most = stored.rows_in(buffer_bytes)
    columns = tuple(
        slice(start, start + length) for start, length in zip(offset[1:], local.shape[1:], strict=True)
    )
    for row in range(0, local.shape[0], most):
        yield StoredRows(
            target, local, stored, offset[0] + row, row, min(most, local.shape[0] - row), columns
        )


class _FileReader:
    """Reads rows in the order of the files, with one file open at a time."""

    def __init__(self) -> None:
        self._file: FileIO | None = None

    def __enter__(self) -> _FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read(self, rows: StoredRows, buffer: bytearray) -> torch.Tensor:
        stored = rows.stored
        if self._file is None or self._file.name != str(stored.file):
            self.__exit__()
            self._file = FileIO(str(stored.file))
        start = stored.start + rows.first * stored.row_elements * stored.read_dtype.itemsize
        return read_elements(self._file, stored, start, rows.count * stored.row_elements, buffer)


def _put(rows: StoredRows, block: torch.Tensor) -> None:
    """Copy the columns of this rank's part, or quantise the rows."""
    stored = rows.stored
    if not stored.shape:
        rows.local.copy_(block[0])
        return
    if stored.nested is not None:
        block = stored.nested.of_rows(rows.first, block.view(rows.count, stored.row_elements))
    if stored.codes is not None:
        block = stored.codes.of_rows(rows.first, rows.count, block)
    block = block.view(rows.count, *stored.shape[1:])
    if isinstance(rows.target, Nf4Linear):
        rows.target.set_rows(rows.into, block)
    else:
        rows.local[rows.into : rows.into + rows.count].copy_(block[(slice(None), *rows.columns)])


def first_on_each_machine(
    act: Callable[[], WeightFiles | None], local_rank: int, waiting: dist.ProcessGroup
) -> WeightFiles | None:
    """Call `act` on one rank of each machine first, so that it downloads files before the others read the
    same cache. Collective."""
    found = act() if local_rank == 0 else None
    dist.barrier(group=waiting)
    return act() if local_rank != 0 else found
