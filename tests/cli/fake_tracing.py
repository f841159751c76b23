"""Replaces the child process that traces steps: traces of a model of a given size, at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.planner import tracing
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.planner.test_search import ModelTracer

STATE_GIB = 80


class FakeTracing(ModelTracer):
    """Records its arguments and requests."""

    made: list[FakeTracing]
    state_gib = STATE_GIB

    def __init__(
        self, _cache: Path, *, exact: bool = False, vocabulary: int | None = None, offline: bool = False
    ) -> None:
        super().__init__(self.state_gib)
        self.exact, self.vocabulary, self.is_closed = exact, vocabulary, False
        self.asked: list[Recipe] = []
        FakeTracing.made.append(self)

    def request(self, recipes: Sequence[Recipe]) -> list[int]:
        self.asked += recipes
        return list(range(len(self.asked) - len(recipes), len(self.asked)))

    def result(self, key: int) -> Trace:
        return self.trace(self.asked[key])

    def __call__(self, recipes: Sequence[Recipe]) -> Any:
        return [self.result(key) for key in self.request(recipes)]

    def __enter__(self) -> FakeTracing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(name="fake")
def replaced_tracing(monkeypatch: pytest.MonkeyPatch) -> type[FakeTracing]:
    monkeypatch.setattr(tracing, "Tracing", FakeTracing)
    monkeypatch.setattr(FakeTracing, "made", [], raising=False)
    return FakeTracing
