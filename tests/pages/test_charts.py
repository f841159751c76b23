from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.pages.charts import MAX_POINTS, Chart, charts_of, points_each
from fsdp_tune.pages.run_record import RunRecord, read_run
from fsdp_tune.pages.step_shares import step_parts
from tests.pages.written import training_line, written


def record(folder: Path, lines: list[dict[str, Any]], plan: dict[str, float] | None = None) -> RunRecord:
    run = written(folder, lines)
    if plan is not None:
        run.plan_json.write_text(json.dumps(plan))
    return read_run(run, folder.name)


def by_title(charts: list[Chart]) -> dict[str, Chart]:
    return {chart.title: chart for chart in charts}


def test_charts_without_a_value_are_left_out(tmp_path: Path) -> None:
    charts = by_title(charts_of([record(tmp_path / "one", [training_line(10), training_line(20)])]))
    assert list(charts) == [
        "Loss",
        "Learning rate",
        "Gradient norm before clipping",
        "Throughput",
        "Time of a step",
        "Waiting and updating",
        "Host memory of rank 0, peak so far",
    ]
    assert charts_of([record(tmp_path / "none", [])]) == []


def test_several_runs_have_a_chart_for_each_field_and_the_same_number_in_all(tmp_path: Path) -> None:
    fields = {"source_chat_loss": 1.0, "source_code_loss": 2.0}
    runs = [
        record(tmp_path / name, [training_line(10, **(fields if name != "two" else {}))])
        for name in ("one", "two", "three")
    ]
    charts = by_title(charts_of(runs))
    for part in ("chat", "code"):
        chart = charts[f"Loss by source: {part}"]
        assert ([(each.label, each.number) for each in chart.series], chart.by_run) == (
            [("one", 0), ("three", 2)],
            True,
        )
    alone = by_title(charts_of(runs[:1]))["Loss by source"]
    assert ([(each.label, each.number) for each in alone.series], alone.by_run) == (
        [("chat", 0), ("code", 1)],
        False,
    )


def test_fields_that_no_chart_names_have_charts_of_their_own(tmp_path: Path) -> None:
    lines = [
        training_line(10, loss_scale=1024.0),
        {"step": 10, "eval_loss": 1.0, "eval_perplexity": 2.7, "eval_accuracy": 0.5, "eval_seconds": 1.0},
    ]
    titles = [
        chart.title
        for chart in charts_of([record(tmp_path / "one", lines)])
        if chart.group == "Other measurements"
    ]
    assert titles == ["loss_scale", "eval_accuracy"]


def test_plan_is_a_level_next_to_the_measurement(tmp_path: Path) -> None:
    lines = [training_line(10, peak_reserved_gib=37.5, peak_allocated_gib=33.0)]
    (chart,) = [
        chart
        for chart in charts_of(
            [record(tmp_path / "one", lines, {"peak_reserved_gib": 36.0, "step_seconds": 0.4})]
        )
        if chart.title.startswith("GPU memory")
    ]
    assert [(level.label, level.value) for level in chart.levels] == [("reserved, planned", 36.0)]


def test_marks_have_their_run_and_a_resume_is_one(tmp_path: Path) -> None:
    """`train --resume` leaves a start after step 0, and no event of its own; the first start of a run is not
    marked."""
    started = [{"event": "train_started", "step": step, "total_steps": 20, "time": 1.0} for step in (0, 10)]
    spike = {"event": "loss_spike", "step": 10, "message": "high"}
    lines = [
        started[0],
        training_line(10),
        spike,
        {"event": "checkpoint_saved", "step": 10},
        started[1],
        training_line(20),
    ]
    runs = [record(tmp_path / "one", [training_line(10)]), record(tmp_path / "two", lines)]
    chart = by_title(charts_of(runs))["Loss"]
    assert [(mark.step, mark.name, mark.run) for mark in chart.marks] == [
        (10, "loss spike", 1),
        (10, "resumed", 1),
    ]
    assert chart.marks_in_words() == "loss spike at step 10 (two), resumed at step 10 (two)"
    earlier = record(tmp_path / "three", [training_line(5), spike | {"step": 5}])
    assert [mark.step for mark in by_title(charts_of([*runs, earlier]))["Loss"].marks] == [5, 10, 10]
    alone = by_title(charts_of(runs[1:]))["Loss"]
    assert [(mark.run, str(mark)) for mark in alone.marks] == [
        (None, "loss spike at step 10"),
        (None, "resumed at step 10"),
    ]


