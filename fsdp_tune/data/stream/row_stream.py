"""The stream of a recipe: all that determines its rows, and the state of a lane in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_tune.core.errors import Problem
from fsdp_tune.data.inputs import Input, open_inputs
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.store import Origin, UInt64
from fsdp_tune.data.stream.units import StreamUnit, count_units, rows_of, stream_stamps, stream_units
from fsdp_tune.data.tokenise.encoder_protocol import Encoder
from fsdp_tune.data.tokenise.rows import Tokeniser
from fsdp_tune.recipe.schema.recipe import Recipe

_BY_ROWS, _BY_TOKENS = 3, 4
"""Versions of the state of a stream: incremented when the same `LaneState` would be followed by other
rows."""


@dataclass(frozen=True, slots=True)
class Cursor:
    """The next row of one source in one lane."""

    passes: int = 0
    """Complete passes over the lane's part of the source."""
    unit: int = 0
    """Among the units of the lane in this pass, 0 if the source is counted; NO_UNIT if the source is
    empty."""
    row: int = 0
    """Rows read, bad ones included: of the unit, or of the lane's part of the pass if the source is
    counted."""
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
    """Rows read whose content an evaluation row has; these four are of the windows before this one."""

    def as_list(self) -> list[object]:
        """Return the state in plain values, for a checkpoint."""
        cursors = [[cursor.passes, cursor.unit, cursor.row, cursor.read] for cursor in self.cursors]
        counts = [
            self.window,
            self.emitted,
            self.next,
            self.rows_read,
            self.rows_bad,
            self.rows_truncated,
            self.rows_evaluated,
        ]
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
    """Lane of its first row. With `repeats` the sources follow each other, so that the lanes have the same
    number of rows."""
    mean_tokens: float
    """Of a row of the sample."""

    def read(self, rows: int, passes: int) -> str:
        """Describe how much of it `rows` read in `passes` are: of all its rows, if their number is known."""
        name = self.opened.entry.label or self.opened.entry.path
        if self.rows is None or self.repeats is None:
            return f"{rows:,} rows of `{name}` were read, in {passes:,} passes"
        return (
            f"{rows:,} of {self.rows * self.repeats:,} rows of `{name}` were read (`repeats: {self.repeats}`)"
        )


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
    """Rows that the run leaves out, by the names of their units. They keep their places, so that no other row
    moves."""

    @property
    def state_version(self) -> int:
        """Version of its states; a stream does not continue from one of another version."""
        return _BY_TOKENS if self.weighs_tokens else _BY_ROWS

    def stamps(self) -> dict[str, str]:
        """Return the stamps of the files, and the digests of rows that are in none."""
        return stream_stamps([unit for source in self.sources for unit in source.units])

    def first_state(self) -> LaneState:
        none = (0.0,) * len(self.sources)
        return LaneState((Cursor(),) * len(self.sources), none, none)

    def bad_row(self, unit: int, row: BadRow) -> Problem:
        """Return the problem of a bad row, with its line in the file."""
        source = [each for each in self.sources if each.first_unit <= unit][-1]
        return Problem(
            "bad-row",
            row.reason,
            source.units[unit - source.first_unit].locate(row.number, row.column),
            hint=row.hint,
        )

    def stage_of(self, row: int) -> int:
        """Return the index in `shares` of the stage in which a lane gives its row number `row`."""
        step = row * self.lanes // self.global_batch
        return sum(first <= step for first, _ in self.shares) - 1


def open_stream(
    recipe: Recipe,
    encoder: Encoder,
    counts: Mapping[str, int],
    evaluated: UInt64 | None = None,
    mean_tokens: Sequence[float] = (),
) -> RowStream:
    """Return the stream of a resolved recipe. `counts`: rows of each unit by its name; units that it lacks
    are counted now. `evaluated`: sorted hashes of the rows of the evaluation sets. `mean_tokens`: of a row of
    each source, in a sample; else taken as equal.

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


def shares_by_step(recipe: Recipe) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return (first step, shares) of each stage of the curriculum, and of the rest of the run."""
    stages = recipe.data.curriculum
    starts = [0, *(stage.until_step for stage in stages)]
    weights = [tuple(stage.weights) for stage in stages]
    return tuple(
        zip(starts, [*weights, tuple(source.weight or 1.0 for source in recipe.data.train)], strict=True)
    )
