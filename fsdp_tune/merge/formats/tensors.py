"""The common representation of checkpoints: named tensors made of chunks, and the location of each chunk's elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fsdp_tune.core.tensors.dtypes import DType
from fsdp_tune.core.tensors.extents import Extent, Shape
from fsdp_tune.merge.formats.reader import SourceFiles


@dataclass(frozen=True, slots=True)
class ArchiveExtent:
    """A chunk as one `torch.save` archive at `offset` of `file`; its contents are read when it is opened."""

    file: str
    offset: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """A box of what is stored at `place` with the shape `sizes`: its first element, and the dimensions that are kept, in their order."""

    place: ArchiveExtent | Extent | ChunkPart
    sizes: Shape
    start: Shape
    axes: Shape


@dataclass(frozen=True, slots=True)
class Chunk:
    """The box at `offsets` of the whole tensor, of shape `sizes` (both in elements per dimension)."""

    offsets: Shape
    sizes: Shape
    place: ArchiveExtent | Extent | ChunkPart

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of the model, in `files`. Its chunks cover it exactly: no gap, no overlap, replicas left out."""

    name: str
    dtype: DType
    shape: Shape
    chunks: tuple[Chunk, ...]
    files: SourceFiles
    update: LowRank | LowRankOfExperts | None = None
    nf4_scales: Literal["fp32", "bf16"] | None = None
    """Round the values as a run did that held them in 4 bits, with scales of this dtype."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.item_bytes


@dataclass(frozen=True, slots=True)
class LowRank:
    """The update of a tensor by a LoRA adapter: scaling · b @ a, its transpose where `is_transposed`; without `a`, scaling · b.

    `a` is [rank, in], `b` is [out, rank]; the tensor is [out, in], or [in, out] where `is_transposed`. `magnitude` [out] is DoRA's:
    each row of the sum is scaled to this length (arXiv:2402.09353, equation 5).
    """

    scaling: float
    b: SourceTensor
    a: SourceTensor | None
    is_transposed: bool = False
    magnitude: SourceTensor | None = None


@dataclass(frozen=True, slots=True)
class LowRankOfExperts:
    """The update of stacked matrices by one adapter for all of them (`ParamWrapper.get_delta_weight`, PEFT 0.21).

    `a` is [experts · rank, in], `b` is [out, rank · experts]: expert e of the tensor [experts, out, in], or [experts, in, out] where
    `is_transposed`, gets scaling · b[:, e::experts] @ a[e · rank : (e + 1) · rank]. `expert` is that of a tensor that holds one expert
    alone, from `first_row` of its update.
    """

    scaling: float
    b: SourceTensor
    a: SourceTensor
    experts: int
    is_transposed: bool
    expert: int | None
    first_row: int
