"""Divide a source of a stream into units: files, or pieces of files, that are read independently, each from
any row.

The rows of a unit are counted before a run starts: from the footer of a Parquet file, in other local files
and of a loader by reading them once. Files at URLs other than Parquet are not counted. They are divided into
pieces of similar size instead: ranges of bytes of a file of lines without compression; of any other file,
piece p of n has the rows p, p + n, … and skips the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.data.read.file_access import remote_info
from fsdp_tune.data.read.readers import UTF8_BOM, count_lines, count_rows, is_plain_lines, read_rows
from fsdp_tune.data.read.row_files import (
    BadRow,
    NumberedRow,
    Part,
    arrow_row_count,
    dataset_rows,
    parquet_row_count,
)
from fsdp_tune.data.read.sources import RowSource, SourceFile

UNITS_OF_LANE = 8
"""Least number of units of a lane if files can be divided at no cost."""


UNIT_BYTES = 64 << 20


COUNTING_THREADS = 8


NAMED_FILES = 5


NO_MARK = "no mark"
"""In place of an ETag or time in the text of a stamp."""


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What shows whether a file has changed."""

    size_bytes: int
    mark: str | None
    """Modification time of a local file; ETag, or what its server has for that, of a file at a URL; None if
    the server has neither."""

    @property
    def text(self) -> str:
        """The stamp as it is recorded."""
        return f"{self.size_bytes}:{self.mark or NO_MARK}"


