"""The arithmetic of a stream, without files: which rows of a source a lane reads in a pass, and which source
each row of a run is from.

Row j of all passes over a source, counted from 0, belongs to lane j mod `lanes` and to pass j // rows. So the
lanes together read each row of a pass once, and their amounts differ by at most one row. Within a pass the
rows of a lane are consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fsdp_tune.data.batches import shuffled, splitmix64

BLOCK_ROUNDS = 2048
"""Rounds that are scheduled together. A round has one row of each lane."""
CANDIDATES = 32
"""Packed rows among which the next is chosen."""


def part_of_pass(rows: int, lanes: int, lane: int, passes: int) -> tuple[int, int]:
    """Return begin and end of the rows that a lane reads in a pass over a source of `rows` rows."""
    first, last = passes * rows, (passes + 1) * rows
    begin = sum(_before(last, lanes, each) - _before(first, lanes, each) for each in range(lane))
    return begin, begin + _before(last, lanes, lane) - _before(first, lanes, lane)


def _before(end: int, lanes: int, lane: int) -> int:
    """Return how many of the numbers below `end` are `lane` modulo `lanes`."""
    return max(0, -(-(end - lane) // lanes))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The source of each row of a run, so that each prefix has the shares of the sources and each lane has
    them too."""

    shares: tuple[float, ...]
    lanes: int

    def sources(self, lane: int, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return the sources of the rows `start` to `start + count - 1` of a lane."""
        if sum(share > 0 for share in self.shares) == 1:
            return np.full(count, int(np.argmax(self.shares)))
        blocks = range(start // BLOCK_ROUNDS, -(-(start + count) // BLOCK_ROUNDS))
        found = np.concatenate(
            [np.zeros(0, np.int64), *(_block(self.shares, self.lanes, block)[:, lane] for block in blocks)]
        )
        begin = start % BLOCK_ROUNDS
        return found[begin : begin + count]


@lru_cache(maxsize=8)
def _block(shares: tuple[float, ...], lanes: int, block: int) -> npt.NDArray[np.int64]:
    """Return the sources [rounds, lanes] of a block: a round has the sources that are most behind, in the
    lanes that had least of them."""
    wanted, start = np.array(shares) / sum(shares), block * BLOCK_ROUNDS * lanes
    counts = _counts_before(wanted, start, lanes)
    left = _counts_before(wanted, start + BLOCK_ROUNDS * lanes, lanes) - counts
    had = np.zeros((lanes, len(shares)))
    result = np.zeros((BLOCK_ROUNDS, lanes), np.int64)
    rarest_first = np.argsort(wanted, kind="stable")
    ties = splitmix64(np.arange(start, start + BLOCK_ROUNDS * lanes, dtype=np.uint64)).reshape(-1, lanes)
    for index in range(BLOCK_ROUNDS):
        first = start + index * lanes
        taken = _round(wanted * (first + lanes) - counts, left, lanes)
        free = np.argsort(ties[index], kind="stable")
        for source in rarest_first[:-1]:
            if taken[source] == 1:  # at the row where its share makes it due, among the lanes that had few
                due = (counts[source] + 0.5) / wanted[source] - first
                few = had[free, source] <= had[free, source].min()
                order = free[np.argsort(np.where(few, np.abs(free - due), np.inf), kind="stable")]
            elif taken[source]:
                order = free[np.argsort(had[free, source], kind="stable")]
            else:
                continue
            chosen, free = order[: taken[source]], order[taken[source] :]
            result[index, chosen] = source
            had[chosen, source] += 1
        result[index, free] = rarest_first[-1]
        had[free, rarest_first[-1]] += 1
        counts, left = counts + taken, left - taken
    return result


def _counts_before(wanted: npt.NDArray[np.float64], rows: int, lanes: int) -> npt.NDArray[np.int64]:
    """Return the rows of each source before a block, less than one from its share; they never fall from a
    block to the next."""
    exact = wanted * rows
    rare = wanted * BLOCK_ROUNDS * lanes < 2
    counts = np.floor(exact + 0.5 * rare).astype(np.int64)
    by_remainder = np.argsort(np.where(rare, np.inf, counts - exact), kind="stable")
    missing = rows - int(counts.sum())
    for index in range(abs(missing)):
        counts[by_remainder[index % int((~rare).sum())]] += 1 if missing > 0 else -1
    return counts


def _round(need: npt.NDArray[np.float64], left: npt.NDArray[np.int64], lanes: int) -> npt.NDArray[np.int64]:
    """Return how many rows of each source a round has, at whose end the sources are `need` rows behind and
    the block has `left` of them."""
    taken = np.minimum(np.maximum(np.floor(need), 0).astype(np.int64), left)
    while taken.sum() < lanes:
        taken[int(np.argmax(np.where(taken < left, need - taken, -np.inf)))] += 1
    while taken.sum() > lanes:
        taken[int(np.argmin(np.where(taken > 0, need - taken, np.inf)))] -= 1
    return taken


def planned_sources(
    shares: Sequence[float],
    drawn: Sequence[float],
    lengths: Sequence[float],
    live: Sequence[int],
    phases: Sequence[float],
    count: int,
) -> list[int]:
    """Return the sources of the next `count` rows of one lane: always the one whose next row is due first
    (the divisor method of Sainte-Laguë, over rows of different lengths).

    `drawn` are rows or tokens of each source so far, `lengths` those of its mean row, `phases` in rows what
    keeps lanes from drawing a source at the same time.
    """
    amounts = list(drawn)
    chosen: list[int] = []
    for _ in range(count):
        first = min(
            live, key=lambda source: due(shares[source], amounts[source], lengths[source], phases[source])
        )
        amounts[first] += lengths[first]
        chosen.append(first)
    return chosen


def due(share: float, before: Any, length: Any, phase: float) -> Any:
    """Return when a row is due, in rows or tokens of all sources: when the share of its source reaches the
    middle of the row."""
    return (before + length * (0.5 + phase)) / share


def balanced(
    order: npt.NDArray[np.int64],
    amounts: npt.NDArray[np.float64],
    shares: Sequence[float],
    ahead: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Return packed rows in an order whose prefixes have the shares of the sources: always the one of the
    next `CANDIDATES` in `order` that leaves the sources closest to them.

    `amounts` are rows or tokens of each source in each packed row, `ahead` those by which the sources are
    ahead of their shares.
    """
    wanted = np.array(shares) / sum(shares)
    scale = np.sqrt(np.where(wanted > 0, wanted, 1))
    errors, off = (amounts - amounts.sum(1, keepdims=True) * wanted) / scale, ahead / scale
    pool, chosen, following = order[:CANDIDATES].copy(), list[int](), iter(order[CANDIDATES:].tolist())
    while len(pool):
        best = int(np.argmin(((off + errors[pool]) ** 2).sum(1)))
        off = off + errors[pool[best]]
        chosen.append(int(pool[best]))
        coming = next(following, None)
        pool = (
            np.delete(pool, best) if coming is None else np.where(np.arange(len(pool)) == best, coming, pool)
        )
    return np.array(chosen, np.int64)


def phases_of(lane: int, shares: Sequence[float], lanes: int) -> list[float]:
    """Return an offset in (-0.5, 0.5) for each source, evenly spread over the lanes; 0 for the source with
    the largest share."""
    largest = int(np.argmax(shares))
    ranks = [int(np.argsort(shuffled(lanes, source))[lane]) for source in range(len(shares))]
    return [0.0 if source == largest else (rank + 0.5) / lanes - 0.5 for source, rank in enumerate(ranks)]
