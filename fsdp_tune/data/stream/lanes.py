"""Lanes of a stream: each reads its own part of every source, window by window, and gives its rows one by
one.

Row n of a run is the next row of lane n mod `lanes`. So the order is a function of the recipe and the files,
and a rank needs only its own lanes. `dealing.py` has the arithmetic. A window is a function of the positions
at which it begins (`LaneState`): rows are drawn from the sources by their shares, tokenised, shuffled among
those of the same source and pass, and packed among themselves. A resumed lane builds its window again, and
leaves out the rows that were trained.
`datasets.IterableDataset` is not used: on resume the rows of its shuffle buffer are lost, and a line that is
not JSON ends its file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsdp_tune.core.errors import FsdpTuneError, Where, usage_error
from fsdp_tune.data.bad_rows import refuse_bad_share
from fsdp_tune.data.batches import shuffled
from fsdp_tune.data.build import TokenisedRows
from fsdp_tune.data.inputs import kept_columns
from fsdp_tune.data.read.row_files import BadRow, NumberedRow, RowError
from fsdp_tune.data.sets import Cut, Examples, cut, packed
from fsdp_tune.data.store import Int32, Int64, Mask, Row, row_of
from fsdp_tune.data.stream.dealing import Schedule, balanced, due, part_of_pass, phases_of, planned_sources
from fsdp_tune.data.stream.row_stream import Cursor, LaneState, RowStream
from fsdp_tune.data.tokenise.rows import RawRow, Tokenised

PLANNED_ROWS, PLANNED_BY_TOKENS = 64, 8
"""Rows that a lane plans, draws and measures together, by rows and by tokens, whose number is known once they
are drawn."""
PACKED_WINDOW = 100
"""Rows of `max_length` tokens in a window that is packed: its last rows, which may stay short, are few among
them."""
MOST_UNTRAINED = 10_000
"""Rows without a trained token that a lane reads in turn before it ends the run."""
EMPTY_PASSES = 32
"""Passes, times lanes, in which a lane finds no row of a source that was not counted before it takes it for
empty. The rows of a small source are in few lanes in each pass, and in others in the next."""
NO_UNIT = -1
FEWEST_ROWS = 1000
"""Rows from which on the share of bad rows of a lane is judged."""
SAMPLED_ROWS = 64
"""Weight, in rows, of the mean length in the sample against the lengths that a lane has measured."""
UNITS, EXAMPLES, ROWS = range(3)
"""Purposes of hashes, so that no two permutations are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRow(Row):
    """A row of a stream. Its `row_id` is its number in the run. A lane that has no row left gives empty rows,
    until the run ends."""

    origins: tuple[str, ...]
    """`file:row` of each example; none in an empty row."""
    after: LaneState
    """State of its lane after this row."""
    bad: tuple[tuple[str, BadRow], ...] = ()
    """Rows that were skipped in the window that begins with this row, each with the name of its file."""
    is_skipped: bool = False
    """Whether it is empty since the run leaves out all of its examples."""


class _ReadRows(NamedTuple):
    """The rows of a window."""

    rows: TokenisedRows
    tokens: list[Int32]
    """Of each chunk of rows."""
    trained: list[Mask]
    drawn: tuple[float, ...]
    """Rows or tokens of each source since the beginning of the stream."""


class Lane:
    """Iterates over the rows of one lane, from a state on."""

    def __init__(self, stream: RowStream, number: int, state: LaneState) -> None:
        self._stream, self._number, self._state = stream, number, state
        self._readers = [_Reader(stream, index, number, cursor) for index, cursor in enumerate(state.cursors)]

    def __iter__(self) -> Iterator[StreamRow]:
        """Yield rows without end, empty ones once no source has rows left. Raises: FsdpTuneError where a row
        is bad or a file cannot be read."""
        untrained, bad = 0, ()
        while True:
            window = _Window(self._stream, self._number, self._state, self._readers, bad)
            untrained, bad = (0, ()) if len(window.order) else (untrained + window.rows_read, window.bad)
            if not len(window.order) and window.has_ended:
                for row in window.empty_rows():
                    self._state = row.after
                    yield row
                continue
            if untrained >= MOST_UNTRAINED:
                raise window.error(untrained)
            after = replace(window.after, emitted=self._state.emitted + len(window.order))
            for index in range(self._state.next, len(window.order)):
                is_last = index + 1 == len(window.order)
                yield window.row(index, after if is_last else replace(self._state, next=index + 1))
            self._state = after