@dataclass(frozen=True, slots=True)
class StreamUnit:
    """Piece `piece` of `pieces` of the file with index `number` in the names of its source."""

    source: RowSource
    number: int
    piece: int = 0
    pieces: int = 1
    file_bytes: int | None = None
    """Size of a file that is divided into ranges of bytes; None for other files."""
    stamps: Mapping[str, FileStamp] = field(default_factory=dict[str, FileStamp])
    """Of the files that contain its rows, by name, when the unit was created; empty if there are none."""
    rows_digest: str | None = None
    """Of the rows when the unit was created, if they are not in files."""
    rows: int | None = None
    """Number of its rows, bad ones included; None if it was not counted."""

    @property
    def name(self) -> str:
        """Name of the file, with the range of bytes in which its rows are numbered."""
        name = self.source.names[self.number]
        return (
            name
            if self.piece == 0 or self.file_bytes is None
            else f"{name} (part {self.piece + 1} of {self.pieces})"
        )

    @property
    def file(self) -> SourceFile | None:
        """The file of the unit; None if the rows of the source are not in files."""
        return self.source.files[self.number] if self.source.files else None

    def read(self, start: int = 0) -> Iterator[NumberedRow | BadRow]:
        """Yield the rows of the unit after the first `start`. Those of a range of bytes are numbered from its
        first line: see `locate`.

        Raises: usage error (exit 2) if a file cannot be read, or has changed when the unit has been read to
        its end.
        """
        yield from self._rows(start)
        self._check_stamps()

    def _check_stamps(self) -> None:
        """Raises: usage error if a file has changed since the unit was created."""
        refuse_changed_files(
            stream_stamps([self]),
            stream_stamps([replace(self, stamps=_file_stamps(self.source, self.number))]),
        )

    def _rows(self, start: int) -> Iterator[NumberedRow | BadRow]:
        file, dataset = self.file, self.source.dataset
        if dataset is not None:
            return dataset_rows(dataset, start, len(dataset)) if start < len(dataset) else iter(())
        if file is None:
            return islice((row for _, row in self.source.read()), start, None)
        return read_rows(file.path, file.kind, self._part(start))

    def _part(self, start: int) -> Part:
        if self.file_bytes is None:
            return Part(self.piece + start * self.pieces, self.pieces)
        end = None if self.piece == self.pieces - 1 else self._first_byte(self.piece + 1)
        return Part(start, 1, self._first_byte(self.piece), end)

    def counted(self) -> StreamUnit:
        """Return the unit with the number of its rows, unless that takes a download.

        Raises: usage error if it is unreadable, or has changed since the unit was created.
        """
        file = self.file
        if file is None:
            return self
        if file.kind == "parquet":
            rows = parquet_row_count(file.path)
        elif isinstance(file.path, str):
            return self
        else:
            rows = (
                arrow_row_count(file.path)
                if file.kind == "arrow"
                else count_rows(file.path, file.kind, self._part(0))
            )
        self._check_stamps()
        return replace(self, rows=rows)

    def locate(self, row: int, column: int | None = None) -> Where:
        """Return the position in the file of a row of `read`. The lines before a range of a local file are
        counted now; in a file at a URL the position names the byte from which lines are counted."""
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
    """Return the units of a source in the order of its files, which are not counted. Raises: usage error if a
    file is unreachable."""
    if not source.files and source.stored_in:
        return (StreamUnit(source, 0, stamps=_file_stamps(source, 0), rows=len(source.dataset)),)
    if not source.files:
        rows_digest, rows = source.rows_digest()
        return (StreamUnit(source, 0, rows_digest=rows_digest, rows=rows),)
    stamps = [_file_stamps(source, number) for number in range(len(source.files))]
    sizes = [stamp.size_bytes for of_file in stamps for stamp in of_file.values()]
    target = max(1, min(UNIT_BYTES, -(-sum(sizes) // (UNITS_OF_LANE * lanes))))
    units: list[StreamUnit] = []
    for number, (file, size, of_file) in enumerate(zip(source.files, sizes, stamps, strict=True)):
        pieces, file_bytes = 1, None
        if is_plain_lines(file.path, file.kind):
            pieces, file_bytes = max(1, -(-size // target)), size
        elif isinstance(file.path, str) and file.kind != "parquet":
            pieces = min(lanes, max(-(-lanes // len(sizes)), -(-size // target)))
        units += [StreamUnit(source, number, piece, pieces, file_bytes, of_file) for piece in range(pieces)]
    return tuple(units)


def count_units(units: Sequence[StreamUnit], known: Mapping[str, int]) -> tuple[StreamUnit, ...]:
    """Return the units with the numbers of their rows, from `known` by their names where it has them: of
    files alone, since other sources may have the same name. Raises: usage error if a file cannot be read."""

    def counted(unit: StreamUnit) -> StreamUnit:
        if unit.rows is not None:
            return unit
        return replace(unit, rows=known[unit.name]) if unit.name in known else unit.counted()

    with ThreadPoolExecutor(COUNTING_THREADS) as pool:
        return tuple(pool.map(counted, units))


def rows_of(units: Sequence[StreamUnit]) -> int | None:
    """Return the rows of a source; None if some of its units were not counted."""
    counts = [unit.rows for unit in units if unit.rows is not None]
    return sum(counts) if len(counts) == len(units) else None


def stream_stamps(units: Sequence[StreamUnit]) -> dict[str, str]:
    """Return the stamps of each file as text, to record them, and the digests of the rows of each source
    without files."""
    found: dict[str, dict[str, None]] = {}
    for unit in units:
        for name, stamp in unit.stamps.items():
            found.setdefault(name, {})[stamp.text] = None
        if unit.rows_digest is not None:
            found.setdefault(unit.name, {})[unit.rows_digest] = None
    return {name: " ".join(stamps) for name, stamps in found.items()}


def refuse_changed_files(recorded: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises: usage error (exit 2) naming the files whose stamps differ from the `recorded` ones."""
    changed = sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name))
    if changed:
        raise FsdpTuneError(*(_changed(name).problems[0] for name in changed[:NAMED_FILES]))


def unstamped_files(stamps: Mapping[str, str]) -> list[str]:
    """Return the files of which only a change of size is detected, since their server returns neither an ETag
    nor a time."""
    return [name for name, stamp in stamps.items() if stamp.partition(":")[2] == NO_MARK]


def _file_stamps(source: RowSource, number: int) -> dict[str, FileStamp]:
    """Return the stamps of a file of a source, or of all files of a data set, by their names as they are
    now."""
    paths = [source.files[number].path] if source.files else source.stored_in
    return {str(path): _stamp(path) for path in paths}


def _stamp(path: Path | str) -> FileStamp:
    """Return the stamp of a file as it is now. Raises: usage error if the file cannot be reached."""
    try:
        if isinstance(path, str):
            info = remote_info(path, fresh=True)
            return FileStamp(info.size, info.stamp or None)
        stat = path.stat()
        return FileStamp(stat.st_size, str(stat.st_mtime_ns))
    except OSError as error:
        raise usage_error(
            "data-unreadable", f"cannot be read: {error.strerror or error}", where=Where(str(path))
        ) from error


def _changed(name: str) -> FsdpTuneError:
    hint = (
        "restore it, or start over with `--overwrite`: the rows of a run must not change while it is "
        "trained or resumed"
    )
    return usage_error("data-changed", "it has changed since the run started", hint=hint, where=Where(name))
