from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.pages.run_record import Curve, curve_of, sorted_lines
from fsdp_tune.run.events import number


def test_thinning_keeps_a_single_peak_and_a_single_trough() -> None:
    values = [1.0 + 0.001 * math.sin(step) for step in range(100_000)]
    values[31_417], values[77_777] = 50.0, -50.0
    thinned = Curve(range(1, 100_001), values).thinned(2000)
    points = dict(zip(thinned.steps, thinned.values, strict=True))
    assert len(points) <= 2000
    assert (points[31_418], points[77_778]) == (50.0, -50.0)
    assert {1, 100_000} <= points.keys()


def test_thinning_keeps_the_extremes_of_every_bucket() -> None:
    """A sawtooth: each bucket has its own least and greatest value, which the thinned curve still spans."""
    values = [float(at % 100) * (1 + at // 10_000) for at in range(100_000)]
    thinned = Curve(range(100_000), values).thinned(200)
    for tenth in range(10):
        inside = [value for step, value in thinned.finite() if 10_000 * tenth <= step < 10_000 * (tenth + 1)]
        assert (min(inside), max(inside)) == (0.0, 99.0 * (1 + tenth))


def test_thinning_keeps_a_gap_between_its_neighbours() -> None:
    values: list[float | None] = [1.0] * 30_000
    values[12_345] = None
    thinned = Curve(range(30_000), values).thinned(600)
    assert len(thinned.steps) <= 600
    assert [step for step, value in zip(thinned.steps, thinned.values, strict=True) if value is None] == [12_345]


@given(values=st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400), limit=st.integers(6, 50))
def test_thinned_curve_is_short_ordered_and_has_the_same_range(values: list[float | None], limit: int) -> None:
    curve = Curve(range(len(values)), values)
    thinned = curve.thinned(limit)
    assert len(thinned.steps) <= max(limit, 6)
    assert list(thinned.steps) == sorted(set(thinned.steps))
    assert all(values[step] == value for step, value in zip(thinned.steps, thinned.values, strict=True))
    if finite := [value for value in values if value is not None]:
        kept = [value for _, value in thinned.finite()]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    assert (None in thinned.values) == (None in values)


def test_short_curve_is_unchanged() -> None:
    curve = Curve([1, 2], [3.0, None])
    assert curve.thinned(6) is curve


@pytest.mark.parametrize("value", [None, True, "nan", "inf", "1.5", math.nan, math.inf, [1.0]])
def test_what_is_no_finite_number_is_a_gap(value: object) -> None:
    assert number(value) is None
    assert number(2) == 2.0


def test_curve_has_the_lines_with_its_field() -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}, {"step": 3, "other": 1.0}]
    assert curve_of(lines, "loss") == Curve([1, 2], [2.0, None])


def losses(*pairs: tuple[int, float]) -> list[dict[str, object]]:
    return [{"step": step, "loss": loss} for step, loss in pairs]


def test_lines_of_a_later_attempt_replace_those_of_the_earlier_one() -> None:
    """Another interval of logging too: what the later attempt has not reached yet is not taken from the earlier one."""
    first = [*losses((10, 3.0), (20, 2.5)), {"step": 20, "eval_loss": 2.6}, *losses((30, 2.0)), {"step": 30, "eval_loss": 2.1}]
    again = [{"event": "train_started", "step": 10, "total_steps": 40}, *losses((15, 2.9), (20, 2.8))]
    found = sorted_lines([*first, *again])
    assert [(line["step"], line["loss"]) for line in found.losses] == [(10, 3.0), (15, 2.9), (20, 2.8)]
    assert found.evals == []
    assert [event.name for event in found.events] == ["train_started"]


def test_repeated_steps_without_an_event_are_of_the_later_attempt() -> None:
    found = sorted_lines([*losses((10, 3.0), (20, 2.5), (30, 2.0)), {"step": 30, "eval_loss": 2.1}, *losses((20, 2.4))])
    assert [(line["step"], line["loss"]) for line in found.losses] == [(10, 3.0), (20, 2.4)]
    assert found.evals == []


def test_evaluation_at_the_step_of_a_training_line_keeps_both() -> None:
    found = sorted_lines([*losses((10, 3.0)), {"step": 10, "eval_loss": 2.1}, *losses((20, 2.0))])
    assert ([line["step"] for line in found.losses], [line["step"] for line in found.evals]) == ([10, 20], [10])


def test_lines_without_a_step_are_left_out() -> None:
    found = sorted_lines([{"loss": 1.0}, {"step": "3", "loss": 1.0}, {"event": "stopping"}, {"step": 3}])
    assert (found.losses, found.evals, len(found.events)) == ([], [], 1)
