"""Hand-made prepared data: short and long examples, some tokens untrained, an odd number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsdp_tune.data.build import StoreWriter
from fsdp_tune.data.store import STORE_KIND
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files

GLOBAL_BATCH_SIZE = 16
REST = 3
"""Rows of the last, short global batch of an epoch: fewer than four ranks."""
TRAIN_ROWS = 5 * GLOBAL_BATCH_SIZE + REST
EVAL_ROWS = 7
PACKED_ROW_TOKENS = 48
EXAMPLES = 400
LONGEST_EXAMPLE = 24
VOCABULARY = 257  # a prime: no number of ranks divides the embedding


def make_store(folder: Path, *, vocabulary: int = VOCABULARY) -> Path:
    """Sets `train` and `eval` of one example a row, `train-packed` and `eval-packed` of several."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, LONGEST_EXAMPLE + 1, size=EXAMPLES).astype(np.int64)
    rows = fill_rows(lengths)
    assert len(rows) > TRAIN_ROWS + EVAL_ROWS, "more examples are needed"
    one_each = np.arange(EXAMPLES + 1)
    sets = {
        "train": one_each[: TRAIN_ROWS + 1],
        "eval": one_each[-EVAL_ROWS - 1 :],
        "train-packed": rows[: TRAIN_ROWS + 1],
        "eval-packed": rows[TRAIN_ROWS : TRAIN_ROWS + EVAL_ROWS + 1],
    }
    return write_store(folder, draw, lengths, sets, vocabulary=vocabulary)


def write_store(
    folder: Path,
    draw: np.random.Generator,
    lengths: npt.NDArray[np.int64],
    sets: Mapping[str, npt.NDArray[np.int64]],
    *,
    vocabulary: int,
) -> Path:
    """Examples of `lengths` tokens, and sets that are offsets of rows into them."""
    folder.mkdir(parents=True)
    writer = StoreWriter(folder)
    tokens = np.concatenate([_progression(draw, int(length), vocabulary) for length in lengths])
    trained = np.concatenate([_trained(draw, int(length)) for length in lengths])
    writer.add(
        tokens,
        trained,
        lengths,
        np.stack([np.zeros(len(lengths), np.int64), np.arange(1, len(lengths) + 1)], axis=1),
    )
    writer.finish_pool()
    segments = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)
    for name, rows in sets.items():
        first, last = int(rows[0]), int(rows[-1])
        writer.add_set(name, segments[first:last], rows - first)
    files = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(Manifest(STORE_KIND, files, {"files": ["hand-made"]}).to_json())
    return folder


def _progression(draw: np.random.Generator, length: int, vocabulary: int) -> npt.NDArray[np.int32]:
    """Something that a model can learn: each token follows from the one before it by a step of the example's
    own."""
    return ((draw.integers(vocabulary) + draw.integers(1, 4) * np.arange(length)) % vocabulary).astype(
        np.int32
    )


def _trained(draw: np.random.Generator, length: int) -> npt.NDArray[np.uint8]:
    """Half of the examples have an untrained prompt; ranks then hold unequal numbers of supervised tokens."""
    prompt = draw.integers(1, length - 1) if draw.random() < 0.5 else 0
    return (np.arange(length) >= prompt).astype(np.uint8)


def fill_rows(lengths: npt.NDArray[np.int64], row_tokens: int = PACKED_ROW_TOKENS) -> npt.NDArray[np.int64]:
    """Offsets of rows that are filled with examples, in order, up to `row_tokens`."""
    rows, used = [0], 0
    for index, length in enumerate(lengths.tolist()):
        if used + length > row_tokens:
            rows.append(index)
            used = 0
        used += length
    return np.array(rows, np.int64)
