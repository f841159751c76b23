from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.pages.metrics_table import Columns, Curve, MetricsTable
from fsdp_tune.pages.run_record import sorted_lines
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
        inside = thinned.values[(thinned.steps >= 10_000 * tenth) & (thinned.steps < 10_000 * (tenth + 1))]
        assert (inside.min(), inside.max()) == (0.0, 99.0 * (1 + tenth))


def test_thinning_keeps_a_gap_between_its_neighbours() -> None:
    values: list[float | None] = [1.0] * 30_000
    values[12_345] = None
    thinned = Curve(range(30_000), values).thinned(600)
    assert len(thinned.steps) <= 600
    assert thinned.steps[np.isnan(thinned.values)].tolist() == [12_345]


@given(values=st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=400), limit=st.integers(6, 50))
def test_thinned_curve_is_short_ordered_and_has_the_same_range(
    values: list[float | None], limit: int
) -> None:
    curve = Curve(range(len(values)), values)
    thinned = curve.thinned(limit)
    assert len(thinned.steps) <= max(limit, 6)
    assert list(thinned.steps) == sorted(set(thinned.steps))
    np.testing.assert_array_equal(thinned.values, curve.values[thinned.steps])
    if finite := [value for value in values if value is not None]:
        kept = thinned.finite().values
        assert (kept.min(), kept.max()) == (min(finite), max(finite))
    assert np.isnan(thinned.values).any() == (None in values)


def test_thinned_curves_of_a_chart_have_steps_in_common() -> None:
    """Two runs that log at the same steps, of which one has more: a step that is shown of one is often shown
    of the other."""
    one, other = (
        Curve(range(0, count, 10), [math.sin(step * factor) for step in range(0, count, 10)])
        for count, factor in ((50_000, 1), (40_000, 2))
    )
    steps, shared = one.thinned(200, (0, 49_990)).steps, other.thinned(200, (0, 49_990)).steps
    assert len(set(steps.tolist()) & set(shared.tolist())) >= 45


def test_short_curve_is_unchanged() -> None:
    curve = Curve([1, 2], [3.0, None])
    assert curve.thinned(6) is curve


@pytest.mark.parametrize("value", [None, True, "nan", "inf", "1.5", math.nan, math.inf, [1.0]])
def test_what_is_no_finite_number_is_a_gap(value: object) -> None:
    assert number(value) is None
    assert number(2) == 2.0


def test_curve_has_the_lines_with_its_field() -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}, {"step": 3, "other": 1.0}]
    table = MetricsTable()
    table.add([{"loss": 1.0, **line} for line in lines])
    curve = table.curve("loss")
    assert curve.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(curve.values, [2.0, math.nan, 1.0])
    assert table.curve("other").steps.tolist() == [3]
    assert len(table.curve("absent")) == 0
    assert table.losses.names == ["loss", "step", "other"]


def test_null_is_no_point_and_text_is_not_finite() -> None:
    columns = Columns()
    for step, value in enumerate((None, "nan", math.inf, 10**400, 2, True)):
        columns.add(step, {"x": value})
    assert columns.curve("x").steps.tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_array_equal(columns.curve("x").values, [math.nan, math.nan, math.nan, 2.0, math.nan])


def test_columns_keep_lines_in_the_order_of_steps() -> None:
    columns = Columns()
    for step, fields in ((1, {"a": 1.0}), (2, {"a": 2.0, "b": 5.0}), (3, {"b": 6.0}), (2, {"a": 9.0})):
        columns.add(step, {"step": step, **fields})
    assert (columns.newest_step, columns.curve("a").values.tolist(), columns.curve("b").steps.tolist()) == (
        2,
        [1.0, 9.0],
        [],
    )
    assert columns.last == {"step": 2, "a": 9.0}
    columns.drop_from(2)
    assert columns.last == {"step": 1.0, "a": 1.0}
    columns.drop_from(0)
    assert (columns.newest_step, dict(columns.last)) == (-1, {})


@given(
    st.lists(
        st.tuples(st.sampled_from(("loss", "eval_loss", "start")), st.integers(0, 9), st.integers(0, 99))
    )
)
def test_table_has_the_lines_that_a_list_has(drawn: list[tuple[str, int, int]]) -> None:
    """The columns of the report and the lines of `compare` follow one rule."""
    starts: dict[str, object] = {"event": "train_started", "total_steps": 9}
    lines = [{"step": step, **(starts if kind == "start" else {kind: value})} for kind, step, value in drawn]
    table = MetricsTable()
    table.add(lines)
    found = sorted_lines(lines)
    for name, own in (("loss", found.losses), ("eval_loss", found.evals)):
        curve = table.curve(name)
        assert list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) == [
            (line["step"], line[name]) for line in own
        ]
    assert len(table.events) == len(found.events)


def losses(*pairs: tuple[int, float]) -> list[dict[str, object]]:
    return [{"step": step, "loss": loss} for step, loss in pairs]


def test_lines_of_a_later_attempt_replace_those_of_the_earlier_one() -> None:
    """Another interval of logging too: what the later attempt has not reached yet is not taken from the
    earlier one."""
    first = [
        *losses((10, 3.0), (20, 2.5)),
        {"step": 20, "eval_loss": 2.6},
        *losses((30, 2.0)),
        {"step": 30, "eval_loss": 2.1},
    ]
    again = [{"event": "train_started", "step": 10, "total_steps": 40}, *losses((15, 2.9), (20, 2.8))]
    found = sorted_lines([*first, *again])
    assert [(line["step"], line["loss"]) for line in found.losses] == [(10, 3.0), (15, 2.9), (20, 2.8)]
    assert found.evals == []
    assert [event.name for event in found.events] == ["train_started"]


def test_repeated_steps_without_an_event_are_of_the_later_attempt() -> None:
    found = sorted_lines(
        [*losses((10, 3.0), (20, 2.5), (30, 2.0)), {"step": 30, "eval_loss": 2.1}, *losses((20, 2.4))]
    )
    assert [(line["step"], line["loss"]) for line in found.losses] == [(10, 3.0), (20, 2.4)]
    assert found.evals == []


def test_evaluation_at_the_step_of_a_training_line_keeps_both() -> None:
    found = sorted_lines([*losses((10, 3.0)), {"step": 10, "eval_loss": 2.1}, *losses((20, 2.0))])
    assert ([line["step"] for line in found.losses], [line["step"] for line in found.evals]) == (
        [10, 20],
        [10],
    )


def test_lines_without_a_step_are_left_out() -> None:
    found = sorted_lines([{"loss": 1.0}, {"step": "3", "loss": 1.0}, {"event": "stopping"}, {"step": 3}])
    assert (found.losses, found.evals, len(found.events)) == ([], [], 1)
