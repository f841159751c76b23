"""Lanes of a stream: each reads its own part of every source, window by window, and gives its rows one by one.

Row n of a run is the next row of lane n mod `lanes`. So the order is a function of the recipe and the files, and a rank needs only its
own lanes. A window is a function of the positions at which it begins (`LaneState`): rows are drawn from the sources by their shares,
tokenised, shuffled and packed among themselves. A resumed lane builds its window again, and leaves out the rows that were trained.
`datasets.IterableDataset` is not used: on resume the rows of its shuffle buffer are lost, and a line that is not JSON ends its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fsdp_tune.core.errors import FsdpTuneError, Problem, Where, usage_error
from fsdp_tune.data.build import TokenisedRows
from fsdp_tune.data.format.inputs import Input, kept_columns, open_inputs
from fsdp_tune.data.order.permutation import shuffled
from fsdp_tune.data.pack.sets import Cut, Examples, cut, packed
from fsdp_tune.data.read.json_rows import BadRow, NumberedRow, RowError
from fsdp_tune.data.read.stream_units import StreamUnit, stream_stamps, stream_units
from fsdp_tune.data.review import refuse_bad_share
from fsdp_tune.data.store import Int64, Mask, Row, row_of
from fsdp_tune.data.tokenise.encoder import Encoder
from fsdp_tune.data.tokenise.rows import RawRow, Tokenised, Tokeniser
from fsdp_tune.recipe.schema import Recipe

CHUNK_ROWS = 16
"""Rows that are drawn from one source at a time."""
PACKED_WINDOW = 100
"""Rows of `max_length` tokens in a window that is packed: its last rows, which may stay short, are few among them."""
MOST_UNTRAINED = 10_000
"""Rows without a trained token that a lane reads in turn before it ends the run."""
EMPTY_PASSES = 32
"""Passes, times lanes, in which a lane finds no row of a source before it takes it for empty. The rows of a small source are in few lanes
in each pass, and in others in the next."""
NO_UNIT = -1
UNITS, EXAMPLES, ROWS = range(3)
"""Purposes of hashes, so that no two permutations are the same."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next row of one source in one lane."""

    passes: int = 0
    """Complete passes over the lane's part of the source."""
    unit: int = 0
    """Among the units of the lane in this pass; NO_UNIT if the source is empty."""
    row: int = 0
    """Rows read of the unit, bad ones included."""


