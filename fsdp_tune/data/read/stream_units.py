"""Divide a source of a stream into units: pieces of files that are read independently, each from any row.

The units depend on the files of the source and on the number of lanes alone. A file of lines without compression is divided into ranges of
bytes, a Parquet file into ranges of rows; of any other file, piece p of n has the rows p, p + n, … and skips the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.data.read.arrow_rows import dataset_rows
from fsdp_tune.data.read.json_rows import BadRow, NumberedRow, Part
from fsdp_tune.data.read.readers import UTF8_BOM, count_lines, is_plain_lines, read_rows
from fsdp_tune.data.read.remote import remote_info
from fsdp_tune.data.read.sources import RowSource, SourceFile

UNITS_OF_LANE = 8
"""Least number of units of a lane if files can be divided at no cost, so that lanes have similar amounts."""
UNIT_BYTES = 64 << 20
EXCESS = 1.125
"""Largest ratio of the units of one lane to the mean."""

NAMED_FILES = 5
NO_MARK = "no mark"
"""In place of an ETag or time in a stamp."""


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
    stamp: str | None = None
    """Of the file when the unit was created; None if the rows are not in files."""

    @property
    def file(self) -> SourceFile | None:
        """The file of the unit; None if the rows of the source are not in files."""
        return self.source.files[self.number] if self.source.files else None

    def read(self, start: int = 0) -> Iterator[NumberedRow | BadRow]:
        """Yield the rows of the unit after the first `start`. Those of a range of bytes are numbered from its first line: see `locate`.

        Raises: usage error (exit 2) if the file cannot be read, or has changed when the unit has been read to its end.
        """
        yield from self._rows(start)
        if (file := self.file) is not None and _stamp(file.path) != self.stamp:
            raise _changed(self.source.names[self.number])

    def _rows(self, start: int) -> Iterator[NumberedRow | BadRow]:
        first = self.piece + start * self.pieces
        file, dataset = self.file, self.source.dataset
        if dataset is not None:
            rows = len(dataset) if self.max_rows is None else min(self.max_rows, len(dataset))
            end = rows * (self.piece + 1) // self.pieces
            return dataset_rows(dataset, min(rows * self.piece // self.pieces + start, end), end)
        if file is None:
            return islice((row for _, row in self.source.read()), first, self.max_rows, self.pieces)
        if self.max_rows is not None:
            return islice(read_rows(file.path, file.kind), first, self.max_rows, self.pieces)
        if self.file_bytes is None:
            return read_rows(file.path, file.kind, Part(first, self.pieces))
        end = None if self.piece == self.pieces - 1 else self._first_byte(self.piece + 1)
        return read_rows(file.path, file.kind, Part(start, 1, self._first_byte(self.piece), end))

    def locate(self, row: int, column: int | None = None) -> Where:
        """Return the position in the file of a row of `read`. The lines before a range of a local file are counted now; in a file at a URL
        the position names the byte from which lines are counted."""
        name, file = self.source.names[self.number], self.file
        if file is None or self.file_bytes is None or (start := self._first_byte(self.piece)) == 0:
            return Where(name, row, column)
        if isinstance(file.path, str):
            return Where(f"{name} (after byte {start})", row, column)
        return Where(name, count_lines(file.path, start) + row, column)

    def _first_byte(self, piece: int) -> int:
        """Return where a range begins; ranges that would begin inside a byte-order mark begin before it."""
        assert self.file_bytes is not None
        start = self.file_bytes * piece // self.pieces
        return start if start > len(UTF8_BOM) else 0


def stream_units(source: RowSource, lanes: int) -> tuple[StreamUnit, ...]:
    """Return the units of a source in the order of its files, at least one for each lane. Raises: usage error if a file is unreachable."""
    if not source.files:
        return tuple(StreamUnit(source, 0, piece, lanes, max_rows=source.entry.max_rows) for piece in range(lanes))
    if source.entry.max_rows is not None:
        return _first_rows(source, source.entry.max_rows, lanes)
    sizes = _range_sizes(source.files, lanes)
    strided = _pieces(len(sizes), lanes)
    target = max(1, min(UNIT_BYTES, -(-sum(size or 0 for size in sizes) // (UNITS_OF_LANE * lanes))))
    units: list[StreamUnit] = []
    for number, (file, size) in enumerate(zip(source.files, sizes, strict=True)):
        pieces, stamp = strided if size is None else max(1, -(-size // target)), _stamp(file.path)
        units += [StreamUnit(source, number, piece, pieces, size, stamp=stamp) for piece in range(pieces)]
    return tuple(units)


def stream_stamps(units: Sequence[StreamUnit]) -> dict[str, str]:
    """Return the stamp of each file, to record it."""
    return {unit.source.names[unit.number]: unit.stamp for unit in units if unit.stamp is not None}


def refuse_changed_files(recorded: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises: usage error (exit 2) naming the files whose stamps differ from those recorded when the run started."""
    changed = sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name))
    if changed:
        raise FsdpTuneError(*(_changed(name).problems[0] for name in changed[:NAMED_FILES]))


def unstamped_files(stamps: Mapping[str, str]) -> list[str]:
    """Return the files of which only a change of size is detected, since their server returns neither an ETag nor a time."""
    return [name for name, stamp in stamps.items() if stamp.endswith(NO_MARK)]


def _stamp(path: Path | str) -> str:
    """Return size and modification time of a local file, or size and ETag (or what its server has for that) of a file at a URL."""
    try:
        if isinstance(path, str):
            info = remote_info(path, fresh=True)
            return f"{info.size}:{info.stamp or NO_MARK}"
        stat = path.stat()
        return f"{stat.st_size}:{stat.st_mtime_ns}"
    except OSError as error:
        raise usage_error("data-unreadable", f"cannot be read: {error.strerror or error}", where=Where(str(path))) from error


def _changed(name: str) -> FsdpTuneError:
    hint = "restore the file, or start over with `--overwrite`: the rows of a run must not change while it is trained or resumed"
    return usage_error("data-changed", "it has changed since the run started", hint=hint, where=Where(name))


def _range_sizes(files: Sequence[SourceFile], lanes: int) -> list[int | None]:
    """Return the size of each file that is divided into ranges of bytes, else None. Ranges need a byte for each lane."""
    sizes = [int(_stamp(file.path).partition(":")[0]) if is_plain_lines(file.path, file.kind) else None for file in files]
    return sizes if sum(size or 0 for size in sizes) >= lanes else [None] * len(files)


def _first_rows(source: RowSource, wanted: int, lanes: int) -> tuple[StreamUnit, ...]:
    """Return units of the first `wanted` rows of a source, which are read now to find how many of them are in each file."""
    counts = Counter(number for number, _ in islice(source.read(), wanted)) or {0: 0}
    pieces = _pieces(len(counts), lanes)
    return tuple(
        StreamUnit(source, number, piece, pieces, max_rows=rows, stamp=_stamp(source.files[number].path))
        for number, rows in counts.items()
        for piece in range(pieces)
    )


def _pieces(files: int, lanes: int) -> int:
    """Return the least number of pieces of each file with which lanes have about the same number of pieces.

    Each piece reads its file from the beginning, so more pieces cost time.
    """
    pieces = -(-lanes // files)
    while -(-files * pieces // lanes) * lanes > EXCESS * files * pieces:
        pieces += 1
    return pieces
