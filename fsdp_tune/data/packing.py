"""Several examples to a row: best-fit decreasing, which keeps examples whole, or wrapped, which fills every row.

Best-fit decreasing takes the longest example first and puts it where it leaves the least room (Johnson 1974: at most
11/9 of the fewest rows, plus 4). Examples of one length are placed together, and rows with the same room left are
kept together, so the work is a sort plus one step for each pair of length and room that meet.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fsdp_tune.data.store import Int64

BLOCK_BITS = 1024


@dataclass(frozen=True, slots=True)
class Packed:
    """`segments` [m, 2] (start, length) in the order of the rows; `rows` [r + 1] offsets into them."""

    segments: Int64
    rows: Int64


def one_a_row(segments: Int64) -> Packed:
    return Packed(segments, np.arange(len(segments) + 1, dtype=np.int64))


def best_fit(segments: Int64, capacity: int) -> Packed:
    """Whole segments, none longer than `capacity` tokens; the same input always gives the same rows."""
    lengths = segments[:, 1]
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(order), np.int64)
    rooms = _Rooms(capacity)
    at = 0
    for length, count in _runs(lengths[order]):
        end = at + count
        while at < end:
            at = rooms.place(length, end - at, row_of, at)
    by_row = np.argsort(row_of, kind="stable")
    return Packed(segments[order[by_row]], np.searchsorted(row_of[by_row], np.arange(rooms.opened + 1)))


def wrapped(segments: Int64, capacity: int) -> Packed:
    """Segments one after another, cut where a row of `capacity` tokens is full; only the last row may be shorter."""
    ends = np.cumsum(segments[:, 1])
    total = int(ends[-1])
    cuts = np.arange(capacity, total, capacity, dtype=np.int64)
    stops = np.union1d(ends, cuts)  # both are ends of pieces; a cut may coincide with an end
    starts = np.concatenate([[0], stops[:-1]])
    source = np.searchsorted(ends, starts, side="right")
    begin = np.concatenate([[0], ends[:-1]])
    pieces = np.stack([segments[source, 0] + starts - begin[source], stops - starts], axis=1)
    rows = np.concatenate([[0], np.searchsorted(stops, cuts) + 1, [len(pieces)]])
    return Packed(pieces, rows.astype(np.int64))


class _Rooms:
    """Open rows by the room that they have left, with the smallest sufficient room found by two looks at bit masks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.opened = 0
        self._rows: list[list[int]] = [[] for _ in range(capacity + 1)]
        self._blocks = [0] * (capacity // BLOCK_BITS + 1)
        """Bit r of block b is set where some row has room b × BLOCK_BITS + r left."""
        self._top = 0

    def place(self, length: int, count: int, row_of: Int64, at: int) -> int:
        """Puts some of `count` segments of one length into the rows that they fit best; writes their rows from `at` on."""
        room = self._smallest(length)
        if room is None:
            room = self.capacity
            each = room // length
            opened = -(-count // each)
            rows = list(range(self.opened, self.opened + opened))
            self.opened += opened
        else:
            rows = self._rows[room]
            each = room // length
            rows = self._take(room, -(-count // each))
        placed = min(count, len(rows) * each)
        row_of[at : at + placed] = np.repeat(np.array(rows, np.int64), each)[:placed]
        full, rest = divmod(placed, each)
        self._put(room - each * length, rows[:full])
        if rest:
            self._put(room - rest * length, rows[full:])
        return at + placed

    def _smallest(self, length: int) -> int | None:
        block, bit = divmod(length, BLOCK_BITS)
        here = self._blocks[block] >> bit
        if here:
            return length + (here & -here).bit_length() - 1
        above = self._top >> (block + 1)
        if not above:
            return None
        block += (above & -above).bit_length()
        return block * BLOCK_BITS + (self._blocks[block] & -self._blocks[block]).bit_length() - 1

    def _take(self, room: int, wanted: int) -> list[int]:
        rows = self._rows[room]
        taken = rows[-wanted:]
        del rows[-wanted:]
        if not rows:
            block, bit = divmod(room, BLOCK_BITS)
            self._blocks[block] &= ~(1 << bit)
            if not self._blocks[block]:
                self._top &= ~(1 << block)
        return taken

    def _put(self, room: int, rows: list[int]) -> None:
        if rows and room:
            self._rows[room].extend(rows)
            block, bit = divmod(room, BLOCK_BITS)
            self._blocks[block] |= 1 << bit
            self._top |= 1 << block


def _runs(lengths: Int64) -> list[tuple[int, int]]:
    """(length, how many) of a sorted array."""
    if len(lengths) == 0:
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(lengths)) + 1, [len(lengths)]])
    return list(zip(lengths[starts[:-1]].tolist(), np.diff(starts).tolist(), strict=True))
