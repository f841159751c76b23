"""Curves of a run: one number over the steps, thinned without losing an extreme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_tune.run.events import TRAIN_STARTED

Line = dict[str, Any]
"""One object of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A number over the steps of a run."""

    steps: Sequence[int]
    """Increasing."""
    values: Sequence[float | None]
    """One for each step; None is a gap: NaN, infinite or unknown."""

    def finite(self) -> list[tuple[int, float]]:
        """Return (step, value) of the points that are not gaps."""
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if value is not None]

    def thinned(self, limit: int) -> Curve:
        """Return at most `limit` (6 or more) points: the first, the last, and of each bucket between them least, greatest and first gap."""
        count = len(self.steps)
        if count <= limit:
            return self
        kinds = 3 if None in self.values else 2
        buckets = (limit - 2) // kinds
        kept = {0, count - 1}
        for bucket in range(buckets):
            begin, end = (1 + (count - 2) * edge // buckets for edge in (bucket, bucket + 1))
            kept |= _extremes(self.values, range(begin, end))
        order = sorted(kept)
        return Curve([self.steps[at] for at in order], [self.values[at] for at in order])


def _extremes(values: Sequence[float | None], among: Iterable[int]) -> set[int]:
    """Return the indices of the least value, the greatest value and the first gap."""
    found = {at: values[at] for at in among}
    numbers = {at: value for at, value in found.items() if value is not None}
    gap = next((at for at, value in found.items() if value is None), None)
    kept = {min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)} if numbers else set[int]()
    return kept if gap is None else kept | {gap}


def number(value: object) -> float | None:
    """Return a finite number as it is, and None for everything else: null, text such as "nan", NaN, infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def curve_of(lines: Iterable[Line], name: str) -> Curve:
    """Return the curve of a field over the lines that have it."""
    own = [line for line in lines if name in line]
    return Curve([line["step"] for line in own], [number(line[name]) for line in own])


@dataclass(frozen=True, slots=True)
class RunLines:
    """The lines of metrics.jsonl by kind, each in the order of steps; events in the order of the file."""

    losses: list[Line]
    evals: list[Line]
    events: list[Line]


def sorted_lines(lines: Iterable[Line]) -> RunLines:
    """Divide lines by kind. Where a run was resumed at an earlier step, the lines of the later attempt replace those of the earlier one.

    Rank 0 cuts the file back when it resumes, so that steps repeat only in a copy, or in a file that another program has joined.
    """
    found = RunLines([], [], [])
    for line in lines:
        step = line.get("step")
        if "event" in line:
            if line["event"] == TRAIN_STARTED.name and isinstance(step, int):
                _drop_from(found.losses, step + 1)
                _drop_from(found.evals, step + 1)
            found.events.append(line)
        elif isinstance(step, int) and "loss" in line:
            if found.losses and step <= found.losses[-1]["step"]:
                _drop_from(found.evals, step)
            _drop_from(found.losses, step)
            found.losses.append(line)
        elif isinstance(step, int) and "eval_loss" in line:
            _drop_from(found.evals, step)
            found.evals.append(line)
    return found


def _drop_from(lines: list[Line], step: int) -> None:
    while lines and lines[-1]["step"] >= step:
        lines.pop()
