"""The stages of a comparison, from tokens to the update: the first place at which two sides differ.

An observation of a side is computed by `comparison/observe.py` in a child process. This module compares two
of them; it imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from fsdp_tune.core.command import JsonAnswer

Status = Literal["equal", "different", "not_compared"]
STAGES: dict[str, str] = {
    "tokens": "tokens of the first rows",
    "labels": "which of them are trained",
    "rows": "examples in each row: truncation, packing, positions",
    "batch": "sequences of a step",
    "order": "order of the rows in the first steps",
    "items": "trained tokens of a step, by which its loss is divided",
    "eval_rows": "rows of the evaluation sets",
    "model": "configuration and shapes of the model",
    "defaults": "dtype that `from_pretrained` loads if none is given",
    "dtypes": "dtype of each parameter, and whether it is trained",
    "weights": "values of the parameters at the start",
    "logits": "logits, without dropout",
    "row_losses": "loss of each row, without dropout",
    "loss": "loss of a step, as in training",
    "gradients": "gradient of each parameter",
    "clipping": "gradient clipping",
    "rate": "learning rate of all steps",
    "update": "change of each parameter in two steps at the peak learning rate",
}
"""In the order in which they are computed, with the text for users. A later stage depends on the earlier
ones."""
RANDOM = "both draw the order of their rows, by other generators: torch's in a tool, a hash in a recipe"
DATA_STAGES = ("tokens", "labels", "rows", "batch", "order", "items", "eval_rows")
NEVER_COMPARED = (
    "what ranks do: sharding, sums over ranks, recomputation (`fsdp-tune rehearse --parity` compares "
    "them with one device)",
    "kernels of a GPU and of `kernels:`: the stages ran on the CPU with transformers' own attention",
    "evaluation losses, checkpoints and everything after the second step, except the learning rate",
)
OF_ROWS = ("logits", "row_losses", "loss", "gradients", "clipping", "update")
"""Stages of the model that depend on the rows."""
COMPUTED = 1e-9
"""Relative limit of the learning rate, which is computed from the recipe alone, in fp64."""
TOLERANCE = 1e-6
"""Relative. In one environment equal input gives equal bits; padding to another width moves the last ones."""
GROWTH = {"loss": 4.0, "gradients": 8.0, "clipping": 8.0, "update": 64.0}
"""Stages of a step. A later one may differ by this multiple of what the stages before it differ by. Adam
divides a gradient by the root of its square, so that the smallest gradients move as far as the largest, with
their larger relative errors."""
OTHER_VERSIONS_TOLERANCE = 1e-4
"""Relative, of other versions of the libraries in fp32: their kernels add in another order."""
OTHER_VERSIONS_HALF_TOLERANCE = 2e-2
"""The same where matrices are multiplied in bf16 or fp16: three times the spacing of bf16 numbers."""
LAST_BITS_DIFFER = 1e-4
"""Relative. What is equal beyond that is so because parameters are rounded where they are stored."""
MICRO_BATCHES = frozenset(
    (
        *(
            "training.per_device_train_batch_size",
            "training.per_device_train_batch_tokens",
            "training.gradient_accumulation_steps",
        ),
        *("launch.num_processes", "data.pad_to_multiple_of"),
    )
)
"""Keys that cut the same step into other micro-batches, whose matrices have other shapes: kernels may add in
another order."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What is observed in a stage: a value by place, such as a list of ids by example. `reason`: why there is
    none."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    reason: str | None = None
    assumed: str | None = None
    """What the values assume. They are compared only with values of the same assumption."""
    drawn_by: str | None = None
    """Of an order of rows: what draws it. Two that are drawn are compared only if the same generator draws
    them."""
    rounding: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By place: what each number of the value may be off by, since parameters are stored in between."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one side computes."""

    stages: dict[str, StageFacts]
    names: dict[str, str]
    """Text for a place: `example 3 (train.jsonl:4)`."""
    texts: dict[str, str]
    """Text of each token id that occurs."""
    versions: dict[str, str | None]
    left_out: tuple[str, ...]
    """What the observation does not cover, a sentence each."""
    failed: str | None = None
    """The first thing that a tool did not compute: its words."""
    ignored: tuple[str, ...] = ()
    """Options of its configuration that the tool does not read."""
    complete: tuple[str, ...] = ()
    """Stages whose values are those of the whole run: `rows` (all rows were read), `order` and `rate` (of all
    steps), `eval_rows`."""
    chosen: dict[str, Any] = field(default_factory=dict[str, Any])
    """The trained parameters of the model in its own size, with the options of their groups; {} if they were
    not computed."""

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Self:
        stages = {name: StageFacts(**facts) for name, facts in raw["stages"].items()}
        lists = (
            tuple(raw["left_out"]),
            raw.get("failed"),
            tuple(raw.get("ignored", ())),
            tuple(raw.get("complete", ())),
        )
        return cls(stages, raw["names"], raw["texts"], raw["versions"], *lists, raw.get("chosen", {}))


