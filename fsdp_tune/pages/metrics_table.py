"""The lines of metrics.jsonl by column: a run of 100,000 steps needs 8 bytes a number, where a dictionary for each line needs a hundred.

The table grows as the file does, so that a page that follows a run reads only what is new.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from fsdp_tune.run.checkpoint_scores import of_newest_definition
from fsdp_tune.run.events import AnyEvent, CheckpointEvaluated, TrainStarted, number, read_event

Line = Mapping[str, object]
"""One object of metrics.jsonl."""
ABSENT, NOT_FINITE = math.inf, math.nan
"""In a column: the line has no such field, or null; it has NaN, infinity or a text. No value is infinite otherwise."""


class Curve:
    """A number over the steps of a run: `steps` [n] int64 increasing, `values` [n] float64; NaN is a value that is not finite."""

    __slots__ = ("steps", "values")

    def __init__(self, steps: object, values: object) -> None:
        """Take any sequences; None in `values` is not finite."""
        self.steps = np.asarray(steps, dtype=np.int64)
        self.values = np.asarray(values, dtype=np.float64)

    def finite(self) -> Curve:
        """Return the points whose values are numbers."""
        kept = ~np.isnan(self.values)
        return self if kept.all() else Curve(self.steps[kept], self.values[kept])

    def __len__(self) -> int:
        return len(self.steps)

    def thinned(self, limit: int, span: tuple[int, int] | None = None) -> Curve:
        """Return at most `limit` (6 or more) points: the last, and of each bucket the first, the least, the greatest and the first gap.

        Buckets divide `span`, the first and last step of the chart: curves with lines at the same steps keep common points.
        """
        count = len(self.steps)
        if count <= limit:
            return self
        buckets = (limit - 2) // (4 if np.isnan(self.values).any() else 3)
        first, last = span if span is not None else (int(self.steps[0]), int(self.steps[-1]))
        edges = np.searchsorted(self.steps, np.linspace(first, last + 1, buckets + 1))
        kept = {0, count - 1}
        for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if begin < end:
                kept |= _extremes(self.values, begin, end)
        order = np.array(sorted(kept))
        return Curve(self.steps[order], self.values[order])


def _extremes(values: Any, begin: int, end: int) -> set[int]:
    """Return the indices of the first value of a part, of its least and greatest, and of its first gap."""
    part = values[begin:end]
    gaps = np.isnan(part)
    if not gaps.any():
        return {begin, begin + int(part.argmin()), begin + int(part.argmax())}
    kept = {begin, begin + int(gaps.argmax())}
    return kept if gaps.all() else kept | {begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))}


class Columns:
    """Lines of one kind in the order of their steps, a column for each field."""

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self.last: Line = {}
        """The newest line."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def newest_step(self) -> int:
        """Of the last line; -1 without any."""
        return self.steps[-1] if self.steps else -1

    @property
    def names(self) -> list[str]:
        """The fields, in the order of their first lines."""
        return list(self._columns)

    def add(self, step: int, line: Line) -> None:
        """Append a line. Lines of this step and later ones, of an earlier attempt, are dropped."""
        self.drop_from(step)
        count = len(self.steps)
        self.steps.append(step)
        self.last = line
        columns = self._columns
        for name, value in line.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = array("d")
            if len(column) < count:
                column.extend([ABSENT] * (count - len(column)))
            if value is None:
                column.append(ABSENT)
            elif isinstance(value, float) and value - value == 0.0:  # the common case
                column.append(value)
            else:
                found = number(value)
                column.append(NOT_FINITE if found is None else found)

    def drop_from(self, step: int) -> None:
        """Drop the lines of `step` and later ones."""
        if step > self.newest_step:
            return
        kept = bisect_left(self.steps, step)
        for column in (self.steps, *self._columns.values()):
            del column[kept:]
        newest = {name: column[-1] for name, column in self._columns.items() if len(column) == kept} if kept else {}
        self.last = {name: value for name, value in newest.items() if math.isfinite(value)}

    def curve(self, name: str) -> Curve:
        """Return the curve of a field over the lines that have it."""
        column = self._columns.get(name)
        if column is None:
            return Curve((), ())
        values = np.array(column)  # a copy: an array that is exported to numpy cannot grow
        steps = np.array(self.steps)[: len(values)]
        there = ~np.isposinf(values)
        return Curve(steps, values) if there.all() else Curve(steps[there], values[there])


class LineStore(Protocol):
    """Lines of one kind in the order of their steps."""

    @property
    def newest_step(self) -> int: ...
    def add(self, step: int, line: Line, /) -> None: ...
    def drop_from(self, step: int, /) -> None: ...


def sort_lines(lines: Iterable[Line], losses: LineStore, evals: LineStore, events: list[AnyEvent]) -> None:
    """Divide the lines of metrics.jsonl by kind; events stay in the order of the file.

    Where a run was resumed at an earlier step, the lines of the later attempt replace those of the earlier one. Rank 0 cuts the file back
    when it resumes, so that steps repeat only in a copy, or in a file that another program has joined.
    """
    for line in lines:
        step = line.get("step")
        if (event := read_event(line)) is not None:
            if isinstance(event, TrainStarted):
                losses.drop_from(event.step + 1)
                evals.drop_from(event.step + 1)
            events.append(event)
        elif not isinstance(step, int):
            continue
        elif "loss" in line:
            if step <= losses.newest_step:
                evals.drop_from(step)
            losses.add(step, line)
        elif "eval_loss" in line:
            evals.add(step, line)


@dataclass(slots=True)
class MetricsTable:
    """The lines of metrics.jsonl that were read so far, sorted by `sort_lines`."""

    losses: Columns = field(default_factory=Columns)
    evals: Columns = field(default_factory=Columns)
    events: list[AnyEvent] = field(default_factory=list[AnyEvent])

    def add(self, lines: Iterable[Line]) -> None:
        """Take the next lines of the file."""
        sort_lines(lines, self.losses, self.evals, self.events)

    @property
    def names(self) -> list[str]:
        """The fields of training lines and of evaluations, and the scores of checkpoints."""
        return [*self.losses.names, *self.evals.names, *self.score_curves()]

    def curve(self, name: str) -> Curve:
        """Return the curve of one of `names`."""
        lines = self.evals if name.startswith("eval_") else self.losses
        return lines.curve(name) if name in lines.names else self.score_curves().get(name, Curve((), ()))

    def score_curves(self) -> dict[str, Curve]:
        """Return the scores of evaluated checkpoints by name; the last evaluation of a step counts, and no evaluation of other rows."""
        found: dict[str, dict[int, float]] = {}
        for event in of_newest_definition(event for event in self.events if isinstance(event, CheckpointEvaluated)):
            for name, score in event.scores.items():
                found.setdefault(name, {})[event.step] = score.value
        ordered = {name: sorted(values.items()) for name, values in found.items()}
        return {name: Curve(tuple(step for step, _ in each), tuple(value for _, value in each)) for name, each in ordered.items()}

    def seconds_in_steps(self) -> float:
        """Return the seconds of all steps: evaluations and saves excluded."""
        found = self.losses.curve("step_seconds").finite()
        steps = np.array(self.losses.steps)
        since = np.diff(steps, prepend=0)[np.searchsorted(steps, found.steps)] if len(found) else found.steps
        return float((found.values * since).sum())