def test_event_that_explains_a_resume_is_the_mark_of_it(tmp_path: Path) -> None:
    changed = {"event": "recipe_changed", "step": 10, "changes": []}
    started = {"event": "train_started", "step": 10, "total_steps": 20, "time": 1.0}
    chart = by_title(
        charts_of([record(tmp_path / "one", [training_line(10), changed, started, started | {"step": 15}])])
    )["Loss"]
    assert [(mark.step, mark.name) for mark in chart.marks] == [(10, "recipe changed"), (15, "resumed")]


def test_many_marks_are_the_newest(tmp_path: Path) -> None:
    lines = [
        training_line(1),
        *({"event": "loss_spike", "step": step, "message": "high"} for step in range(1, 300)),
    ]
    chart = by_title(charts_of([record(tmp_path / "one", lines)]))["Loss"]
    assert [mark.step for mark in chart.marks] == list(range(200, 300))
    assert chart.marks_in_words().endswith("and 94 more")


def test_chart_is_described_in_words_and_gaps_are_counted(tmp_path: Path) -> None:
    lines = [training_line(10, 4.0), training_line(20, "nan"), training_line(30, 2.0)]
    chart = by_title(charts_of([record(tmp_path / "one", lines)]))["Loss"]
    assert (
        chart.description()
        == "Loss, nats per token, by step. one: 4 at step 10 to 2 at step 30, between 2 and 4."
    )
    assert chart.gaps() == "one: 1 not finite, first at step 20"


def test_json_of_a_chart_has_differences_of_steps_and_null_for_gaps(tmp_path: Path) -> None:
    lines = [training_line(10, 1.23456789), training_line(20, "nan"), training_line(40, 2.0)]
    (series,) = by_title(charts_of([record(tmp_path / "one", lines)]))["Loss"].as_json(100)["series"]
    assert list(accumulate(series["x"])) == [10, 20, 40]
    assert series["y"] == [1.23457, None, 2.0]


def test_share_is_in_percent(tmp_path: Path) -> None:
    chart = by_title(charts_of([record(tmp_path / "one", [training_line(10, mfu=0.4)])]))[
        "Model FLOPs utilisation (MFU)"
    ]
    assert list(chart.series[0].curve.values) == [40.0]


def test_many_curves_share_the_points_of_the_page(tmp_path: Path) -> None:
    charts = charts_of([record(tmp_path / "one", [training_line(10)])])
    assert points_each(charts) == MAX_POINTS
    assert points_each(charts * 20) < 300


def test_parts_of_a_step_add_up_and_leave_out_the_first_line(tmp_path: Path) -> None:
    lines = [training_line(1, last_step_seconds=60.0), training_line(10), training_line(20)]
    parts = {part.name: part for part in step_parts(record(tmp_path / "one", lines))}
    assert {name: part.seconds for name, part in parts.items()} == pytest.approx(
        {
            "forward and backward": 0.25,
            "waiting for communication": 0.1,
            "optimizer": 0.05,
            "waiting for data": 0.01,
        }
    )
    assert sum(part.share for part in parts.values()) == pytest.approx(1.0)


def test_communication_that_is_not_observed_is_in_the_first_part(tmp_path: Path) -> None:
    lines = [training_line(step, exposed_communication_seconds=None) for step in (10, 20)]
    parts = [part.name for part in step_parts(record(tmp_path / "one", lines))]
    assert parts == ["forward, backward and communication", "optimizer", "waiting for data"]
    assert step_parts(record(tmp_path / "none", [])) == []


def test_scores_of_checkpoints_are_curves_in_the_order_of_steps(tmp_path: Path) -> None:
    def scored(step: int, value: float) -> dict[str, Any]:
        score = {"value": value, "low": None, "high": None, "rows": 8}
        scores = {
            "sums/exact_match": score,
            "chats/perplexity": score,
            "chats/loss": score,
            "arc_easy/acc": score,
        }
        return {
            "event": "checkpoint_evaluated",
            "step": step,
            "checkpoint": f"of {step}",
            "seconds": 1.0,
            "scores": scores,
            "time": 1.0,
        }

    lines = [training_line(10), training_line(20), training_line(30), scored(20, 0.5), scored(10, 0.25)]
    charts = by_title(charts_of([record(tmp_path / "one", lines)]))
    (series,) = charts["Exact match of checkpoints"].series
    assert (series.curve.steps.tolist(), series.curve.values.tolist()) == ([10, 20], [25.0, 50.0])
    assert {"Loss of evaluated checkpoints", "arc_easy/acc"} <= set(charts)
    assert not any("perplexity" in title for title in charts)
