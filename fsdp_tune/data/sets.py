"""Assign examples to rows: hold out, mix, cut to length, pack. Index arithmetic over lengths; no tokens are
copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.errors import Where, usage_error
from fsdp_tune.data.batches import splitmix64
from fsdp_tune.data.packing import PackedRows, best_fit, one_a_row, wrapped
from fsdp_tune.data.store import Int64, Mask, UInt64
from fsdp_tune.recipe.schema.data_section import EvalFraction, EvalRows, Mixture

NAMED_ROWS = 10
"""Number of rows that a message or a report lists; the rest are only counted."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Examples:
    """All tokenised examples, one entry per example in each array."""

    starts: Int64
    """First token in the pool."""
    lengths: Int64
    supervised: Int64
    sources: Int64
    hashes: UInt64
    token_hashes: UInt64
    origins: Int64
    """[examples, 2]: file, row in the file."""

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, index: npt.NDArray[Any]) -> Examples:
        return Examples(
            self.starts[index],
            self.lengths[index],
            self.supervised[index],
            self.sources[index],
            self.hashes[index],
            self.token_hashes[index],
            self.origins[index],
        )


def held_out(hashes: UInt64, wanted: EvalFraction | EvalRows) -> Bools:
    """Return True for each row to evaluate on. Rows are chosen by their content: equal rows are on the same
    side, and neither order, seed nor tokenizer changes the choice. A fraction is applied to each row
    independently, so rows may be added later."""
    if isinstance(wanted, EvalFraction):
        return hashes < np.uint64(min(int(wanted.fraction * 2**64), 2**64 - 1))
    if wanted.rows >= len(hashes):
        raise usage_error(
            "empty-split", f"`data.eval.rows: {wanted.rows}` would hold out all of {len(hashes):,} rows"
        )
    return hashes <= np.partition(hashes, wanted.rows - 1)[wanted.rows - 1]


def mixed(
    sources: Int64,
    sizes: Sequence[int],
    weights: Sequence[float | None],
    mixture: Mixture,
    tokens: Sequence[int] | None = None,
) -> Int64:
    """Return the indices of the examples of one epoch, source by source; an example may be drawn several
    times.

    `sources` [n] is the source of each example, `sizes` the number of examples of each source. Without
    weights and with temperature 1, every example occurs once. Otherwise the shares are the weights, or amount
    ** (1 / temperature); `all_exhausted` repeats the other sources until each has been drawn completely,
    `first_exhausted` stops when the first one is used up (as in `datasets`). Amounts and shares count
    examples, or `tokens` of each source if given.
    """
    if not is_weighted(weights, mixture):
        return np.arange(len(sources))
    if not all(weights) and any(weights):
        raise usage_error(
            "weights-missing",
            "some entries of `data.train` have a `weight` and others do not",
            hint="give one to each",
        )
    amounts = sizes if tokens is None else tokens
    shares = [
        weight or amount ** (1 / mixture.temperature) for weight, amount in zip(weights, amounts, strict=True)
    ]
    epochs = [amount / share for amount, share in zip(amounts, shares, strict=True)]
    scale = max(epochs) if mixture.stopping_strategy == "all_exhausted" else min(epochs)
    counts = [round(size * (scale / epoch)) for size, epoch in zip(sizes, epochs, strict=True)]
    drawn = [_draw(np.flatnonzero(sources == source), count, source) for source, count in enumerate(counts)]
    return np.concatenate(drawn)


def is_weighted(weights: Sequence[float | None], mixture: Mixture) -> bool:
    """Return whether the mixture draws sources in other proportions than every example once."""
    return any(weights) or mixture.temperature != 1.0


def _draw(examples: Int64, count: int, source: int) -> Int64:
    """Draw `count` of the examples: as many complete passes as fit, and a hashed selection for the rest."""
    passes, rest = divmod(count, len(examples))
    scattered = np.argsort(
        splitmix64(np.arange(len(examples), dtype=np.uint64) + np.uint64(source << 32)), kind="stable"
    )
    return np.concatenate([np.tile(examples, passes), np.sort(examples[scattered[:rest]])])