@dataclass(frozen=True, slots=True)
class LaneState:
    cursors: tuple[Cursor, ...]
    """Of each source, where the window begins."""
    owed: tuple[float, ...]
    """Rows or tokens of each source that its share of all that was drawn exceeds those that were drawn of it."""
    window: int = 0
    """Number of the window."""
    emitted: int = 0
    """Rows of the lane before the window."""
    next: int = 0
    """Rows of the window that were given already."""
    rows_read: int = 0
    rows_bad: int = 0
    rows_truncated: int = 0
    """Of the windows before this one."""

    def as_list(self) -> list[Any]:
        """Return the state in plain values, for a checkpoint."""
        cursors = [[cursor.passes, cursor.unit, cursor.row] for cursor in self.cursors]
        return [cursors, list(self.owed), self.window, self.emitted, self.next, self.rows_read, self.rows_bad, self.rows_truncated]

    @classmethod
    def from_list(cls, stored: Sequence[Any]) -> LaneState:
        cursors, owed, *rest = stored
        return cls(tuple(Cursor(*cursor) for cursor in cursors), tuple(owed), *rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow(Row):
    """A row of a stream. Its `row_id` is its number in the run."""

    origins: tuple[str, ...]
    """`file:row` of each example."""
    after: LaneState
    """State of its lane after this row."""
    bad: tuple[tuple[str, BadRow], ...] = ()
    """Rows that were skipped in the window that begins with this row, each with the name of its file."""


@dataclass(frozen=True, slots=True)
class StreamSource:
    opened: Input
    units: tuple[StreamUnit, ...]
    first_unit: int
    """Number of its first unit, counted over all sources. Rows carry that of their unit as their file."""
    repeats: int | None
    """Passes; None = as many as needed."""


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
    names: tuple[str, ...]
    """Names of all units, by the numbers that rows carry."""

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each file."""
        return {name: stamp for source in self.sources for name, stamp in stream_stamps(source.units).items()}

    def first_state(self) -> LaneState:
        return LaneState((Cursor(),) * len(self.sources), (0.0,) * len(self.sources))

    def bad_row(self, unit: int, row: BadRow) -> Problem:
        """Return the problem of a bad row, with its line in the file."""
        source = [each for each in self.sources if each.first_unit <= unit][-1]
        return Problem("bad-row", row.reason, source.units[unit - source.first_unit].locate(row.number, row.column))

    def shares_at(self, step: int) -> tuple[float, ...]:
        return [shares for first, shares in self.shares if first <= step][-1]


class Lane:
    """Iterates over the rows of one lane, from a state on."""

    def __init__(self, stream: RowStream, number: int, state: LaneState) -> None:
        self._stream, self._number, self._state = stream, number, state
        self._readers = [_Reader(stream, index, number, cursor) for index, cursor in enumerate(state.cursors)]

    def __iter__(self) -> Iterator[StreamRow]:
        """Yield rows without end. Raises: FsdpTuneError where a row is bad, a file cannot be read, or no source has rows left."""
        untrained, bad = 0, ()
        while True:
            window = _Window(self._stream, self._number, self._state, self._readers, bad)
            untrained, bad = (0, ()) if len(window.order) else (untrained + window.rows_read, window.bad)
            if not len(window.order) and (window.has_ended or untrained >= MOST_UNTRAINED):
                raise window.error(untrained)
            after = replace(window.after, emitted=self._state.emitted + len(window.order))
            for index in range(self._state.next, len(window.order)):
                is_last = index + 1 == len(window.order)
                yield window.row(index, after if is_last else replace(self._state, next=index + 1))
            self._state = after


class _Reader:
    """Reads the units of one source that belong to one lane, pass after pass."""

    def __init__(self, stream: RowStream, source: int, lane: int, cursor: Cursor) -> None:
        self._stream, self._source, self._index, self._lane = stream, stream.sources[source], source, lane
        self.cursor = cursor
        self._has_rows = cursor.row > 0  # a lane stops after a row, unless the source has ended
        """Whether this pass has given a row."""
        self._empty_passes = 0
        self._units = self._units_of_pass()
        self._rows = self._open()

    @property
    def has_ended(self) -> bool:
        repeats = self._source.repeats
        return self.cursor.unit == NO_UNIT or (repeats is not None and self.cursor.passes >= repeats)

    def take(self, count: int) -> tuple[list[RawRow], list[tuple[int, BadRow]]]:
        """Return up to `count` rows, and the bad ones between them with the number of their file."""
        rows: list[RawRow] = []
        bad: list[tuple[int, BadRow]] = []
        source = self._source
        while len(rows) + len(bad) < count and not self.has_ended:
            row = next(self._rows, None)
            if row is None:
                self._next_unit()
                continue
            self.cursor, self._has_rows = replace(self.cursor, row=self.cursor.row + 1), True
            unit = source.first_unit + self._units[self.cursor.unit]
            try:
                if isinstance(row, BadRow):
                    bad.append((unit, row))
                else:
                    rows.append(RawRow(self._index, unit, row[0], kept_columns(row[1], source.opened.entry)))
            except RowError as error:
                bad.append((unit, BadRow(row.number if isinstance(row, BadRow) else row[0], str(error))))
        return rows, bad

    def _units_of_pass(self) -> list[int]:
        """Return the numbers of the lane's units within the source. They are others in each pass: see EMPTY_PASSES."""
        stream, count, passes = self._stream, len(self._source.units), self.cursor.passes
        if stream.shuffle:
            return shuffled(count, stream.seed, UNITS, self._index, passes)[self._lane :: stream.lanes].tolist()
        return list(range((self._lane + passes) % stream.lanes, count, stream.lanes))

    def _open(self) -> Iterator[NumberedRow | BadRow]:
        return iter(()) if self.has_ended else self._source.units[self._units[self.cursor.unit]].read(self.cursor.row)

    def _next_unit(self) -> None:
        if self.cursor.unit + 1 < len(self._units):
            self.cursor = Cursor(self.cursor.passes, self.cursor.unit + 1)
        else:
            self._empty_passes = 0 if self._has_rows else self._empty_passes + 1
            is_empty = self._empty_passes > EMPTY_PASSES * self._stream.lanes
            self.cursor = Cursor(self.cursor.passes + 1, NO_UNIT if is_empty else 0)
            self._units, self._has_rows = self._units_of_pass(), False
        self._rows = self._open()


class _Window:
    """The rows of one window, in order."""

    def __init__(
        self, stream: RowStream, lane: int, state: LaneState, readers: Sequence[_Reader], bad: tuple[tuple[str, BadRow], ...]
    ) -> None:
        """`bad`: rows that were skipped in the windows without rows before it."""
        self._stream, self._lane, self._state = stream, lane, state
        self.has_ended = False
        """Whether no source has rows left."""
        found, tokens, trained, owed = self._read(readers)
        self.rows_read = found.counts["rows"]
        self.bad = (*bad, *((stream.names[file], row) for file, row in found.bad))
        self._untrained = found.untrained[:1]
        self._tokens, self._trained = np.concatenate([*tokens, np.zeros(0, np.int32)]), np.concatenate([*trained, np.zeros(0, np.uint8)])
        self._examples = found.examples()
        examples = self._examples.take(self._shuffled(len(self._examples), EXAMPLES))
        pieces = self._cut(examples, self._trained)
        counts = (state.rows_read + found.counts["rows"], state.rows_bad + len(found.bad), state.rows_truncated + len(pieces.truncated))
        self.after = LaneState(tuple(reader.cursor for reader in readers), owed, state.window + 1, 0, 0, *counts)
        packing = stream.packing is not None and len(pieces.segments) > 0
        _, self._rows = packed(pieces, self._trained, stream.max_length, packing=packing, strategy=stream.packing or "")
        self.order = self._shuffled(len(self._rows.rows) - 1, ROWS)

    def row(self, index: int, after: LaneState) -> StreamRow:
        at = self.order[index]
        segments = self._rows.segments[self._rows.rows[at] : self._rows.rows[at + 1]]
        row = row_of(self._tokens, self._trained, segments, (self._state.emitted + index) * self._stream.lanes + self._lane)
        owners = np.searchsorted(self._examples.starts, segments[:, 0], side="right") - 1
        names = self._stream.names
        return StreamRow(
            *(row.input_ids, row.labels, row.lengths, row.row_id),
            origins=tuple(f"{names[file]}:{number}" for file, number in self._examples.origins[owners].tolist()),
            sources=tuple(self._examples.sources[owners].tolist()),
            after=after,
            bad=self.bad if index == 0 else (),
        )

    def _read(self, readers: Sequence[_Reader]) -> tuple[TokenisedRows, list[Any], list[Any], tuple[float, ...]]:
        """Draw and tokenise rows until the window is full or no source has rows left."""
        stream, state = self._stream, self._state
        shares = stream.shares_at(state.emitted * stream.lanes // stream.global_batch)
        # The first windows have different sizes, so that lanes do not build theirs at the same time.
        size = (self._lane + 1) / stream.lanes if state.window == 0 else 1.0
        least_rows = max(1, round(size * stream.window_rows))
        least_tokens = size * PACKED_WINDOW * stream.max_length if stream.packing is not None else 0
        found, tokens, trained, kept, useful = TokenisedRows(), list[Any](), list[Any](), 0, 0
        owed = list(state.owed)
        while found.counts["rows"] < least_rows or (kept < least_tokens and found.counts["rows"] - useful < MOST_UNTRAINED):
            live = [source for source, reader in enumerate(readers) if shares[source] > 0 and not reader.has_ended]
            if not live:
                self.has_ended = True
                break
            source = max(live, key=lambda source: owed[source])
            rows, bad = readers[source].take(CHUNK_ROWS)
            chunk = stream.tokeniser.chunk(rows)
            chunk.bad += bad
            chunk.counts["rows"] += len(bad)
            self._refuse(chunk.bad)
            found.add(chunk)
            bad_rows, rows_read = state.rows_bad + len(found.bad), state.rows_read + found.counts["rows"]
            refuse_bad_share(bad_rows, rows_read, stream.most_bad, hint="fix them")
            tokens.append(chunk.tokens)
            trained.append(chunk.trained)
            length = self._kept_tokens(chunk)
            kept += length
            useful = found.counts["rows"] if length else useful
            drawn = length if stream.weighs_tokens else len(rows)
            for each in live:
                owed[each] += drawn * shares[each] / sum(shares[every] for every in live) - (drawn if each == source else 0)
        return found, tokens, trained, tuple(owed)

    def _kept_tokens(self, chunk: Tokenised) -> int:
        """Return the tokens of a chunk that `overlong` leaves in rows: all pieces of a row that is split, none of one that is dropped."""
        if not (chunk.lengths > self._stream.max_length).any():
            return int(chunk.lengths.sum())
        found = TokenisedRows()
        found.add(chunk)
        return int(self._cut(found.examples(), chunk.trained).segments[:, 1].sum())

    def _cut(self, examples: Examples, trained: Mask) -> Cut:
        stream = self._stream
        return cut(examples, [source.opened.overlong for source in stream.sources], stream.max_length, trained, stream.names)

    def _refuse(self, bad: Sequence[tuple[int, BadRow]]) -> None:
        if bad and not self._stream.skips_bad_rows:
            raise FsdpTuneError(*(self._stream.bad_row(unit, row) for unit, row in bad[:5]))

    def _shuffled(self, count: int, purpose: int) -> Int64:
        if not self._stream.shuffle:
            return np.arange(count)
        return shuffled(count, self._stream.seed, purpose, self._lane, self._state.window)

    def error(self, untrained: int) -> FsdpTuneError:
        """Return the error of a window without rows, after `untrained` rows without a trained token."""
        stream = self._stream
        if self.has_ended and self._state.emitted == 0:
            message = f"lane {self._lane} of {stream.lanes} has no rows: there are too few to stream"
            return usage_error("stream-ended", message, hint="leave `data.streaming` out, or lower `data.stream_lanes`")
        if self.has_ended:
            steps = (self._state.emitted * stream.lanes + self._lane) // stream.global_batch
            message = f"the stream has no row left for step {steps + 1}: every source with a weight was read as often as `repeats` allows"
            hint = f"`--resume auto --set training.max_steps={steps}` ends the run there; higher `repeats` need a new run"
            return usage_error("stream-ended", message, hint=hint)
        where = Where(stream.names[self._untrained[0][0] if self._untrained else 0])
        message = f"none of {untrained:,} rows that were read in turn has a token to train"
        return usage_error("no-supervised-tokens", message, where=where, hint="check `loss_on`, and that `max_length` reaches the answers")


# ---- The stream of a recipe.


def open_stream(recipe: Recipe, encoder: Encoder) -> RowStream:
    """Return the stream of a resolved recipe. Raises: FsdpTuneError if a source cannot be opened."""
    data, training = recipe.data, recipe.training
    assert data.stream_lanes != "auto", "the recipe is resolved"
    inputs = open_inputs(recipe, encoder, train_only=True)
    sources: list[StreamSource] = []
    names: list[str] = []
    for opened in inputs:
        units = stream_units(opened.source, data.stream_lanes)
        sources.append(StreamSource(opened, units, len(names), opened.entry.repeats))
        names += map(unit_name, units)
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
        names=tuple(names),
    )


def unit_name(unit: StreamUnit) -> str:
    """Return the name of the file, with the range of bytes in which its rows are numbered."""
    name = unit.source.names[unit.number]
    return name if unit.file_bytes is None or unit.piece == 0 else f"{name} (part {unit.piece + 1} of {unit.pieces})"


def shares_by_step(recipe: Recipe) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return (first step, shares) of each stage of the curriculum, and of the rest of the run."""
    stages = recipe.data.curriculum
    starts = [0, *(stage.until_step for stage in stages)]
    weights = [tuple(stage.weights) for stage in stages]
    return tuple(zip(starts, [*weights, tuple(source.weight or 1.0 for source in recipe.data.train)], strict=True))
