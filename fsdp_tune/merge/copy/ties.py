"""Tied weights: sharded checkpoints may store the embedding twice, ordinary model directories once.

transformers ties the output head to the input embedding if `tie_word_embeddings` is true, and restores the
head from the embedding when the file holds only that. A head is left out only if it is equal, byte for byte,
to the embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fsdp_tune.core.errors import Notice
from fsdp_tune.core.model_parts import TIE_KEY, is_embedding, tie_setting, tied_candidates
from fsdp_tune.merge.copy.boxes import boxes
from fsdp_tune.merge.copy.decode import reader_of
from fsdp_tune.merge.copy.gather import BUFFER_BYTES
from fsdp_tune.merge.read.contents import CheckpointTensors
from fsdp_tune.merge.read.reader import SourceTensor


def embedding_of(tensors: Mapping[str, SourceTensor]) -> SourceTensor | None:
    """Return the first input embedding of a model."""
    return next(
        (tensor for name, tensor in tensors.items() if is_embedding(name) and len(tensor.shape) == 2), None
    )


@dataclass(frozen=True, slots=True)
class Tied:
    """`left_out` maps each head that is not written to its embedding."""

    left_out: dict[str, str] = field(default_factory=dict[str, str])
    config_changes: dict[str, object] = field(default_factory=dict[str, object])
    notices: tuple[Notice, ...] = ()


def find_ties(config: Mapping[str, object] | None, sources: Sequence[CheckpointTensors]) -> Tied:
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
            f"`{apart[0]}` and `{pairs[apart[0]]}` differ, so both are written and the config gets "
            f"`{TIE_KEY}: false`",
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