@dataclass(frozen=True, slots=True)
class StageDifference(JsonAnswer):
    """The first place of a stage at which two sides differ."""

    place: str
    """A row with its file and line, a token, a parameter, or a step."""
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class ComparedStage(JsonAnswer):
    name: str
    title: str
    status: Status
    detail: str | None = None
    """Why it was not compared, or that only last bits differ."""
    difference: StageDifference | None = None
    places: int = 0
    """Places that were compared: rows, parameters, steps."""
    different_places: int = 0
    largest: float = 0.0
    """The largest relative difference within the limit."""

    @property
    def is_settled(self) -> bool:
        """Whether the sides are as equal as they can be: two orders that are drawn are not compared."""
        return self.status == "equal" or self.detail == RANDOM


Compared = tuple[int, int, StageDifference | None, float]
"""Places, places that differ, the first of them, and the largest relative difference among the equal ones."""


def compare_stage(
    name: str, a: Observation, b: Observation, tolerance: float = TOLERANCE, *, rounds: bool = True
) -> ComparedStage:
    """Compare one stage. What one of the sides does not have is not compared, and says so. `rounds`: what is
    within the rounding of stored numbers does not differ."""
    title = STAGES[name]
    own, other = a.stages.get(name), b.stages.get(name)
    if own is None or other is None or own.reason or other.reason:
        reasons = {
            side: facts.reason
            for side, facts in (("A", own), ("B", other))
            if facts is not None and facts.reason
        }
        same = len(set(reasons.values())) == 1 and len(reasons) == 2
        detail = (
            next(iter(reasons.values()))
            if same
            else "; ".join(f"{side}: {reason}" for side, reason in reasons.items())
        )
        return ComparedStage(name, title, "not_compared", detail or "it was not computed")
    if own.assumed != other.assumed:
        return ComparedStage(
            name, title, "not_compared", f"{'A' if own.assumed else 'B'}: {own.assumed or other.assumed}"
        )
    if own.drawn_by and other.drawn_by and own.drawn_by != other.drawn_by:
        return ComparedStage(name, title, "not_compared", RANDOM)
    if name in OF_ROWS and has_rows(a) is not has_rows(b):
        return ComparedStage(
            name, title, "not_compared", f"{'B' if has_rows(a) else 'A'}: its rows cannot be read"
        )
    if name == "rate" and tolerance > 0.0:
        tolerance = COMPUTED
    if not rounds:
        own, other = (replace(each, rounding={}) for each in (own, other))
    places, different, first, largest = _COMPARE.get(name, _numbers)(own, other, a, b, tolerance)
    if first is not None:
        return ComparedStage(name, title, "different", None, first, places, different)
    if places == 0:
        return ComparedStage(name, title, "not_compared", "there is nothing that both sides have")
    why = (
        "the last bits differ"
        if largest <= LAST_BITS_DIFFER
        else "parameters move by little more than the spacing of the numbers that they are stored as"
    )
    detail = f"within {largest:.1e}; {why}" if largest else None
    return ComparedStage(name, title, "equal", detail, None, places, largest=largest)


def without_weights(stages: Sequence[ComparedStage], a: str, b: str) -> list[ComparedStage]:
    """Return stages of two models without that of the weights: equal random ones say nothing about models
    that start from other files."""
    detail = (
        f"A starts from `{a}` and B from `{b}`, and both ran with random weights (`--model full` loads them)"
    )
    return [
        replace(stage, status="not_compared", detail=detail, difference=None)
        if stage.name == "weights"
        else stage
        for stage in stages
    ]


def tolerances(*, is_fp32: bool, is_one_environment: bool, keys: Iterable[str]) -> tuple[float, float | None]:
    """Return the tolerance, and that of the stages of a step if it is another one. `keys`: those that
    differ."""
    if not is_one_environment:
        return OTHER_VERSIONS_TOLERANCE if is_fp32 else OTHER_VERSIONS_HALF_TOLERANCE, None
    is_cut_otherwise = not is_fp32 and not MICRO_BATCHES.isdisjoint(keys)
    return TOLERANCE, OTHER_VERSIONS_HALF_TOLERANCE if is_cut_otherwise else None