class _Reader:
    """Reads the rows of one source that belong to one lane, pass after pass."""

    def __init__(self, stream: RowStream, source: int, lane: int, cursor: Cursor) -> None:
        self._stream, self._source, self._index, self._lane = stream, stream.sources[source], source, lane
        self.cursor = cursor
        self._has_rows = cursor.row > 0  # a lane stops after a row, unless the source has ended
        """Whether this pass has given a row."""
        self._empty_passes = 0
        self._units: Sequence[int] = ()
        self._part = (0, 0)
        self._rows: Iterator[tuple[int, NumberedRow | BadRow]] = iter(())
        self._begin_pass()

    @property
    def has_ended(self) -> bool:
        repeats = self._source.repeats
        return self.cursor.unit == NO_UNIT or (repeats is not None and self.cursor.passes >= repeats)

    def take(self, count: int) -> tuple[list[RawRow], list[tuple[int, BadRow]]]:
        """Return up to `count` rows of one pass, and the bad ones between them with the number of their
        file."""
        rows: list[RawRow] = []
        bad: list[tuple[int, BadRow]] = []
        while len(rows) + len(bad) < count and not self.has_ended:
            found = next(self._rows, None)
            if found is None:
                if rows or bad:
                    break  # the next pass
                self._next_part()
                continue
            self.cursor, self._has_rows = (
                replace(self.cursor, row=self.cursor.row + 1, read=self.cursor.read + 1),
                True,
            )
            unit, row = found
            unit += self._source.first_unit
            try:
                if isinstance(row, BadRow):
                    bad.append((unit, row))
                else:
                    rows.append(
                        RawRow(self._index, unit, row[0], kept_columns(row[1], self._source.opened.entry))
                    )
            except RowError as error:
                bad.append((unit, error.bad_row(row.number if isinstance(row, BadRow) else row[0])))
            if self._source.rows is not None and self.cursor.row == self._part[1] - self._part[0]:
                self._next_part()
                break
        return rows, bad

    def _begin_pass(self) -> None:
        """Open the lane's part of the pass at the cursor; passes over a counted source in which the lane has
        no row are left out."""
        source, lanes = self._source, self._stream.lanes
        if source.rows == 0:
            self.cursor = replace(self.cursor, unit=NO_UNIT)
        if source.rows:
            lane = (self._lane - source.first_lane) % lanes
            while not self.has_ended:
                self._part = part_of_pass(source.rows, lanes, lane, self.cursor.passes)
                if self._part[0] < self._part[1]:
                    break
                self.cursor = replace(self.cursor, passes=self.cursor.passes + 1)
        if not self.has_ended:
            self._units = self._units_of_pass()
            self._rows = self._open()

    def _units_of_pass(self) -> list[int]:
        """Return the units of a counted source in the order of the pass, or the lane's own units of another
        source."""
        stream, count, passes = self._stream, len(self._source.units), self.cursor.passes
        order = (
            shuffled(count, stream.seed, UNITS, self._index, passes).tolist()
            if stream.shuffle
            else list(range(count))
        )
        return (
            order
            if self._source.rows is not None
            else order[(self._lane + passes) % stream.lanes :: stream.lanes]
        )

    def _open(self) -> Iterator[tuple[int, NumberedRow | BadRow]]:
        source, cursor = self._source, self.cursor
        if source.rows is None:
            numbers = self._units[cursor.unit : cursor.unit + 1]
            return ((number, row) for number in numbers for row in source.units[number].read(cursor.row))
        return self._rows_between(self._part[0] + cursor.row, self._part[1])

    def _rows_between(self, begin: int, end: int) -> Iterator[tuple[int, NumberedRow | BadRow]]:
        """Yield the rows `begin` to `end - 1` of a pass over a counted source."""
        before = 0
        for number in self._units:
            unit = self._source.units[number]
            assert unit.rows is not None
            if begin < before + unit.rows and before < end:
                is_last = end < before + unit.rows
                rows = unit.read(max(0, begin - before))
                for row in islice(rows, end - max(begin, before)) if is_last else rows:
                    yield number, row
            before += unit.rows

    def _next_part(self) -> None:
        """Open the next unit of the pass, or begin the next pass; a source in which no pass finds a row has
        ended."""
        cursor = self.cursor
        if self._source.rows is None and cursor.unit + 1 < len(self._units):
            self.cursor = replace(cursor, unit=cursor.unit + 1, row=0)
            self._rows = self._open()
            return
        self._empty_passes = 0 if self._has_rows else self._empty_passes + 1
        is_empty = self._empty_passes > EMPTY_PASSES * self._stream.lanes
        self.cursor = Cursor(cursor.passes + 1, NO_UNIT if is_empty else 0, 0, cursor.read)
        self._has_rows = False
        self._begin_pass()


