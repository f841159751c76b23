"""Collate rows to a batch of equal width, as numpy arrays; the worker converts them to tensors.

There is never an attention mask. Padding is on the right, where causal attention ignores it, and the
examples of a packed row are separated by position ids that restart at 0. (An all-ones mask would disable
that separation: transformers#46634.).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fsdp_tune.data.store import IGNORE_INDEX, Int32, Row


def collate(
    rows: Sequence[Row], pad_token_id: int, multiple_of: int, *, max_length: int | None = None
) -> dict[str, npt.NDArray[np.int64]]:
    """Return `input_ids` and `labels`, int64 [rows, width]: the longest row, rounded up to `multiple_of`, at
    most `max_length`.

    `position_ids`, of the same shape, are included only if a row has several examples: they count from 0 in
    each example and in the padding. Without rows, the batch is one row of padding without labels, so that a
    rank without rows still takes part in collectives.
    """
    width = padded_width(rows, multiple_of, max_length)
    input_ids = np.full((max(1, len(rows)), width), pad_token_id, np.int64)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    for at, row in enumerate(rows):
        input_ids[at, : len(row.input_ids)] = row.input_ids
        labels[at, : len(row.labels)] = row.labels
    batch = {"input_ids": input_ids, "labels": labels}
    if any(len(row.lengths) > 1 for row in rows):
        batch["position_ids"] = np.stack([_positions(_spans(row, width)) for row in rows])
    return batch


def padded_width(rows: Sequence[Row], multiple_of: int, max_length: int | None = None) -> int:
    return padded_length(max((len(row.input_ids) for row in rows), default=1), multiple_of, max_length)


def padded_length(longest: int, multiple_of: int, max_length: int | None = None) -> int:
    """Return the width of a batch whose longest row has `longest` tokens."""
    width = -(-longest // multiple_of) * multiple_of
    return width if max_length is None else max(longest, min(width, max_length))


def cumulative_lengths(rows: Sequence[Row], width: int) -> Int32:
    """Return `cu_seq_lens` for variable-length attention over the batch flattened to rows × width tokens.

    The padding of each row is a separate sequence, so that the last entry is the number of tokens in the
    batch.
    """
    spans = [span for row in rows for span in _spans(row, width)] or [width]
    return np.concatenate([[0], np.cumsum(spans)]).astype(np.int32)


def example_ids(rows: Sequence[Row], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (int64 [rows, width], int64 [examples]): the index of each token's example in the batch, and the
    tokens of each example.

    Padding has the number of examples as its index.
    """
    lengths = np.array([length for row in rows for length in row.lengths], np.int64)
    ids = np.full((max(1, len(rows)), width), len(lengths), np.int64)
    first = 0
    for at, row in enumerate(rows):
        ids[at, : len(row.input_ids)] = np.repeat(np.arange(first, first + len(row.lengths)), row.lengths)
        first += len(row.lengths)
    return ids, lengths


def source_ids(rows: Sequence[Row], width: int) -> npt.NDArray[np.int64]:
    """Return int64 [rows, width]: the source of each token's example; 0 in padding, which has no loss."""
    ids = np.zeros((len(rows), width), np.int64)
    for at, row in enumerate(rows):
        ids[at, : len(row.input_ids)] = np.repeat(row.sources, row.lengths)
    return ids


def _spans(row: Row, width: int) -> list[int]:
    padding = width - sum(row.lengths)
    return [*row.lengths, *([padding] if padding else [])]


def _positions(spans: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.arange(span, dtype=np.int64) for span in spans])
