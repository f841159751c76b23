"""The stream of a recipe: all that determines its rows, and the state of a lane in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.data.inputs import Input, open_inputs
from fsdp_tune.data.read.file_access import remote_info
from fsdp_tune.data.read.readers import UTF8_BOM, count_lines, count_rows, is_plain_lines, read_rows
from fsdp_tune.data.read.row_files import BadRow, NumberedRow, Part, arrow_row_count, dataset_rows, parquet_row_count
from fsdp_tune.data.read.sources import RowSource, SourceFile
from fsdp_tune.data.store import Origin, UInt64
from fsdp_tune.data.tokenise.encoder import Encoder
from fsdp_tune.data.tokenise.rows import Tokeniser
from fsdp_tune.recipe.schema.recipe import Recipe

STATE_VERSION = 3
"""Incremented when the same `LaneState` would be followed by other rows."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next row of one source in one lane."""

    passes: int = 0
    """Complete passes over the lane's part of the source."""
    unit: int = 0
    """Among the units of the lane in this pass, 0 if the source is counted; NO_UNIT if the source is empty."""
    row: int = 0
    """Rows read, bad ones included: of the unit, or of the lane's part of the pass if the source is counted."""
    read: int = 0
    """Rows read of all passes, bad ones included."""


@dataclass(frozen=True, slots=True)
class LaneState:
    cursors: tuple[Cursor, ...]
    """Of each source, where the window begins."""
    drawn: tuple[float, ...]
    """Rows or tokens of each source that were drawn; see `RowStream.weighs_tokens`."""
    base: tuple[float, ...]
    """Those before the present stage of the curriculum."""
    stage: int = 0
    """Number of the stage."""
    window: int = 0
    """Number of the window."""
    emitted: int = 0
    """Rows of the lane before the window."""
    next: int = 0
    """Rows of the window that were given already."""
    rows_read: int = 0
    rows_bad: int = 0
    rows_truncated: int = 0
    rows_evaluated: int = 0
    """Of these, those whose content an evaluation row has."""
    """Of the windows before this one."""

    def as_list(self) -> list[Any]:
        """Return the state in plain values, for a checkpoint."""
        cursors = [[cursor.passes, cursor.unit, cursor.row, cursor.read] for cursor in self.cursors]
        counts = [self.window, self.emitted, self.next, self.rows_read, self.rows_bad, self.rows_truncated, self.rows_evaluated]
        return [cursors, list(self.drawn), list(self.base), self.stage, *counts]

    @classmethod
    def from_list(cls, stored: Sequence[Any]) -> LaneState:
        cursors, drawn, base, *rest = stored
        return cls(tuple(Cursor(*cursor) for cursor in cursors), tuple(drawn), tuple(base), *rest)


@dataclass(frozen=True, slots=True)
class StreamSource:
    opened: Input
    units: tuple[StreamUnit, ...]
    first_unit: int
    """Number of its first unit, counted over all sources. Rows carry that of their unit as their file."""
    repeats: int | None
    """Passes; None = as many as needed."""
    rows: int | None
    """Of all units; None if they were not counted."""
    first_lane: int
    """Lane of its first row. With `repeats` the sources follow each other, so that the lanes have the same number of rows."""
    mean_tokens: float
    """Of a row of the sample."""

    def read(self, rows: int, passes: int) -> str:
        """Say how many rows of it were read, of those that are known."""
        name = self.opened.entry.label or self.opened.entry.path
        if self.rows is None or self.repeats is None:
            return f"{rows:,} rows of `{name}` were read, in {passes:,} passes"
        return f"{rows:,} of {self.rows * self.repeats:,} rows of `{name}` were read (`repeats: {self.repeats}`)"


