"""Write parameters as the files of the base store them: under other names, in one tensor for each expert, or
several in one. Pure.

A tensor of the output is made of boxes of the checkpoint's chunks, so that it is read, summed and written as
any other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_tune.merge.copy.boxes import Box, intersection
from fsdp_tune.merge.read.contents import CheckpointTensors
from fsdp_tune.merge.read.reader import Chunk, ChunkPart, LowRankOfExperts, SourceTensor
from fsdp_tune.run.base_model import BaseLayout, FileTensor, Piece


@dataclass(frozen=True, slots=True)
class AsBase:
    """The tensors of the output by their names there, and in their order."""

    sources: tuple[CheckpointTensors, ...]
    ordered: tuple[SourceTensor, ...]


def as_base(
    layout: BaseLayout, sources: Sequence[CheckpointTensors], ordered: Sequence[SourceTensor]
) -> AsBase:
    """Return the tensors that files of the base have. `ordered`: those to write, by the names of the model.

    A parameter that is missing, or has another shape than the layout, stays as it is, as do those that share
    a tensor with it.
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
    return AsBase(
        tuple(replace(source, tensors=tensors) for source, tensors in zip(sources, made, strict=True)),
        tuple(made[0].values()),
    )


def _usable(layout: BaseLayout, present: Mapping[str, SourceTensor]) -> list[FileTensor]:
    """Return the tensors that can be made, without those that share a parameter with one that cannot."""
    usable, impossible = [tensor for group in layout.tensors for tensor in group.expanded()], set[str]()
    while failed := [
        tensor for tensor in usable if _has_any(tensor, impossible) or not _can_be_made(tensor, present)
    ]:
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
    if has_update and (
        len(found) > 1 or not isinstance(found[0].update, LowRankOfExperts) or tensor.pieces[0].axes != (1, 2)
    ):
        return False
    return all(_is_inside(piece, parameter) for piece, parameter in zip(tensor.pieces, found, strict=True))


def _is_inside(piece: Piece, parameter: SourceTensor) -> bool:
    if len(piece.start) != len(parameter.shape):
        return False
    sizes = _sizes_in_parameter(piece)
    return all(
        start + size <= limit for start, size, limit in zip(piece.start, sizes, parameter.shape, strict=True)
    )


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
    """Yield the parts of a parameter's chunks that a piece has, at their positions in the tensor of the
    piece."""
    box = Box(piece.start, _sizes_in_parameter(piece), 0)
    for chunk in parameter.chunks:
        if (shared := intersection(box, chunk.offsets, chunk.sizes)) is not None:
            in_box, in_chunk, sizes = shared
            offsets = tuple(at + in_box[axis] for at, axis in zip(piece.position, piece.axes, strict=True))
            yield Chunk(
                offsets,
                tuple(sizes[axis] for axis in piece.axes),
                ChunkPart(chunk.place, chunk.sizes, in_chunk, piece.axes),
            )