@dataclass(frozen=True, slots=True)
class Cut:
    """Segments no longer than `max_length`, and the treatment of longer examples."""

    segments: Int64
    """[m, 2] start, length."""
    supervised: Int64
    """Number of targets in each segment."""
    sources: Int64
    """Source of each segment."""
    truncated: Int64
    """[k, 2] origins of truncated rows, including those of `emptied`; a row that is drawn twice counts
    once."""
    split: int
    dropped: Int64
    """[k, 2] origins of rows dropped by `overlong: drop`."""
    emptied: Int64
    """[k, 2] origins of rows without a trained token after cutting."""


def cut(
    examples: Examples, overlong: Sequence[str], max_length: int, trained: Mask, names: Sequence[str]
) -> Cut:
    """Cut examples to `max_length`. `overlong` is a mode per source: truncate | drop | split | error;
    `trained` has a flag for every token of the pool; `names` are the names of the files."""
    long = examples.lengths > max_length
    modes = np.array(overlong)[examples.sources]
    _refuse_long(examples, long & (modes == "error"), max_length, names)
    keep = ~(long & (modes == "drop"))
    lengths = np.where(long & (modes == "truncate"), max_length, examples.lengths)
    pieces = np.where(long & (modes == "split"), -(-examples.lengths // max_length), 1) * keep
    owner = np.repeat(np.arange(len(examples)), pieces)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = examples.starts[owner] + within * max_length
    sizes = np.minimum(max_length, lengths[owner] - within * max_length)
    supervised = examples.supervised[owner].copy()
    for piece in np.flatnonzero(long[owner]):
        supervised[piece] = np.count_nonzero(trained[starts[piece] + 1 : starts[piece] + sizes[piece]])
    useful = supervised > 0
    emptied = np.setdiff1d(owner, owner[useful])
    return Cut(
        segments=np.stack([starts, sizes], axis=1)[useful],
        supervised=supervised[useful],
        sources=examples.sources[owner][useful],
        truncated=np.unique(examples.origins[long & (modes == "truncate")], axis=0),
        split=int(np.count_nonzero(long & (modes == "split"))),
        dropped=np.unique(examples.origins[~keep], axis=0),
        emptied=np.unique(examples.origins[emptied], axis=0),
    )


def _refuse_long(examples: Examples, long: Bools, max_length: int, names: Sequence[str]) -> None:
    if not long.any():
        return
    (file, first), *others = [
        (int(file), int(row)) for file, row in np.unique(examples.origins[long], axis=0)
    ]
    longest = f"{int(examples.lengths[long].max()):,} tokens"
    message = f"the row is longer than `data.max_length: {max_length}`: it has {longest}"
    if others:
        named = ", ".join(f"{names[number]}:{row}" for number, row in others[: NAMED_ROWS - 1])
        message = (
            f"{len(others) + 1:,} rows are longer than `data.max_length: {max_length}`, the longest has "
            f"{longest}; after this one: {named}"
        )
    hint = "raise `data.max_length`, or set `data.overlong` to truncate, drop or split"
    raise usage_error("row-too-long", message, hint=hint, where=Where(names[file], first))


def packed(
    pieces: Cut, trained: Mask, max_length: int, *, packing: bool, strategy: str
) -> tuple[Cut, PackedRows]:
    """Return the packed rows, and `pieces` with updated targets: a segment that packing cuts loses the target
    after the cut."""
    if not packing:
        return pieces, one_a_row(pieces.segments)
    if strategy != "wrapped":
        return pieces, best_fit(pieces.segments, max_length)
    rows = wrapped(pieces.segments, max_length)
    supervised = pieces.supervised.copy()
    np.subtract.at(supervised, rows.cuts[:, 0], trained[rows.cuts[:, 1]].astype(np.int64))
    return replace(pieces, supervised=supervised), rows
