"""Findings of rules: contradictions between keys, and keys without effect. The loader adds line numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from fsdp_tune.core.errors import Notice, Problem, Where
from fsdp_tune.recipe.scalars import printable
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe

Positions = Mapping[str, Where]


@dataclass(frozen=True, slots=True)
class Finding:
    """A result of a rule. `keys` lists the keys that contradict each other; the first one is the one to change."""

    code: str
    keys: tuple[str, ...]
    message: str
    hint: str | None = None
    ways_out: tuple[str, ...] = ()


Rule = Callable[[Recipe], Iterator[Finding]]


def given(recipe: Recipe, key: str) -> bool:
    """Return whether a key is written in the recipe, as opposed to having its default."""
    *parents, name = key.split(".")
    section = value_of(recipe, ".".join(parents)) if parents else recipe
    extra = section.model_extra or {}
    return name in section.model_fields_set or name in extra or f"{name}_" in section.model_fields_set


def located(finding: Finding, positions: Positions) -> tuple[Where, str]:
    """Return the position of the first written key, and the message with the lines of the others."""
    written = [key for key in finding.keys if key in positions]
    text = printable(finding.message)
    if not written:
        return Where(key=finding.keys[0] if finding.keys else None), text
    first = positions[written[0]]
    others = [f"`{key}` on {_place(positions[key])}" for key in written[1:]]
    message = f"{text} ({', '.join(others)})" if others else text
    return Where(first.source, first.line, first.column, written[0]), message


def as_problem(finding: Finding, positions: Positions) -> Problem:
    where, message = located(finding, positions)
    return Problem(finding.code, message, where, finding.hint, finding.ways_out)


def as_notice(finding: Finding, positions: Positions, *, strict: bool) -> Notice:
    where, message = located(finding, positions)
    return Notice(finding.code, message, where, finding.hint, strict)


def _place(where: Where) -> str:
    return f"line {where.line}" if where.line is not None else str(where)


def pinned(problem: Problem, positions: Positions) -> Problem:
    """Add to a problem that only names a key the line where that key, or its nearest parent, is written."""
    key = problem.where.key
    if problem.where.source is not None or key is None:
        return problem
    while key and key not in positions:
        key = key[: max(key.rfind("."), key.rfind("["), 0)]
    return problem.at(replace(positions[key], key=problem.where.key)) if key else problem