def open_words(stage: str, decisions: Sequence[tuple[str, str]], a: Observation, b: Observation) -> list[str]:
    """Return what may be behind a difference that no key causes: what an import leaves open there, and other
    rows of the same examples."""
    words = [
        f"`{key}`: {each}"
        for key, each in decisions
        if (stage == "labels" if key == "data.loss_on" else key.startswith("data.") is (stage in DATA_STAGES))
    ]
    if stage == "rows":
        pieces = [
            sorted(json.dumps(piece) for row in side.stages[stage].values.values() for piece in row)
            for side in (a, b)
        ]
        if pieces[0] == pieces[1]:
            words.insert(
                0, "the same pieces of examples stand in other rows, since each packs by its own rule"
            )
    return words


def has_rows(side: Observation) -> bool:
    """Return whether the model of a side ran on rows of its data, and not on invented ones."""
    facts = side.stages.get("rows")
    return facts is not None and facts.reason is None


def compare_observations(
    a: Observation,
    b: Observation,
    tolerance: float = TOLERANCE,
    *,
    of_steps: float | None = None,
    grows: bool = True,
) -> list[ComparedStage]:
    """Compare all stages that one of the sides has, in order.

    `of_steps`: the tolerance of stages that depend on how a step is cut into micro-batches, if it is another
    one. `grows`: the limit of a later stage follows from what earlier ones differ by (`GROWTH`), and from the
    rounding of stored numbers.
    """
    found: list[ComparedStage] = []
    largest = 0.0
    for name in STAGES:
        if name in a.stages or name in b.stages:
            own = of_steps if of_steps is not None and name in GROWTH else tolerance
            limit = max(own, GROWTH[name] * largest) if grows and name in GROWTH else own
            found.append(compare_stage(name, a, b, limit, rounds=grows))
            largest = max(largest, found[-1].largest) if name in OF_ROWS else largest
    return found


def _places(own: StageFacts, other: StageFacts) -> list[str]:
    return [*own.values, *(place for place in other.values if place not in own.values)]


def _walk(
    own: StageFacts,
    other: StageFacts,
    a: Observation,
    b: Observation,
    at: Callable[[str, Any, Any], StageDifference | None],
) -> Compared:
    """Compare place by place. `at` returns the difference of two values; a place that one side lacks
    differs."""
    first: StageDifference | None = None
    different, places = 0, _places(own, other)
    for place in places:
        name = a.names.get(place) or b.names.get(place) or place
        if place not in own.values or place not in other.values:
            found = StageDifference("", *(_PRESENCE[place in each.values] for each in (own, other)))
        else:
            found = at(place, own.values[place], other.values[place])
        if found is not None:
            different += 1
            first = first or StageDifference(f"{name}{found.place}", found.a, found.b)
    return len(places), different, first, 0.0


_PRESENCE = {True: "is there", False: "is not there"}


def _tokens(own: StageFacts, other: StageFacts, a: Observation, b: Observation, _: float) -> Compared:
    def at(_place: str, ids: list[int], others: list[int]) -> StageDifference | None:
        if ids == others:
            return None
        index = next(
            (i for i, (x, y) in enumerate(zip(ids, others, strict=False)) if x != y),
            min(len(ids), len(others)),
        )
        return StageDifference(f", token {index}", _token(a, ids, index), _token(b, others, index))

    return _walk(own, other, a, b, at)


def _token(side: Observation, ids: Sequence[int], index: int) -> str:
    if index >= len(ids):
        return f"has ended after {len(ids)} tokens"
    return f"{side.texts.get(str(ids[index]), '')!r} (id {ids[index]})"


def _labels(own: StageFacts, other: StageFacts, a: Observation, b: Observation, _: float) -> Compared:
    """Compare flags of the examples whose tokens are equal: others differ in their tokens already."""
    tokens, others_tokens = a.stages["tokens"].values, b.stages["tokens"].values
    shared = [place for place in own.values if place in tokens and tokens[place] == others_tokens.get(place)]

    def at(place: str, flags: list[int], others: list[int]) -> StageDifference | None:
        if flags == others:
            return None
        index = next(i for i, (x, y) in enumerate(zip(flags, others, strict=True)) if x != y)
        counts = [
            f"{_VERDICT[side[index]]} ({sum(side)} of {len(side)} tokens of the example are trained)"
            for side in (flags, others)
        ]
        return StageDifference(f", token {index} {a.texts.get(str(tokens[place][index]), '')!r}", *counts)

    return _walk(
        StageFacts({place: own.values[place] for place in shared}),
        StageFacts({p: other.values[p] for p in shared}),
        a,
        b,
        at,
    )


_VERDICT = {0: "is not trained", 1: "is trained"}


