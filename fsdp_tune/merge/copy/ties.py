"""Names and shapes that the output shares with the base: tied tensors, and the layout of the base's files.

Tied weights: sharded checkpoints may store the embedding twice, ordinary model directories once.

transformers ties the output head to the input embedding if `tie_word_embeddings` is true, and restores the head from
the embedding when the file holds only that. A head is left out only if it is equal, byte for byte, to the embedding.

Write parameters as the files of the base store them: under other names, in one tensor for each expert, or several in one. Pure.

A tensor of the output is made of boxes of the checkpoint's chunks, so that it is read, summed and written as any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fsdp_tune.core.errors import Notice
from fsdp_tune.core.families import TIE_KEY, is_embedding, tie_setting, tied_candidates
from fsdp_tune.merge.copy.decode import reader_of
from fsdp_tune.merge.copy.gather import BUFFER_BYTES, Box, boxes, intersection
from fsdp_tune.merge.read.contents import CheckpointTensors
from fsdp_tune.merge.read.reader import Chunk, ChunkPart, LowRankOfExperts, SourceTensor
from fsdp_tune.run.base_model import BaseLayout, FileTensor, Piece


def embedding_of(tensors: Mapping[str, SourceTensor]) -> SourceTensor | None:
    """Return the first input embedding of a model."""
    return next((tensor for name, tensor in tensors.items() if is_embedding(name) and len(tensor.shape) == 2), None)


@dataclass(frozen=True, slots=True)
class Tied:
    """`left_out` maps each head that is not written to its embedding."""

    left_out: dict[str, str] = field(default_factory=dict[str, str])
    config_changes: dict[str, Any] = field(default_factory=dict[str, Any])
    notices: tuple[Notice, ...] = ()


def find_ties(config: Mapping[str, Any] | None, sources: Sequence[CheckpointTensors]) -> Tied:
    """Compare heads with embeddings if the config allows a tie. Without a config both are kept."""
    if config is None or tie_setting(config) is False:
        return Tied()
    pairs = tied_candidates({name: tensor.shape for name, tensor in sources[0].tensors.items()})
    ties = {
        head: embedding
        for head, embedding in pairs.items()
        if all(_equal(source.tensors[head], source.tensors[embedding]) for source in sources)
    }
    apart = [head for head in pairs if head not in ties]
    if apart:
        notice = Notice(
            "merge-untied",
            f"`{apart[0]}` and `{pairs[apart[0]]}` differ, so both are written and the config gets `{TIE_KEY}: false`",
            hint="they were trained apart; if that was not meant, the tie was lost before or during training",
        )
        return Tied({}, {TIE_KEY: False}, (notice,) if tie_setting(config) else ())
    return Tied(ties, {TIE_KEY: True} if ties else {})


def _equal(one: SourceTensor, other: SourceTensor) -> bool:
    """Return whether two tensors of one shape have the same dtype and bytes; stop at the first difference."""
    if one.dtype != other.dtype or one.update != other.update:  # what is added to one alone sets it apart
        return False
    if one.files is other.files and one.chunks == other.chunks and one.encoded == other.encoded:
        return True
    scratch, left, right = (np.empty(BUFFER_BYTES, np.uint8) for _ in range(3))
    readers = reader_of(one, scratch), reader_of(other, scratch)
    for box in boxes(one.shape, BUFFER_BYTES // one.dtype.item_bytes):
        size_bytes = box.elements * one.dtype.item_bytes
        for reader, buffer in zip(readers, (left, right), strict=True):
            reader.read(box, buffer[:size_bytes].view(one.dtype.numpy))
        if not np.array_equal(left[:size_bytes], right[:size_bytes]):
            return False
    return True


@dataclass(frozen=True, slots=True)
class AsBase:
    """The tensors of the output by their names there, and in their order."""

    sources: tuple[CheckpointTensors, ...]
    ordered: tuple[SourceTensor, ...]


def as_base(layout: BaseLayout, sources: Sequence[CheckpointTensors], ordered: Sequence[SourceTensor]) -> AsBase:
    """Return the tensors that files of the base have. `ordered`: those to write, by the names of the model.

    A parameter that is missing, or has another shape than the layout, stays as it is, as do those that share a tensor with it.
    """
    present = {tensor.name: tensor for tensor in ordered}
    of_parameter: dict[str, list[FileTensor]] = defaultdict(list)
    stored: set[str] = set()
    for tensor in _usable(layout, present):
        of_parameter[tensor.pieces[0].parameter].append(tensor)
        stored |= {piece.parameter for piece in tensor.pieces}
    made: list[dict[str, SourceTensor]] = []
    for source in sources:
        found: dict[str, SourceTensor] = {}
        for name in present:
            found |= {tensor.name: _tensor(tensor, source.tensors) for tensor in of_parameter.get(name, ())}
            if name not in stored:
                new = layout.name_of(name)
                found[new] = replace(source.tensors[name], name=new)
        made.append(found)
    return AsBase(tuple(replace(source, tensors=tensors) for source, tensors in zip(sources, made, strict=True)), tuple(made[0].values()))


def _usable(layout: BaseLayout, present: Mapping[str, SourceTensor]) -> list[FileTensor]:
    """Return the tensors that can be made, without those that share a parameter with one that cannot."""
    usable, impossible = [tensor for group in layout.tensors for tensor in group.expanded()], set[str]()
    while failed := [tensor for tensor in usable if _has_any(tensor, impossible) or not _can_be_made(tensor, present)]:
        impossible |= {piece.parameter for tensor in failed for piece in tensor.pieces}
        usable = [tensor for tensor in usable if not _has_any(tensor, impossible)]
    return usable


def _has_any(tensor: FileTensor, parameters: set[str]) -> bool:
    return any(piece.parameter in parameters for piece in tensor.pieces)


def _can_be_made(tensor: FileTensor, present: Mapping[str, SourceTensor]) -> bool:
    found = [present[piece.parameter] for piece in tensor.pieces if piece.parameter in present]
    if len(found) < len(tensor.pieces) or len({parameter.dtype for parameter in found}) > 1:
        return False
    has_update = any(parameter.update is not None for parameter in found)
    if has_update and (len(found) > 1 or not isinstance(found[0].update, LowRankOfExperts) or tensor.pieces[0].axes != (1, 2)):
        return False
    return all(_is_inside(piece, parameter) for piece, parameter in zip(tensor.pieces, found, strict=True))


def _is_inside(piece: Piece, parameter: SourceTensor) -> bool:
    if len(piece.start) != len(parameter.shape):
        return False
    sizes = _sizes_in_parameter(piece)
    return all(start + size <= limit for start, size, limit in zip(piece.start, sizes, parameter.shape, strict=True))


def _sizes_in_parameter(piece: Piece) -> tuple[int, ...]:
    kept = dict(zip(piece.axes, piece.sizes, strict=True))
    return tuple(kept.get(axis, 1) for axis in range(len(piece.start)))


def _tensor(tensor: FileTensor, parameters: Mapping[str, SourceTensor]) -> SourceTensor:
    first = parameters[tensor.pieces[0].parameter]
    chunks = [chunk for piece in tensor.pieces for chunk in _chunks(piece, parameters[piece.parameter])]
    update = first.update
    if isinstance(update, LowRankOfExperts):
        expert, row, _ = tensor.pieces[0].start
        update = replace(update, expert=expert, first_row=row)
    ordered = tuple(sorted(chunks, key=lambda chunk: chunk.offsets))
    return replace(first, name=tensor.name, shape=tensor.shape, chunks=ordered, update=update)


def _chunks(piece: Piece, parameter: SourceTensor) -> Iterator[Chunk]:
    """Yield the parts of a parameter's chunks that a piece has, at their positions in the tensor of the piece."""
    box = Box(piece.start, _sizes_in_parameter(piece), 0)
    for chunk in parameter.chunks:
        if (shared := intersection(box, chunk.offsets, chunk.sizes)) is not None:
            in_box, in_chunk, sizes = shared
            offsets = tuple(at + in_box[axis] for at, axis in zip(piece.position, piece.axes, strict=True))
            yield Chunk(offsets, tuple(sizes[axis] for axis in piece.axes), ChunkPart(chunk.place, chunk.sizes, in_chunk, piece.axes))
