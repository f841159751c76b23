"""What a resolution has decided so far, with the reasons, and the problems and notices that it met."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import Notice, Problem, Where
from fsdp_tune.recipe.schema.keys import Finding, as_notice, as_problem
from fsdp_tune.recipe.schema.recipe import Recipe


@dataclass(slots=True)
class Decisions:
    recipe: Recipe
    machine: Machine
    assume: str | None
    positions: Mapping[str, Where]
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    notices: list[Notice] = field(default_factory=list[Notice])
    problems: list[Problem] = field(default_factory=list[Problem])

    def __post_init__(self) -> None:
        self.data = self.recipe.model_dump(by_alias=True)

    def decide(self, key: str, value: object, reason: str) -> None:
        section, name = key.split(".")
        self.data[section][name] = value
        self.reasons[key] = reason

    def add_problem(
        self,
        code: str,
        keys: tuple[str, ...],
        message: str,
        hint: str | None = None,
        ways_out: tuple[str, ...] = (),
    ) -> None:
        self.problems.append(as_problem(Finding(code, keys, message, hint, ways_out), self.positions))

    def add_notice(self, code: str, keys: tuple[str, ...], message: str, hint: str | None = None) -> None:
        self.notices.append(as_notice(Finding(code, keys, message, hint), self.positions, strict=False))
