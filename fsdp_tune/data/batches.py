"""The training order of rows: a function of seed, epoch and rows, independent of ranks, workers and numpy's
version.

numpy does not guarantee that `Generator.permutation` is the same in all versions, and a resumed run must
continue the original order. So rows are sorted by a hash of (seed, epoch, row): splitmix64 (Steele et al.,
OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np

from fsdp_tune.data.store import Int64, UInt64
from fsdp_tune.recipe.schema.recipe import Recipe

WINDOW_ROWS = 4096
"""Rows that are sorted by length together: enough to leave little padding, few compared with an epoch."""


def epoch_order(
    lengths: Int64, *, seed: int, epoch: int, shuffle: bool, group_by_length: bool, global_batch_size: int
) -> Int64:
    """Return the row numbers of one epoch, each once; consecutive runs of `global_batch_size` are the global
    batches.

    With `group_by_length` (when rows are not packed) the rows of a global batch have similar lengths: the
    shuffled rows are cut into windows, sorted by length inside a window, cut into global batches, and these
    are shuffled again. The batch with the longest row comes first, so that a run that does not fit in memory
    fails at its first step. Rows of an incomplete global batch come last.
    """
    rows = len(lengths)
    order = shuffled(rows, seed, epoch, 0) if shuffle else np.arange(rows)
    whole = rows - rows % global_batch_size
    if not (shuffle and group_by_length) or whole == 0:
        return order
    window = max(1, WINDOW_ROWS // global_batch_size) * global_batch_size
    grouped = np.concatenate(
        [_sorted_by_length(order[at : min(at + window, whole)], lengths) for at in range(0, whole, window)]
    )
    batches = grouped.reshape(-1, global_batch_size)
    batches = batches[_shuffled_in_windows(len(batches), window // global_batch_size, seed, epoch)]
    longest = int(np.argmax(lengths[batches].max(axis=1)))
    batches[[0, longest]] = batches[[longest, 0]]
    return np.concatenate([batches.reshape(-1), order[whole:]])


def order_of(recipe: Recipe, epoch: int, lengths: Int64, global_batch_size: int | None = None) -> Int64:
    """Return the order of an epoch for a resolved recipe and the lengths of its rows. `global_batch_size`
    None: that of the recipe."""
    return epoch_order(
        lengths,
        seed=recipe.training.seed if recipe.training.data_seed is None else recipe.training.data_seed,
        epoch=epoch,
        shuffle=recipe.data.shuffle,
        group_by_length=not recipe.data.packing,
        global_batch_size=recipe.global_batch_size if global_batch_size is None else global_batch_size,
    )


def rank_micro_batches(batch: Int64, *, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[Int64]:
    """Return the micro-batches of one data-parallel rank in a global batch; every rank gets the same number
    of them.

    A micro-step takes consecutive rows over all ranks, so that its ranks have rows of similar length. In an
    incomplete global batch a rank may get short or empty micro-batches; the loss is weighted by tokens, so it
    stays exact.
    """
    step = dp_size * micro_batch_size
    micro_steps = -(-len(batch) // step)
    starts = [micro_step * step + dp_rank * micro_batch_size for micro_step in range(micro_steps)]
    return [batch[start : start + micro_batch_size] for start in starts]


def _sorted_by_length(rows: Int64, lengths: Int64) -> Int64:
    return rows[np.argsort(lengths[rows], kind="stable")]


def _shuffled_in_windows(batches: int, window: int, seed: int, epoch: int) -> Int64:
    keys = _hashes(batches, seed, epoch, 1)
    return np.lexsort((keys, np.arange(batches) // window))


def shuffled(count: int, *keys: int) -> Int64:
    """Return a permutation of `range(count)` that depends on `keys` alone."""
    return np.argsort(_hashes(count, *keys), kind="stable")


def _hashes(count: int, *keys: int) -> UInt64:
    stream = np.zeros(1, np.uint64)
    for part in keys:
        stream = splitmix64(stream + np.uint64(part % 2**64))
    return splitmix64(stream + np.arange(count, dtype=np.uint64))


def splitmix64(values: UInt64) -> UInt64:
    """Hash 64-bit numbers bijectively, with arithmetic modulo 2**64."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
