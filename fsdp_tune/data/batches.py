"""From rows to micro-batches: the order of an epoch, micro-batches by token slots, and padded batches."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fsdp_tune.data.store import IGNORE_INDEX, Int32, Int64, Row, RowStore, UInt64
from fsdp_tune.recipe.schema.recipe import Recipe

# ---- The training order of rows: a function of seed, epoch and rows, independent of ranks, workers and numpy's version.
#
# numpy does not guarantee that `Generator.permutation` is the same in all versions, and a resumed run must continue the
# original order. So rows are sorted by a hash of (seed, epoch, row): splitmix64 (Steele et al., OOPSLA 2014).

WINDOW_ROWS = 4096
"""Rows that are sorted by length together: enough to leave little padding, few compared with an epoch."""


def epoch_order(lengths: Int64, *, seed: int, epoch: int, shuffle: bool, group_by_length: bool, global_batch_size: int) -> Int64:
    """Return the row numbers of one epoch, each once; consecutive runs of `global_batch_size` are the global batches.

    With `group_by_length` (when rows are not packed) the rows of a global batch have similar lengths: the shuffled rows
    are cut into windows, sorted by length inside a window, cut into global batches, and these are shuffled again. The
    batch with the longest row comes first, so that a run that does not fit in memory fails at its first step. Rows of an
    incomplete global batch come last.
    """
    rows = len(lengths)
    order = shuffled(rows, seed, epoch, 0) if shuffle else np.arange(rows)
    whole = rows - rows % global_batch_size
    if not (shuffle and group_by_length) or whole == 0:
        return order
    window = max(1, WINDOW_ROWS // global_batch_size) * global_batch_size
    grouped = np.concatenate([_sorted_by_length(order[at : min(at + window, whole)], lengths) for at in range(0, whole, window)])
    batches = grouped.reshape(-1, global_batch_size)
    batches = batches[_shuffled_in_windows(len(batches), window // global_batch_size, seed, epoch)]
    longest = int(np.argmax(lengths[batches].max(axis=1)))
    batches[[0, longest]] = batches[[longest, 0]]
    return np.concatenate([batches.reshape(-1), order[whole:]])


def order_of(recipe: Recipe, epoch: int, lengths: Int64, global_batch_size: int | None = None) -> Int64:
    """Return the order of an epoch for a resolved recipe and the lengths of its rows. `global_batch_size` None: that of the recipe."""
    return epoch_order(
        lengths,
        seed=recipe.training.seed if recipe.training.data_seed is None else recipe.training.data_seed,
        epoch=epoch,
        shuffle=recipe.data.shuffle,
        group_by_length=not recipe.data.packing,
        global_batch_size=recipe.global_batch_size if global_batch_size is None else global_batch_size,
    )


def rank_micro_batches(batch: Int64, *, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[Int64]:
    """Return the micro-batches of one data-parallel rank in a global batch; every rank gets the same number of them.

    A micro-step takes consecutive rows over all ranks, so that its ranks have rows of similar length. In an incomplete
    global batch a rank may get short or empty micro-batches; the loss is weighted by tokens, so it stays exact.
    """
    step = dp_size * micro_batch_size
    micro_steps = -(-len(batch) // step)
    starts = [micro_step * step + dp_rank * micro_batch_size for micro_step in range(micro_steps)]
    return [batch[start : min(start + micro_batch_size, len(batch))] for start in starts]


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


# ---- Divide a global batch into micro-batches by token slots: the rows of a micro-batch × its longest row, padded.
#
# This only assigns rows to ranks and micro-steps. The rows of a step, and so its update, follow from `data/batches.py`.

SAMPLED_STEPS = 1000
"""Largest number of steps that `filling_lines` samples: each takes tenths of a millisecond, and more do not change the shown digits."""


@dataclass(frozen=True, slots=True)
class TokenBudget:
    slots: int
    """Token slots of one micro-batch on one rank, padding included: a multiple of `max_length`, which no row exceeds."""
    multiple_of: int
    max_length: int

    def widths(self, lengths: Int64) -> list[int]:
        return [padded_length(length, self.multiple_of, self.max_length) for length in lengths.tolist()]


def budget_of(recipe: Recipe) -> TokenBudget | None:
    """Return the token budget of a recipe; None if it sets micro-batches in rows."""
    slots = recipe.training.per_device_train_batch_tokens
    return None if slots is None else TokenBudget(slots, recipe.data.pad_to_multiple_of, recipe.data.max_length)


def token_micro_batches(lengths: Int64, budget: TokenBudget, dp_size: int) -> list[list[Int64]]:
    """Return, for [micro-step][rank], indices into `lengths`, the rows of one global batch; each index occurs once.

    Rows are taken longest first, and each micro-batch takes as many of the next rows as fit. No division within the budget has
    fewer micro-batches, because the one with the longest row cannot hold more rows. Their number is rounded up to a multiple of
    `dp_size`. Then the smallest size that needs no more micro-steps is used for the division, so that the ranks of a micro-step
    have about equal work. The rows of the last micro-step are divided again by the smallest size that suffices for them.
    A micro-batch is empty only if there are more micro-batches than rows.
    """
    order = np.argsort(-lengths, kind="stable")
    widths = budget.widths(lengths[order])
    if widths[0] > budget.slots:
        raise ValueError(f"a row of {widths[0]} token slots exceeds the budget of {budget.slots}")
    wanted = -(-len(_starts(widths, budget.slots)) // dp_size) * dp_size
    starts = _evened(widths, budget.slots, wanted)
    last = starts[
        wanted - dp_size
    ]  # in range: `wanted` is the smallest possible number of micro-batches, rounded up to a multiple of `dp_size`
    starts[wanted - dp_size :] = [last + start for start in _evened(widths[last:], budget.slots, dp_size)]
    cut = _split_largest(list(pairwise([*starts, len(widths)])), widths, wanted)
    taken = [order[start:end] for start, end in cut] + [order[:0]] * (wanted - len(cut))
    return [taken[at : at + dp_size] for at in range(0, wanted, dp_size)]


def _starts(widths: list[int], slots: int) -> list[int]:
    """Return the first row of each micro-batch of at most `slots`. `widths` descend, so the first row sets the width of its micro-batch."""
    found: list[int] = []
    at = 0
    while at < len(widths):
        found.append(at)
        at += slots // widths[at]
    return found


def _evened(widths: list[int], enough: int, micro_batches: int) -> list[int]:
    """Return the first row of each micro-batch for the smallest size that gives at most `micro_batches`; `enough` slots suffice."""
    low, high = widths[0], enough
    while low < high:
        middle = (low + high) // 2
        if len(_starts(widths, middle)) <= micro_batches:
            high = middle
        else:
            low = middle + 1
    return _starts(widths, high)


def _split_largest(cut: list[tuple[int, int]], widths: list[int], wanted: int) -> list[tuple[int, int]]:
    """Halve the largest micro-batch until there are `wanted` of them or each has one row; return them in the order of `widths`."""
    largest = [(-(end - start) * widths[start], start, end) for start, end in cut if end - start > 1]
    heapq.heapify(largest)
    done = [(start, end) for start, end in cut if end - start == 1]
    while largest and len(largest) + len(done) < wanted:
        _, start, end = heapq.heappop(largest)
        middle = start + (end - start) // 2
        for part in ((start, middle), (middle, end)):
            if part[1] - part[0] > 1:
                heapq.heappush(largest, (-(part[1] - part[0]) * widths[part[0]], *part))
            else:
                done.append(part)
    return sorted([*done, *((start, end) for _, start, end in largest)])


@dataclass(frozen=True, slots=True)
class Filling:
    """Fill of the micro-batches of an epoch."""

    micro_steps: tuple[int, ...]
    """Number of micro-steps, for each sampled step."""
    tokens: int
    slots: int
    held_slots: int
    """Slots if every rank had as many as the largest rank of its micro-step, so that waiting is counted."""

    def __str__(self) -> str:
        least, most = min(self.micro_steps), max(self.micro_steps)
        mean = sum(self.micro_steps) / len(self.micro_steps)
        text = f"{least} micro-batch{'' if least == 1 else 'es'} a step and rank"
        if most > least:
            text = f"{least} to {most} micro-batches a step and rank, {mean:.1f} on average"
        return f"{text}; {self.tokens / self.slots:.1%} of the slots are real tokens"


def filling(batches: Iterator[list[list[Int64]]], budget: TokenBudget) -> Filling:
    """Measure the fill. `batches` has the lengths of each micro-batch by step, [micro-step][rank]; an empty one is a row of padding."""
    micro_steps: list[int] = []
    tokens = slots = held = 0
    for step in batches:
        micro_steps.append(len(step))
        for ranks in step:
            sizes = [max(1, len(rows)) * budget.widths(rows.max(initial=1, keepdims=True))[0] for rows in ranks]
            tokens += sum(int(rows.sum()) for rows in ranks)
            slots, held = slots + sum(sizes), held + max(sizes) * len(ranks)
    return Filling(tuple(micro_steps), tokens, slots, held)


def filling_lines(recipe: Recipe, train: Path | str) -> list[str]:
    """Describe the micro-batches of the first epoch under the token budget; no lines if it has none. `train` is a set of a store."""
    budget = budget_of(recipe)
    if budget is None:
        return []
    lengths, size = RowStore(train).lengths, recipe.global_batch_size
    order = order_of(recipe, 0, lengths)
    steps = max(1, len(order) // size)
    sampled = np.unique(np.linspace(0, steps - 1, min(steps, SAMPLED_STEPS)).astype(np.int64))
    of_steps = (lengths[order[step * size : (step + 1) * size]] for step in sampled.tolist())
    cut = ([[rows[taken] for taken in ranks] for ranks in token_micro_batches(rows, budget, recipe.data_size)] for rows in of_steps)
    return [f"{budget.slots:,} token slots at most: {filling(cut, budget)}"]


# ---- Collate rows to a batch of equal width, as numpy arrays; the worker converts them to tensors.
#
# There is never an attention mask. Padding is on the right, where causal attention ignores it, and the examples of a packed
# row are separated by position ids that restart at 0. (An all-ones mask would disable that separation: transformers#46634.)


def collate(rows: Sequence[Row], pad_token_id: int, multiple_of: int, *, max_length: int | None = None) -> dict[str, npt.NDArray[np.int64]]:
    """Return `input_ids` and `labels`, int64 [rows, width]: the longest row, rounded up to `multiple_of`, at most `max_length`.

    `position_ids`, of the same shape, are included only if a row has several examples: they count from 0 in each example and
    in the padding. Without rows, the batch is one row of padding without labels, so that a rank without rows still takes part
    in collectives.
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

    The padding of each row is a separate sequence, so that the last entry is the number of tokens in the batch.
    """
    spans = [span for row in rows for span in _spans(row, width)] or [width]
    return np.concatenate([[0], np.cumsum(spans)]).astype(np.int32)


def example_ids(rows: Sequence[Row], width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return (int64 [rows, width], int64 [examples]): the index of each token's example in the batch, and the tokens of each example.

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