def _rows(own: StageFacts, other: StageFacts, a: Observation, b: Observation, _: float) -> Compared:
    def at(_place: str, pieces: list[list[Any]], others: list[list[Any]]) -> StageDifference | None:
        if pieces == others:
            return None
        return StageDifference("", _pieces(a, pieces), _pieces(b, others))

    return _walk(own, other, a, b, at)


SHOWN_PIECES = 3


def _pieces(side: Observation, pieces: Sequence[Sequence[Any]]) -> str:
    """Describe the examples of a row, each [place, first token, tokens]."""
    texts = [
        f"{side.names.get(place, place)}{f' from token {start}' if start else ''}: {length} tokens"
        for place, start, length in pieces[:SHOWN_PIECES]
    ]
    more = len(pieces) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more > 0 else "")


def _exact(own: StageFacts, other: StageFacts, a: Observation, b: Observation, _: float) -> Compared:
    def at(_place: str, value: Any, other_value: Any) -> StageDifference | None:
        return (
            None
            if value == other_value
            else StageDifference("", *(_shown(each, of) for each, of in ((value, a), (other_value, b))))
        )

    return _walk(own, other, a, b, at)


def _order(own: StageFacts, other: StageFacts, a: Observation, b: Observation, _: float) -> Compared:
    # One run may have more steps, which the learning rate shows.
    shared = [place for place in own.values if place in other.values]
    own, other = (StageFacts({place: each.values[place] for place in shared}) for each in (own, other))

    def at(_place: str, rows: list[str], others: list[str]) -> StageDifference | None:
        if rows == others:
            return None
        index = next(
            (i for i, (x, y) in enumerate(zip(rows, others, strict=False)) if x != y),
            min(len(rows), len(others)),
        )
        shown = [
            f"reads {side.names.get(each[index], each[index])}"
            if index < len(each)
            else f"has only {len(each)} rows"
            for side, each in ((a, rows), (b, others))
        ]
        return StageDifference(f", row {index + 1}", *shown)

    return _walk(own, other, a, b, at)


def _shown(value: Any, side: Observation) -> str:
    if isinstance(value, str):
        return side.names.get(value, value)
    return f"{value:.8g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _numbers(
    own: StageFacts, other: StageFacts, a: Observation, b: Observation, tolerance: float
) -> Compared:
    """Compare numbers relative to the largest of their vector; a value with two dimensions has a vector for
    each token."""
    largest = 0.0

    def at(place: str, value: Any, other_value: Any) -> StageDifference | None:
        nonlocal largest
        x, y = np.asarray(value, np.float64), np.asarray(other_value, np.float64)
        if x.shape != y.shape:
            return StageDifference("", f"{_size(x)}", f"{_size(y)}")
        is_nan = np.isnan(x) & np.isnan(y)
        x, y = np.where(is_nan, 0.0, x), np.where(is_nan, 0.0, y)
        scale = np.maximum(np.abs(x), np.abs(y))
        scale = scale.max(axis=-1, keepdims=True) if scale.ndim else scale
        scale = np.where(scale == 0.0, 1.0, scale)
        with np.errstate(invalid="ignore"):
            off = np.where(x == y, 0.0, np.abs(x - y) / scale)
        off = np.where(np.isnan(off), np.inf, off)
        allowed = max((each.rounding.get(place, [0.0]) for each in (own, other)), key=max)
        wrong = np.argwhere(np.atleast_1d(~(off <= tolerance + np.array(allowed) / scale)))  # NaN is wrong
        if not len(wrong):
            largest = max(largest, float(np.max(off, initial=0.0)))
            return None
        index = tuple(wrong[0].tolist())
        where = f", token {index[0]}" if x.ndim == 2 else ""
        shown = (float(np.atleast_1d(each)[index]) for each in (x, y))
        return StageDifference(where, *(f"{each:.9g}" for each in shown))

    places, different, first, _ = _walk(own, other, a, b, at)
    return places, different, first, largest


def _size(value: np.ndarray[Any, Any]) -> str:
    return " × ".join(map(str, value.shape)) + " values" if value.ndim else "one value"


_COMPARE: dict[str, Callable[[StageFacts, StageFacts, Observation, Observation, float], Compared]] = {
    "tokens": _tokens,
    "labels": _labels,
    "rows": _rows,
    "batch": _exact,
    "order": _order,
    "items": _exact,
    "eval_rows": _exact,
    "model": _exact,
    "defaults": _exact,
    "dtypes": _exact,
}


def stages_until(name: str) -> Iterator[str]:
    """Yield the stages up to `name`, which it depends on."""
    for each in STAGES:
        yield each
        if each == name:
            return
