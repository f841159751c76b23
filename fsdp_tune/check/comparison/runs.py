"""The lines of two runs, step by step: the first step whose loss, gradient norm or learning rate differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fsdp_tune.check.comparison.stages import ComparedStage, StageDifference
from fsdp_tune.core.command import JsonAnswer

FIELDS = ("tokens", "supervised_tokens", "learning_rate", "loss", "grad_norm")
"""In the order in which a step depends on them."""
FP32_TOLERANCE, HALF_TOLERANCE = 1e-5, 1e-3
"""Relative; above what another order of additions changes in the first steps."""
TITLES = {
    "data": "content of the prepared training rows",
    "data_order": "order of the rows of an epoch",
    "steps": "lines of metrics.jsonl, step by step",
}
"""Stages of two runs."""


@dataclass(frozen=True, slots=True)
class DifferentStep(JsonAnswer):
    """The first step at which a field of metrics.jsonl differs."""

    step: int
    field: str
    a: float | None
    """Null: NaN or infinity."""
    b: float | None
    relative: float | None


@dataclass(frozen=True, slots=True)
class ComparedLines:
    stage: ComparedStage
    first: DifferentStep | None
    """Beyond the tolerance."""
    first_bits: DifferentStep | None
    """The first step that is not bitwise equal."""
    left_out: tuple[str, ...]


def compare_lines(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], tolerance: float) -> ComparedLines:
    """Compare the training lines of two runs. A line is a mean over the steps since the line before it, so only lines of the same steps are
    compared."""
    ours, theirs = _spans(a), _spans(b)
    shared = [span for span in ours if span in theirs]
    first: DifferentStep | None = None
    first_bits: DifferentStep | None = None
    different = 0
    for span in shared:
        found = [
            _step(span[1], name, ours[span][name], theirs[span][name]) for name in FIELDS if name in ours[span] and name in theirs[span]
        ]
        beyond = [each for each in found if each is not None and not _is_close(each, tolerance)]
        first_bits = first_bits or next((each for each in found if each is not None), None)
        first = first or next(iter(beyond), None)
        different += bool(beyond)
    left_out = [
        f"{len(own) - len(shared)} of {len(own)} lines of {side}: the other run has no line of the same steps"
        for side, own in (("A", ours), ("B", theirs))
        if len(own) > len(shared)
    ]
    return ComparedLines(_stage(first, first_bits, len(shared), different, tolerance), first, first_bits, tuple(left_out))


def _spans(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mapping[str, Any]]:
    """Return lines by (step of the line before, step)."""
    steps = [0, *(int(line["step"]) for line in lines)]
    return dict(zip(pairwise(steps), lines, strict=True))


def _step(step: int, name: str, a: Any, b: Any) -> DifferentStep | None:
    """Return the difference of two values; None if they are bitwise equal."""
    if a == b:
        return None
    numbers = [float(each) if isinstance(each, int | float) and math.isfinite(each) else None for each in (a, b)]
    one, other = numbers
    largest = None if one is None or other is None else max(abs(one), abs(other))
    relative = None if one is None or other is None or not largest else abs(one - other) / largest
    return DifferentStep(step, name, one, other, relative)


def _is_close(found: DifferentStep, tolerance: float) -> bool:
    return found.relative is not None and found.relative <= tolerance


def _stage(first: DifferentStep | None, first_bits: DifferentStep | None, places: int, different: int, tolerance: float) -> ComparedStage:
    title = TITLES["steps"]
    if places == 0:
        return ComparedStage("steps", title, "not_compared", "the runs have no line of the same steps")
    if first is not None:
        shown = ["not finite" if each is None else f"{each:.9g}" for each in (first.a, first.b)]
        difference = StageDifference(f"step {first.step}, {first.field}", *shown)
        return ComparedStage("steps", title, "different", f"beyond {tolerance:g}", difference, places, different)
    detail = None if first_bits is None else f"within {tolerance:g}; the first bits differ at step {first_bits.step}, {first_bits.field}"
    return ComparedStage("steps", title, "equal", detail, None, places)
