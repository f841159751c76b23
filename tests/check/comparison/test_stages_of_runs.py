"""The lines of two runs: the first step that differs, beyond a tolerance and in its bits."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.check.comparison.stages import compare_lines


def lines(losses: list[float], *, every: int = 1, **fields: Any) -> list[dict[str, Any]]:
    return [{"step": every * number, "loss": loss, "grad_norm": 1.0, **fields} for number, loss in enumerate(losses, 1)]


def test_first_step_beyond_the_tolerance_and_first_other_bits_are_named() -> None:
    found = compare_lines(lines([3.0, 2.0, 1.0, 0.5]), lines([3.0, 2.0 + 1e-9, 1.1, 0.7]), 1e-5)
    assert found.first is not None
    assert found.first_bits is not None
    assert (found.first.step, found.first.field, found.first.a, found.first.b) == (3, "loss", 1.0, 1.1)
    assert (found.first_bits.step, found.first_bits.field) == (2, "loss")
    assert (found.stage.status, found.stage.places, found.stage.different_places) == ("different", 4, 2)


def test_equal_lines_are_equal_and_last_bits_are_said() -> None:
    assert compare_lines(lines([1.0]), lines([1.0]), 1e-5).stage.detail is None
    found = compare_lines(lines([1.0]), lines([1.0 + 1e-9]), 1e-5)
    assert (found.stage.status, found.first) == ("equal", None)
    assert "step 1, loss" in (found.stage.detail or "")


@pytest.mark.parametrize("value", [float("nan"), "nan", None])
def test_value_that_is_not_finite_differs(value: Any) -> None:
    found = compare_lines(lines([1.0]), [{"step": 1, "loss": value}], 1e-5)
    assert found.first is not None
    assert (found.first.b, found.stage.status) == (None, "different")
    assert found.stage.difference is not None
    assert found.stage.difference.b == "not finite"


def test_only_lines_of_the_same_steps_are_compared() -> None:
    found = compare_lines(lines([3.0, 2.0, 1.0, 0.5]), lines([9.0, 0.5], every=2), 1e-5)
    assert found.stage.status == "not_compared"
    assert found.left_out == (
        "4 of 4 lines of A: the other run has no line of the same steps",
        "2 of 2 lines of B: the other run has no line of the same steps",
    )
    longer = compare_lines(lines([3.0, 2.0, 1.0]), lines([3.0, 2.0]), 1e-5)
    assert (longer.stage.status, longer.stage.places) == ("equal", 2)
    assert len(longer.left_out) == 1