@dataclass(frozen=True, slots=True)
class RowStream:
    """All that determines the rows of a run. Picklable: loader processes read it."""

    sources: tuple[StreamSource, ...]
    tokeniser: Tokeniser
    lanes: int
    global_batch: int
    shares: tuple[tuple[int, tuple[float, ...]], ...]
    """(first step, share of each source), in the order of the steps."""
    seed: int
    shuffle: bool
    window_rows: int
    """Of one lane."""
    max_length: int
    packing: str | None
    """Strategy of packing; None = one example a row."""
    weighs_tokens: bool
    """Whether shares are of tokens and not of rows."""
    skips_bad_rows: bool
    most_bad: float
    """Largest share of bad rows in a lane."""
    evaluated: UInt64
    """Sorted hashes of the rows of the evaluation sets."""
    names: tuple[str, ...]
    """Names of all units, by the numbers that rows carry."""
    skipped: frozenset[Origin] = frozenset()
    """Rows that the run leaves out, by the names of their units. They keep their places, so that no other row moves."""

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each file."""
        return {name: stamp for source in self.sources for name, stamp in stream_stamps(source.units).items()}

    def first_state(self) -> LaneState:
        none = (0.0,) * len(self.sources)
        return LaneState((Cursor(),) * len(self.sources), none, none)

    def bad_row(self, unit: int, row: BadRow) -> Problem:
        """Return the problem of a bad row, with its line in the file."""
        source = [each for each in self.sources if each.first_unit <= unit][-1]
        return Problem("bad-row", row.reason, source.units[unit - source.first_unit].locate(row.number, row.column), hint=row.hint)

    def stage_of(self, row: int) -> int:
        """Return the index in `shares` of the stage in which a lane gives its row number `row`."""
        step = row * self.lanes // self.global_batch
        return sum(first <= step for first, _ in self.shares) - 1


def open_stream(
    recipe: Recipe, encoder: Encoder, counts: Mapping[str, int], evaluated: UInt64 | None = None, mean_tokens: Sequence[float] = ()
) -> RowStream:
    """Return the stream of a resolved recipe. `counts`: rows of each unit by its name; units that it lacks are counted now. `evaluated`:
    sorted hashes of the rows of the evaluation sets. `mean_tokens`: of a row of each source, in a sample; else taken as equal.

    Raises: FsdpTuneError if a source cannot be opened.
    """
    data, training = recipe.data, recipe.training
    assert data.stream_lanes != "auto", "the recipe is resolved"
    inputs = open_inputs(recipe, encoder, train_only=True)
    sources: list[StreamSource] = []
    names: list[str] = []
    first_lane = 0
    for opened, mean in zip(inputs, mean_tokens or [data.max_length / 4] * len(inputs), strict=True):
        units = count_units(stream_units(opened.source, data.stream_lanes), counts)
        rows, repeats = rows_of(units), opened.entry.repeats
        sources.append(StreamSource(opened, units, len(names), repeats, rows, first_lane, mean))
        first_lane = (first_lane + (rows or 0) * (repeats or 0)) % data.stream_lanes
        names += [unit.name for unit in units]
    return RowStream(
        sources=tuple(sources),
        tokeniser=Tokeniser(encoder, tuple(opened.settings for opened in inputs)),
        lanes=data.stream_lanes,
        global_batch=recipe.global_batch_size,
        shares=shares_by_step(recipe),
        seed=training.seed if training.data_seed is None else training.data_seed,
        shuffle=data.shuffle,
        window_rows=-(-data.shuffle_buffer_size // data.stream_lanes),
        max_length=data.max_length,
        packing=data.packing_strategy if data.packing else None,
        weighs_tokens=data.mixture.weight_by == "tokens",
        skips_bad_rows=data.on_bad_row == "skip",
        most_bad=data.max_bad_share,
        evaluated=np.zeros(0, np.uint64) if evaluated is None else evaluated,
        names=tuple(names),
    )


def rows_of(units: Sequence[StreamUnit]) -> int | None:
    """Return the rows of a source; None if some of its units were not counted."""
    counts = [unit.rows for unit in units if unit.rows is not None]
    return sum(counts) if len(counts) == len(units) else None


def shares_by_step(recipe: Recipe) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return (first step, shares) of each stage of the curriculum, and of the rest of the run."""
    stages = recipe.data.curriculum
    starts = [0, *(stage.until_step for stage in stages)]
    weights = [tuple(stage.weights) for stage in stages]
    return tuple(zip(starts, [*weights, tuple(source.weight or 1.0 for source in recipe.data.train)], strict=True))


# ---- Divide a source of a stream into units: files, or pieces of files, that are read independently, each from any row.
#
# The rows of a unit are counted before a run starts: from the footer of a Parquet file, in other local files by reading them once. Files at
# URLs other than Parquet are not counted. They are divided into pieces of similar size instead: ranges of bytes of a file of lines without
# compression; of any other file, piece p of n has the rows p, p + n, … and skips the others.

UNITS_OF_LANE = 8
"""Least number of units of a lane if files can be divided at no cost."""
UNIT_BYTES = 64 << 20
COUNTING_THREADS = 8

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
    stamp: str | None = None
    """Of the file when the unit was created; None if the rows are not in files."""
    rows: int | None = None
    """Number of its rows, bad ones included; None if it was not counted."""

    @property
    def name(self) -> str:
        """Name of the file, with the range of bytes in which its rows are numbered."""
        name = self.source.names[self.number]
        return name if self.piece == 0 or self.file_bytes is None else f"{name} (part {self.piece + 1} of {self.pieces})"

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
        """Return the unit with the number of its rows, unless that takes a download. Raises: usage error if it is unreadable."""
        file, dataset = self.file, self.source.dataset
        if dataset is not None:
            return replace(self, rows=len(dataset))
        if file is None:
            return replace(self, rows=sum(1 for _ in self.source.read()))
        if file.kind == "parquet":
            return replace(self, rows=parquet_row_count(file.path))
        if isinstance(file.path, str):
            return self
        rows = arrow_row_count(file.path) if file.kind == "arrow" else count_rows(file.path, file.kind, self._part(0))
        if _stamp(file.path) != self.stamp:
            raise _changed(self.source.names[self.number])
        return replace(self, rows=rows)

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
    """Return the units of a source in the order of its files, not counted. Raises: usage error if a file is unreachable."""
    if not source.files:
        return (StreamUnit(source, 0),)
    stamps = [_stamp(file.path) for file in source.files]
    sizes = [int(stamp.partition(":")[0]) for stamp in stamps]
    target = max(1, min(UNIT_BYTES, -(-sum(sizes) // (UNITS_OF_LANE * lanes))))
    units: list[StreamUnit] = []
    for number, (file, size, stamp) in enumerate(zip(source.files, sizes, stamps, strict=True)):
        pieces, file_bytes = 1, None
        if is_plain_lines(file.path, file.kind):
            pieces, file_bytes = max(1, -(-size // target)), size
        elif isinstance(file.path, str) and file.kind != "parquet":
            pieces = min(lanes, max(-(-lanes // len(sizes)), -(-size // target)))
        units += [StreamUnit(source, number, piece, pieces, file_bytes, stamp) for piece in range(pieces)]
    return tuple(units)


def count_units(units: Sequence[StreamUnit], known: Mapping[str, int]) -> tuple[StreamUnit, ...]:
    """Return the units with the numbers of their rows, from `known` by their names where it has them. Raises: usage error if a file
    cannot be read."""

    def counted(unit: StreamUnit) -> StreamUnit:
        return replace(unit, rows=known[unit.name]) if unit.name in known else unit.counted()

    with ThreadPoolExecutor(COUNTING_THREADS) as pool:
        return tuple(pool.map(counted, units))


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
