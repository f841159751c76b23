"""Divide a source of a stream into units: pieces of files that are read independently, each from any row.

The units depend on the files of the source and on the number of lanes alone. A file of lines without compression is divided into ranges of
bytes, a Parquet file into ranges of rows; of any other file, piece p of n has the rows p, p + n, … and skips the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from fsdp_tune.core.errors import Where
from fsdp_tune.data.read.json_rows import BadRow, NumberedRow, Part
from fsdp_tune.data.read.readers import UTF8_BOM, count_lines, is_plain_lines, read_rows
from fsdp_tune.data.read.sources import RowSource, SourceFile

UNITS_OF_LANE = 8
"""Least number of units of a lane if files can be divided at no cost, so that lanes have similar amounts."""
UNIT_BYTES = 64 << 20
EXCESS = 1.125
"""Largest ratio of the units of one lane to the mean."""

__all__ = ["StreamUnit", "stream_units"]


@dataclass(frozen=True, slots=True)
class StreamUnit:
    """Piece `piece` of `pieces` of the file with index `number` in the names of its source."""

    source: RowSource
    number: int
    piece: int = 0
    pieces: int = 1
    file_bytes: int | None = None
    """Size of a file that is divided into ranges of bytes; None for other files."""
    max_rows: int | None = None
    """Rows of the file of which the unit is a piece; None = all."""

    @property
    def file(self) -> SourceFile | None:
        """The file of the unit; None if the rows of the source are not in files."""
        return self.source.files[self.number] if self.source.files else None

    def read(self, start: int = 0) -> Iterator[NumberedRow | BadRow]:
        """Yield the rows of the unit after the first `start`. Those of a range of bytes are numbered from its first line: see `locate`."""
        first = self.piece + start * self.pieces
        file = self.file
        if file is None:
            return islice((row for _, row in self.source.read()), first, self.max_rows, self.pieces)
        if self.max_rows is not None:
            return islice(read_rows(file.path, file.kind), first, self.max_rows, self.pieces)
        if self.file_bytes is None:
            return read_rows(file.path, file.kind, Part(first, self.pieces))
        end = None if self.piece == self.pieces - 1 else self._first_byte(self.piece + 1)
        return read_rows(file.path, file.kind, Part(start, 1, self._first_byte(self.piece), end))

    def locate(self, row: int, column: int | None = None) -> Where:
        """Return the position in the file of a row of `read`; the lines before a range of bytes are counted now."""
        file = self.file
        before = 0
        if file is not None and self.file_bytes is not None and (start := self._first_byte(self.piece)):
            before = count_lines(file.path, start)
        return Where(self.source.names[self.number], before + row, column)

    def _first_byte(self, piece: int) -> int:
        """Return where a range begins; ranges that would begin inside a byte-order mark begin before it."""
        assert self.file_bytes is not None
        start = self.file_bytes * piece // self.pieces
        return start if start > len(UTF8_BOM) else 0


def stream_units(source: RowSource, lanes: int) -> tuple[StreamUnit, ...]:
    """Return the units of a source in the order of its files, at least one for each lane."""
    if not source.files:
        return tuple(StreamUnit(source, 0, piece, lanes, max_rows=source.entry.max_rows) for piece in range(lanes))
    if source.entry.max_rows is not None:
        return _first_rows(source, source.entry.max_rows, lanes)
    sizes = _range_sizes(source.files, lanes)
    strided = _pieces(len(sizes), lanes)
    target = max(1, min(UNIT_BYTES, sum(size or 0 for size in sizes) // (UNITS_OF_LANE * lanes)))
    units: list[StreamUnit] = []
    for number, size in enumerate(sizes):
        pieces = strided if size is None else max(1, -(-size // target))
        units += [StreamUnit(source, number, piece, pieces, size) for piece in range(pieces)]
    return tuple(units)


def _range_sizes(files: Sequence[SourceFile], lanes: int) -> list[int | None]:
    """Return the size of each file that is divided into ranges of bytes, else None. Ranges need a byte for each lane."""
    sizes = [file.path.stat().st_size if is_plain_lines(file.path, file.kind) else None for file in files]
    return sizes if sum(size or 0 for size in sizes) >= lanes else [None] * len(files)


def _first_rows(source: RowSource, wanted: int, lanes: int) -> tuple[StreamUnit, ...]:
    """Return units of the first `wanted` rows of a source, which are read now to find how many of them are in each file."""
    counts = Counter(number for number, _ in islice(source.read(), wanted))
    pieces = _pieces(max(len(counts), 1), lanes)
    return tuple(StreamUnit(source, number, piece, pieces, max_rows=rows) for number, rows in counts.items() for piece in range(pieces))


def _pieces(files: int, lanes: int) -> int:
    """Return the least number of pieces of each file with which lanes have about the same number of pieces.

    Each piece reads its file from the beginning, so more pieces cost time.
    """
    pieces = -(-lanes // files)
    while -(-files * pieces // lanes) * lanes > EXCESS * files * pieces:
        pieces += 1
    return pieces
