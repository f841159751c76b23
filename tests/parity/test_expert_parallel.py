"""Ranks that divide the experts (`fsdp.ep_size`) follow one device, and resume on another division and world."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.bench import Bench, assert_follows_one_device
from tests.parity.cases import SHORT, Case


def ep(size: int, **others: Any) -> tuple[tuple[str, Any], ...]:
    return (("ep_size", size), *others.items())


SECTION = "expert parallelism"
_BASE = Case("mixtral-divided", fsdp=ep(2))
FAST = [replace(_BASE, accumulation=2, packed=True, recomputation="full", steps=SHORT)]
CASES = [
    _BASE,
    replace(_BASE, ranks=4),
]


@pytest.mark.ranks
@pytest.mark.parametrize("case", [*FAST, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES)], ids=str)
def test_run_follows_the_reference(case: Case, bench: Bench, record_property) -> None:
    assert_follows_one_device(case, bench, record_property, SECTION)
