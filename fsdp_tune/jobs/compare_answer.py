"""What `compare` answers, whatever its sides are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_tune.comparison.causes import DifferentKey
from fsdp_tune.comparison.runs import DifferentStep
from fsdp_tune.comparison.served_numbers import ServedNumbers
from fsdp_tune.comparison.stages import ComparedStage, StageDifference
from fsdp_tune.comparison.verdicts import Verdict
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.jobs.answers import ImportedKey


@dataclass(frozen=True, slots=True)
class SideAnswer(JsonAnswer):
    name: str
    kind: str
    """`recipe`, `run`, or the tool whose configuration it is; `model` and `server` where a server is
    compared."""
    python: str | None
    """The interpreter that computed it; null if nothing was computed."""
    not_carried: list[ImportedKey]
    """Keys of another tool's configuration that the recipe does not have: dropped, or questions."""
    overrides: list[str] = field(default_factory=list[str])
    """`--set` of this side."""
    tool_version: str | None = None
    """Version of the tool that computed it, such as TRL's; null if `import` made a recipe of its
    configuration."""


@dataclass(frozen=True, slots=True)
class FirstDifference(StageDifference):
    stage: str


@dataclass(frozen=True, slots=True)
class Cause(JsonAnswer):
    """Why the first difference arises."""

    keys: list[DifferentKey]
    """With A's values of these keys in B, the difference vanishes."""
    versions: dict[str, list[str | None]]
    """Libraries with their versions in A and B, if the interpreter is the cause; of two runs, the facts of
    their environments that differ."""
    is_shown: bool
    """Whether B was computed again without the cause, and the difference vanished."""
    text: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class LaterDifference(JsonAnswer):
    """The first difference that is left when B has A's values of the causes before it."""

    difference: FirstDifference
    cause: Cause | None
    """Null if no keys were found that make it vanish."""


@dataclass(frozen=True, slots=True)
class CompareAnswer(JsonAnswer):
    """The result, and the document of `compare --json`."""

    equal: bool
    """Whether the verdict is `equal`."""
    a: SideAnswer
    b: SideAnswer
    keys: list[DifferentKey]
    """All that differ in the resolved recipes, those that change numbers first."""
    environment: dict[str, list[str | None]]
    """Versions, and for runs machines, that differ."""
    stages: list[ComparedStage]
    first: FirstDifference | None
    cause: Cause | None
    later: list[LaterDifference]
    first_step: DifferentStep | None
    """Of two runs: the first logged step beyond the tolerance."""
    first_bits: DifferentStep | None
    """Of two runs: the first logged step that is not bitwise equal."""
    rows_of_step: str | None
    """The rows of the global batch of `first_step`."""
    tolerance: float
    not_compared: list[str]
    failed: list[str] = field(default_factory=list[str])
    """Why a tool did not compute its side, or not all of it."""
    served: ServedNumbers | None = None
    """Of a server: how far its log-probabilities are from the model's."""
    verdict: Verdict = "not_comparable"
    """equal: rows and what is computed from them were compared and are equal, and no key that differs may
    change the result; different;
    not_comparable: nothing that shows it was compared, or a tool failed. What the verdict rests on and what
    it leaves out:"""
    compared: list[str] = field(default_factory=list[str])
    """What was compared, and how much of it."""
    unsettled: list[str] = field(default_factory=list[str])
    """Keys that differ, affect rows, numbers or the delivered model, and are not shown to make no
    difference."""


def first_of(stages: Sequence[ComparedStage]) -> FirstDifference | None:
    found = next((stage for stage in stages if stage.difference is not None), None)
    return (
        None
        if found is None or found.difference is None
        else FirstDifference(**found.difference.as_dict(), stage=found.name)
    )


def not_compared_lines(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return `what: why` for each pair, in their order; those of the same reason in one line."""
    by_reason: dict[str, list[str]] = {}
    for what, why in found:
        by_reason.setdefault(why, []).append(what)
    return [f"{', '.join(dict.fromkeys(each))}: {why}" for why, each in by_reason.items()]
