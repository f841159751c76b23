"""Compare two runs by their files: digests, training lines and evaluations of metrics.jsonl.

Each quantity has its own limit. Counts (tokens, trained tokens) must be equal, and the learning rate, which
is computed from the recipe, to 1e-9. Losses and gradient norms may differ by rounding: at first by what the
compute dtype allows, later by a multiple of what earlier lines differ by, if the runs differ in something
that rounds otherwise (ranks, kernels, versions, devices).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_tune.comparison.stages import ComparedStage, StageDifference
from fsdp_tune.core.command import JsonAnswer

Line = Mapping[str, Any]
TITLES = {
    "data": "content of the prepared training rows",
    "data_order": "order of the rows of an epoch",
    "base": "weights that the run starts from",
    "steps": "lines of metrics.jsonl, step by step",
    "evaluations": "evaluations of metrics.jsonl",
}
"""Stages of two runs."""
COMPUTED = 1e-9
"""Relative limit of a number that is computed from the recipe alone, in fp64."""
ROUNDING = {"fp32": 2.0**-16, "bf16": 2.0**-10, "fp16": 2.0**-10}
"""By compute dtype: relative limit of a loss, a mean over the tokens of a step. 128 times the spacing of fp32
numbers; of half precision an eighth of that of bf16."""
NORM = 4.0
"""Times that limit: of a gradient norm, in which errors do not average out."""
GROWTH, MOST_GROWTH = 4.0, 64.0
"""A line may differ by GROWTH times what earlier lines differ by, but never by more than MOST_GROWTH times
the first limit."""
POINTS = ("tokens", "skipped_steps", "learning_rate", "grad_norm")
"""Fields that are those of a line's step, whatever steps its line covers. The others are of all steps since
the line before it."""
ORDER = ("tokens", "supervised_tokens", "skipped_steps", "learning_rate", "loss", "grad_norm")
"""In which a step depends on them."""
DEPENDS_ON_WEIGHTS = ("loss", "grad_norm")
NAMES = {
    "supervised_tokens": "trained tokens",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens": "tokens",
}


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
    """Beyond the limit of its field."""
    first_bits: DifferentStep | None
    """The first step that is not bitwise equal."""
    evidence: str
    """How many lines of each run were compared, of which steps, in which fields; empty if none were."""
    left_out: tuple[str, ...]


MOST_ALONE = 4
"""Fields of evaluations that one run lacks, at most: the other steps lack the same ones."""


class Limits:
    """The relative limits of the fields, which follow what the lines so far differ by."""

    def __init__(self, dtype: str, *, can_round: bool, given: float | None = None) -> None:
        """`can_round`: the runs differ in what rounds otherwise. `given`: a limit in place of that of
        rounding, for all lines."""
        self.first = ROUNDING[dtype] if given is None else given
        self._grows = can_round and given is None
        self._seen: dict[str, float] = {}

    def of(self, name: str) -> float:
        """Return the relative limit of a field now: 0 for a count."""
        if name == "learning_rate":
            return COMPUTED
        if is_count(name):
            return 0.0
        own = self.first * (NORM if name == "grad_norm" and self._grows else 1.0)
        return min(max(own, GROWTH * self._seen.get(name, 0.0)), MOST_GROWTH * own) if self._grows else own

    def add(self, found: DifferentStep) -> None:
        """Take note of a difference within the limit."""
        self._seen[found.field] = max(self._seen.get(found.field, 0.0), found.relative or 0.0)


def is_count(name: str) -> bool:
    return name == "skipped_steps" or name.endswith("tokens")


def compare_lines(
    a: Sequence[Line], b: Sequence[Line], limits: Limits, every: tuple[int, int] = (1, 1)
) -> ComparedLines:
    """Compare the training lines of two runs at the steps that both have. `every`: `training.logging_steps`
    of each run.

    Lines between two such steps are joined: trained tokens are added, losses are averaged by them. A line
    whose predecessor is missing covers steps that are unknown, so only the fields of its last step are
    compared.
    """
    ours, theirs = ({int(line["step"]): line for line in lines} for lines in (a, b))
    shared = sorted(ours.keys() & theirs.keys())
    joined = [
        _joined(list(lines.values()), shared, each) for lines, each in zip((ours, theirs), every, strict=True)
    ]
    pairs = [(step, joined[0][step], joined[1][step]) for step in shared]
    covered = [_covered(lines, shared) for lines in (ours, theirs)]
    return _compared("steps", pairs, _fields_of_steps, limits, covered, (ours, theirs))


def compare_evaluations(a: Sequence[Line], b: Sequence[Line], limits: Limits) -> ComparedLines:
    """Compare the evaluations of two runs at the steps that both have: the losses and metrics of all sets."""
    ours, theirs = ({int(line["step"]): line for line in lines} for lines in (a, b))
    shared = sorted(ours.keys() & theirs.keys())
    pairs = [(step, ours[step], theirs[step]) for step in shared]
    found = _compared("evaluations", pairs, _fields_of_evaluation, limits, [len(shared)] * 2, (ours, theirs))
    alone = [
        f"{TITLES['evaluations']}: `{name}` of {'AB'[side]} at step {step}, which {'BA'[side]} lacks"
        for step, *lines in pairs
        for side in (0, 1)
        for name in lines[side]
        if name.startswith("eval_") and name not in lines[1 - side]
    ]
    return replace(found, left_out=(*found.left_out, *alone[:MOST_ALONE]))


def compare_digests(name: str, a: str | None, b: str | None, file: str) -> ComparedStage:
    """Compare a digest of two runs, which they have in a file."""
    title = TITLES[name]
    if not a or not b:
        lacking = "A and B have" if not a and not b else f"{'B' if a else 'A'} has"
        return ComparedStage(name, title, "not_compared", f"{lacking} no digest of it in {file}")
    if a == b:
        return ComparedStage(name, title, "equal", None, None, 1)
    return ComparedStage(name, title, "different", None, StageDifference(f"digest in {file}", a, b), 1, 1)


def _joined(lines: Sequence[Line], shared: Sequence[int], every: int) -> dict[int, dict[str, object]]:
    """Return for each shared step the fields of all steps since the shared step before it; without those that
    cannot be known."""
    found: dict[int, dict[str, object]] = {}
    ends, part, before, is_whole = set(shared), list[Line](), 0, True
    for line in lines:
        step = int(line["step"])
        is_whole = is_whole and before >= (step - 1) // every * every
        part.append(line)
        before = step
        if step in ends:
            found[step] = _join(part, is_whole=is_whole)
            part, is_whole = [], True
    return found


def _join(part: Sequence[Line], *, is_whole: bool) -> dict[str, object]:
    if len(part) == 1 and is_whole:
        return dict(part[0])
    point: dict[str, object] = {name: part[-1][name] for name in POINTS if name in part[-1]}
    counts = [line.get("supervised_tokens") for line in part]
    losses = [_finite(line.get("loss")) for line in part]
    if not is_whole or not all(type(count) is int for count in counts):
        return point
    total = sum(counts)  # type: ignore[arg-type]  # all are int
    sums = [count * loss for count, loss in zip(counts, losses, strict=True) if loss is not None]  # type: ignore[operator]
    mean = sum(sums) / total if total and len(sums) == len(losses) else "nan"
    return point | {"supervised_tokens": total, "loss": mean}


def _covered(lines: Mapping[int, Line], shared: Sequence[int]) -> int:
    return sum(step <= shared[-1] for step in lines) if shared else 0


def _fields_of_steps(a: Line, b: Line) -> Iterator[str]:
    yield from (name for name in ORDER if (name in a and name in b) or name == "skipped_steps")  # absent: 0
    yield from (
        name for name in a if name in b and name.startswith("source_") and name.endswith(("_tokens", "_loss"))
    )


def _fields_of_evaluation(a: Line, b: Line) -> Iterator[str]:
    yield from (
        name
        for name in a
        if name in b and name.startswith("eval_") and not name.endswith(("_seconds", "_perplexity"))
    )


def _compared(
    stage: str,
    pairs: Sequence[tuple[int, Line, Line]],
    fields: Callable[[Line, Line], Iterator[str]],
    limits: Limits,
    covered: Sequence[int],
    lines: tuple[Mapping[int, Line], Mapping[int, Line]],
) -> ComparedLines:
    first: DifferentStep | None = None
    first_bits: DifferentStep | None = None
    first_limit = 0.0
    seen, different = dict[str, int](), 0
    for step, one, other in pairs:
        beyond = False
        for name in fields(one, other):
            seen[name] = seen.get(name, 0) + 1
            if (found := _difference(step, name, one.get(name, 0), other.get(name, 0))) is None:
                continue
            first_bits = first_bits or found
            limit = limits.of(name)
            if found.relative is not None and found.relative <= limit:
                limits.add(found)
                continue
            beyond = True
            if first is None:
                first, first_limit = found, limit
        different += beyond
    title = TITLES[stage]
    left_out = tuple(
        f"{title}: {len(own) - count:,} of {len(own):,} of {side}, at steps that "
        f"{'B' if side == 'A' else 'A'} has none of"
        for side, own, count in zip("AB", lines, covered, strict=True)
        if len(own) > count
    )
    depends = [name for name in seen if name in DEPENDS_ON_WEIGHTS or name.startswith("eval_")]
    if first is None and not depends:
        why = "the runs have none" if not any(lines) else "the runs have none of the same steps"
        return ComparedLines(ComparedStage(stage, title, "not_compared", why), None, first_bits, "", left_out)
    return ComparedLines(
        _stage(stage, first, first_bits, len(pairs), different, first_limit),
        first,
        first_bits,
        _evidence(title, pairs, seen, covered, lines),
        left_out,
    )


def _evidence(
    title: str,
    pairs: Sequence[tuple[int, Line, Line]],
    seen: Mapping[str, int],
    covered: Sequence[int],
    lines: Sequence[Mapping[int, Line]],
) -> str:
    of_sides = " and ".join(
        f"{count:,} of {len(own):,} of {side}" for side, own, count in zip("AB", lines, covered, strict=True)
    )
    names = ", ".join(NAMES.get(name, name) for name in seen if name != "skipped_steps")
    steps = f"step {pairs[0][0]:,}" if len(pairs) == 1 else f"steps {pairs[0][0]:,} to {pairs[-1][0]:,}"
    return f"{title}: {of_sides} ({steps}: {names})"


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _difference(step: int, name: str, a: object, b: object) -> DifferentStep | None:
    """Return the difference of two values of a field; None if they are equal. NaN, infinity and other types
    have no number."""
    if a == b:
        return None
    one, other = _finite(a), _finite(b)
    largest = None if one is None or other is None else max(abs(one), abs(other))
    relative = None if one is None or other is None or not largest else abs(one - other) / largest
    return DifferentStep(step, name, one, other, relative)


def _stage(
    name: str,
    first: DifferentStep | None,
    first_bits: DifferentStep | None,
    places: int,
    different: int,
    limit: float,
) -> ComparedStage:
    title = TITLES[name]
    if first is not None:
        shown = ["not finite" if each is None else f"{each:.9g}" for each in (first.a, first.b)]
        difference = StageDifference(f"step {first.step}, {first.field}", *shown)
        detail = "counts are compared exactly" if is_count(first.field) else f"beyond {limit:.2g}"
        return ComparedStage(name, title, "different", detail, difference, places, different)
    detail = (
        None
        if first_bits is None
        else f"within rounding; the first bits differ at step {first_bits.step}, {first_bits.field}"
    )
    return ComparedStage(name, title, "equal", detail, None, places)