class _Window:
    """The rows of one window, in order."""

    def __init__(
        self,
        stream: RowStream,
        lane: int,
        state: LaneState,
        readers: Sequence[_Reader],
        bad: tuple[tuple[str, BadRow], ...],
    ) -> None:
        """`bad`: rows that were skipped in the windows without rows before it."""
        self._stream, self._lane, self._state = stream, lane, state
        self.has_ended = False
        """Whether no source has rows left."""
        self._planned_sources: list[int] = []
        self._passes: list[int] = []
        """Of each example, the pass over its source."""
        stage = stream.stage_of(state.emitted)
        self._base = state.base if stage == state.stage else state.drawn
        self._shares = stream.shares[stage][1]
        found, tokens, trained, drawn = self._read(readers)
        self.rows_read = found.counts["rows"]
        self.bad = (*bad, *((stream.names[file], row) for file, row in found.bad))
        self._untrained = found.untrained[:1]
        self._tokens, self._trained = (
            np.concatenate([*tokens, np.zeros(0, np.int32)]),
            np.concatenate([*trained, np.zeros(0, np.uint8)]),
        )
        self._examples = found.examples()
        examples = self._examples.take(self._order_of_examples())
        pieces = self._cut(examples, self._trained)
        counts = (
            state.rows_read + found.counts["rows"],
            state.rows_bad + len(found.bad),
            state.rows_truncated + len(pieces.truncated),
            state.rows_evaluated + self._also_evaluated(),
        )
        self.after = LaneState(
            tuple(reader.cursor for reader in readers),
            drawn,
            self._base,
            stage,
            state.window + 1,
            0,
            0,
            *counts,
        )
        packing = stream.packing is not None and len(pieces.segments) > 0
        _, self._rows = packed(
            pieces, self._trained, stream.max_length, packing=packing, strategy=stream.packing or ""
        )
        self.order = self._order_of_packed() if packing else np.arange(len(self._rows.rows) - 1)

    def row(self, index: int, after: LaneState) -> StreamRow:
        at = self.order[index]
        segments = self._rows.segments[self._rows.rows[at] : self._rows.rows[at + 1]]
        is_trained = self._is_trained(segments)
        segments = segments[is_trained]
        row = row_of(
            self._tokens,
            self._trained,
            segments,
            (self._state.emitted + index) * self._stream.lanes + self._lane,
        )
        owners = self._owners(segments)
        names = self._stream.names
        return StreamRow(
            *(row.input_ids, row.labels, row.lengths, row.row_id),
            origins=tuple(
                f"{names[file]}:{number}" for file, number in self._examples.origins[owners].tolist()
            ),
            sources=tuple(self._examples.sources[owners].tolist()),
            after=after,
            bad=self.bad if index == 0 else (),
            is_skipped=not is_trained.any(),
        )

    def _is_trained(self, segments: Int64) -> npt.NDArray[np.bool_]:
        """Return for each segment whether its row of a source file is not left out of the run."""
        skipped, names = self._stream.skipped, self._stream.names
        if not skipped:
            return np.ones(len(segments), bool)
        origins = self._examples.origins[self._owners(segments)].tolist()
        return np.array([(names[file], number) not in skipped for file, number in origins], bool)

    def empty_rows(self) -> Iterator[StreamRow]:
        """Yield rows without tokens until another stage begins."""
        none = np.zeros(0, np.int32)
        for number in count(self._state.emitted):
            is_first, after = (
                number == self._state.emitted,
                replace(self.after, window=self._state.window, emitted=number + 1),
            )
            if not is_first and self._stream.stage_of(number) != after.stage:
                return
            yield StreamRow(
                *(none, none, (), number * self._stream.lanes + self._lane),
                origins=(),
                after=after,
                bad=self.bad if is_first else (),
            )

    def _read(self, readers: Sequence[_Reader]) -> _ReadRows:
        """Draw and tokenise rows until the window is full or no source has rows left."""
        stream, state, shares = self._stream, self._state, self._shares
        # The first windows have different sizes, so that lanes do not build theirs at the same time.
        size = (self._lane + 1) / stream.lanes if state.window == 0 else 1.0
        least_rows = max(1, round(size * stream.window_rows))
        least_tokens = size * PACKED_WINDOW * stream.max_length if stream.packing is not None else 0
        found, tokens, trained, kept, useful = TokenisedRows(), list[Int32](), list[Mask](), 0, 0
        drawn = list(state.drawn)
        while found.counts["rows"] < least_rows or (
            kept < least_tokens and found.counts["rows"] - useful < MOST_UNTRAINED
        ):
            live = [
                source for source, reader in enumerate(readers) if shares[source] > 0 and not reader.has_ended
            ]
            if not live:
                self.has_ended = True
                break
            missing = least_rows - found.counts["rows"]
            most = PLANNED_BY_TOKENS if stream.weighs_tokens and len(live) > 1 else PLANNED_ROWS
            planned = self._planned(shares, live, drawn, readers, min(most, missing) if missing > 0 else most)
            self._planned_sources += planned
            for source in sorted(set(planned)):
                wanted = planned.count(source)
                while wanted > 0 and not readers[source].has_ended:
                    passes = readers[source].cursor.passes
                    rows, bad = readers[source].take(wanted)
                    wanted -= len(rows) + len(bad)
                    chunk = stream.tokeniser.chunk(rows)
                    chunk.bad += bad
                    chunk.counts["rows"] += len(bad)
                    self._refuse(chunk.bad)
                    found.add(chunk)
                    self._passes += [passes] * len(chunk.lengths)
                    tokens.append(chunk.tokens)
                    trained.append(chunk.trained)
                    length = self._kept_tokens(chunk)
                    kept += length
                    useful = found.counts["rows"] if length else useful
                    drawn[source] += length if stream.weighs_tokens else len(rows) + len(bad)
            bad_rows, rows_read = state.rows_bad + len(found.bad), state.rows_read + found.counts["rows"]
            if bad_rows > stream.most_bad * FEWEST_ROWS:  # more than of the fewest rows
                refuse_bad_share(bad_rows, rows_read, stream.most_bad, hint="fix them")
        return _ReadRows(found, tokens, trained, tuple(drawn))

    def _planned(
        self,
        shares: Sequence[float],
        live: Sequence[int],
        drawn: Sequence[float],
        readers: Sequence[_Reader],
        rows: int,
    ) -> list[int]:
        """Return the sources of the next rows to draw. Shares of rows follow the schedule of all lanes, until
        a source of it has ended; shares of tokens, and what follows such an end, are smooth in each lane."""
        stream = self._stream
        if len(live) == 1:
            return [live[0]] * rows
        here = [amount - before for amount, before in zip(drawn, self._base, strict=True)]
        if not stream.weighs_tokens and len(live) == sum(share > 0 for share in shares):
            return Schedule(tuple(shares), stream.lanes).sources(self._lane, int(sum(here)), rows).tolist()
        lengths = [1.0] * len(here)
        if stream.weighs_tokens:
            sampled = [source.mean_tokens for source in stream.sources]
            read = [reader.cursor.read for reader in readers]
            lengths = [
                (SAMPLED_ROWS * mean + amount) / (SAMPLED_ROWS + seen)
                for mean, amount, seen in zip(sampled, drawn, read, strict=True)
            ]
        return planned_sources(shares, here, lengths, live, phases_of(self._lane, shares, stream.lanes), rows)

    def _order_of_examples(self) -> Int64:
        """Return the order of the examples: sources as planned, and the examples of each source shuffled
        within their pass."""
        sources, total = self._examples.sources, len(self._examples)
        if not self._stream.shuffle and self._stream.packing is not None and len(self._stream.sources) == 1:
            return np.arange(total)
        random = np.argsort(self._shuffled(total, EXAMPLES))
        by_pass = np.lexsort((random, np.array(self._passes, np.int64)))
        planned = np.array(self._planned_sources, np.int64)
        phases = phases_of(self._lane, self._shares, self._stream.lanes)
        at = np.zeros(total)
        for source in range(len(self._stream.sources)):
            mine = by_pass[sources[by_pass] == source]
            if self._stream.weighs_tokens:
                lengths = self._lengths_in_rows(mine, source)
                before = self._state.drawn[source] - self._base[source] + np.cumsum(lengths) - lengths
                at[mine] = due(self._shares[source], before, lengths, phases[source])
            else:
                slots = np.flatnonzero(planned == source)
                at[mine] = slots[np.arange(len(mine)) * len(slots) // len(mine)]
        return by_pass[np.argsort(at[by_pass], kind="stable")]

    def _order_of_packed(self) -> Int64:
        """Return the order of the packed rows: shuffled, but so that those of all sources follow each other
        by their shares."""
        state, shares = self._state, np.array(self._shares)
        order = self._shuffled(len(self._rows.rows) - 1, ROWS)
        if np.count_nonzero(shares) == 1:
            return order
        amounts = np.zeros((len(order), len(shares)))
        row_of = np.repeat(np.arange(len(order)), np.diff(self._rows.rows))
        owners = self._owners(self._rows.segments)
        np.add.at(
            amounts,
            (row_of, self._examples.sources[owners]),
            self._rows.segments[:, 1] if self._stream.weighs_tokens else 1,
        )
        here = np.array(state.drawn) - np.array(self._base)
        return balanced(order, amounts, self._shares, here - shares / shares.sum() * here.sum())

    def _owners(self, segments: Int64) -> Int64:
        """Return the example of each segment."""
        return np.searchsorted(self._examples.starts, segments[:, 0], side="right") - 1

    def _lengths_in_rows(self, examples: Int64, source: int) -> Int64:
        """Return the tokens of examples of a source, or those that `overlong` leaves of them."""
        lengths, most = self._examples.lengths[examples], self._stream.max_length
        overlong = self._stream.sources[source].opened.overlong
        return (
            lengths
            if overlong == "split"
            else np.where(lengths > most, 0 if overlong == "drop" else most, lengths)
        )

    def _also_evaluated(self) -> int:
        """Return the number of rows whose content an evaluation row has."""
        examples, evaluated = self._examples, self._stream.evaluated
        found = np.isin(examples.hashes, evaluated) if len(evaluated) else np.zeros(len(examples), bool)
        keys = np.column_stack([examples.origins, np.array(self._passes, np.int64)])
        return len(np.unique(keys[found], axis=0))  # a row may be several examples

    def _kept_tokens(self, chunk: Tokenised) -> int:
        """Return the tokens of a chunk that `overlong` leaves in rows: all pieces of a row that is split,
        none of one that is dropped."""
        if not (chunk.lengths > self._stream.max_length).any():
            return int(chunk.lengths.sum())
        found = TokenisedRows()
        found.add(chunk)
        return int(self._cut(found.examples(), chunk.trained).segments[:, 1].sum())

    def _cut(self, examples: Examples, trained: Mask) -> Cut:
        stream = self._stream
        return cut(
            examples,
            [source.opened.overlong for source in stream.sources],
            stream.max_length,
            trained,
            stream.names,
        )

    def _refuse(self, bad: Sequence[tuple[int, BadRow]]) -> None:
        if bad and not self._stream.skips_bad_rows:
            raise FsdpTuneError(*(self._stream.bad_row(unit, row) for unit, row in bad[:5]))

    def _shuffled(self, count: int, purpose: int) -> Int64:
        if not self._stream.shuffle:
            return np.arange(count)
        return shuffled(count, self._stream.seed, purpose, self._lane, self._state.window)

    def error(self, untrained: int) -> FsdpTuneError:
        """Return the error of a lane that has read `untrained` rows in turn without a trained token."""
        where = Where(self._stream.names[self._untrained[0][0] if self._untrained else 0])
        message = f"none of {untrained:,} rows that were read in turn has a token to train"
        return usage_error(
            "no-supervised-tokens",
            message,
            where=where,
            hint="check `loss_on`, and that `max_length` reaches the answers",
        )
