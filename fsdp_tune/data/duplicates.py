"""Find rows that train what an earlier row trains: the same tokens with the same targets, regardless of how
their files write them.

Unlike the hash of a row's content (`data/tokenise/content_hash.py`), the hash here depends on tokenizer,
template and trained parts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from fsdp_tune.data.store import Int32, Int64, Mask, UInt64


def token_hashes(tokens: Int32, trained: Mask, lengths: Int64, origins: Int64) -> UInt64:
    """Return for each example a 64-bit hash of its row: the tokens, and which of them are targets, of all
    examples of the row.

    `tokens` and `trained` [tokens] are concatenated examples of `lengths` [examples]; `origins` [examples, 2]
    are file and row, where the examples of a row are consecutive. The probability that two different ones of
    n rows have equal hashes is n² / 2⁶⁵.
    """
    ends = np.cumsum(lengths)
    targets = trained.copy()
    targets[ends - lengths] = 0  # the first token of an example is never a target
    values = tokens.astype(np.uint32) << 1 | targets
    borders = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    hashes = np.array([xxhash.xxh3_64_intdigest(values[start:end].data) for start, end in borders], np.uint64)
    first, counts = _rows(origins)
    for several in np.flatnonzero(counts > 1):
        of_row = slice(first[several], first[several] + counts[several])
        hashes[of_row] = xxhash.xxh3_64_intdigest(hashes[of_row].data)
    return hashes


def repeated(origins: Int64, hashes: UInt64) -> npt.NDArray[np.bool_]:
    """Return True for each example of a row whose hash an earlier row has. The examples are in the order of
    the recipe's rows."""
    first, counts = _rows(origins)
    _, originals = np.unique(hashes[first], return_index=True)
    is_repeated = np.ones(len(first), bool)
    is_repeated[originals] = False
    return np.repeat(is_repeated, counts)


def _rows(origins: Int64) -> tuple[Int64, Int64]:
    """Return the first example of each row, and its number of examples."""
    is_first = np.ones(len(origins), bool)
    is_first[1:] = np.any(origins[1:] != origins[:-1], axis=1)
    first = np.flatnonzero(is_first)
    return first, np.diff(first, append=len(origins))
