from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdp_tune.pages.run_record import RunRecord, read_run
from fsdp_tune.pages.tables import (
    difference_table,
    events_of,
    plan_table,
    samples_of,
    source_tables,
    spike_tables,
    summary_table,
)
from tests.pages.written import training_line, written


def record(folder: Path, lines: list[dict[str, Any]], **keys: Any) -> RunRecord:
    return read_run(written(folder, lines, **keys), folder.name)


def test_summary_has_a_row_for_each_run_and_no_empty_columns(tmp_path: Path) -> None:
    runs = [record(tmp_path / "one", [training_line(10), training_line(20)]), record(tmp_path / "two", [])]
    table = summary_table(runs)
    assert [row[0] for row in table.rows] == ["one", "two"]
    columns = dict(zip(table.head, zip(*table.rows, strict=True), strict=True))
    assert columns["loss"] == ("0.5 → 0.25, lowest 0.25 at step 20", "–")
    assert columns["tokens"] == ("20,000", "–")
    assert "MFU" not in columns
    alone = summary_table(runs[:1])
    assert (alone.head, ["tokens", "20,000"] in alone.rows) == ([], True)


def test_differences_of_many_runs_have_a_row_for_each_run(tmp_path: Path) -> None:
    runs = [record(tmp_path / name, []) for name in "abcde"]
    found = {"seed": ["1", "2", "3", "4", None]}
    assert difference_table(found, runs).rows == [["a", "1"], ["b", "2"], ["c", "3"], ["d", "4"], ["e", "–"]]
    assert difference_table({"seed": ["1", "2"]}, runs[:2]).rows == [["seed", "1", "2"]]


def test_plan_is_compared_with_the_last_line(tmp_path: Path) -> None:
    run = written(
        tmp_path / "one",
        [training_line(10, peak_reserved_gib=30.0), training_line(20, peak_reserved_gib=40.0)],
    )
    run.plan_json.write_text(json.dumps({"peak_reserved_gib": 36.0, "step_seconds": None}))
    assert plan_table([read_run(run, "one")]).rows == [
        ["one", "peak_reserved_gib", "36 GiB", "40 GiB", "-10.0%"]
    ]


def test_runs_with_the_same_rows_share_a_table_of_sources(tmp_path: Path) -> None:
    runs = [
        record(tmp_path / name, [], data_key=key)
        for name, key in (("one", "k1"), ("two", "k2"), ("three", "k1"))
    ]
    tables = source_tables(runs)
    assert [table.caption for table in tables] == ["one, three", "two"]
    assert tables[0].rows == [
        ["train", "chat", "messages", "assistant", "889", "1.5", "6,686", "2,492", "75.0%"]
    ]


def test_event_of_another_version_has_its_message_and_the_rows_that_it_names(tmp_path: Path) -> None:
    spike = {
        "event": "loss_spike",
        "step": 1200,
        "time": 1795398078.2,
        "message": "the loss is 9",
        "ratio": 3.0,
        "rows": [{"row": "a.jsonl:12", "loss": 9.123456}, {"row": "b.jsonl:3", "loss": 8.0}],
    }
    (event,) = events_of(record(tmp_path / "one", [spike]), 10).shown
    assert (event.step, event.time, event.name, event.is_warning) == (
        "1,200",
        "2026-11-23 01:41:18",
        "loss_spike",
        True,
    )
    assert event.text == "the loss is 9\nrows:\n  row: a.jsonl:12, loss: 9.123\n  row: b.jsonl:3, loss: 8"


PLACE = {"file": "a.jsonl", "tokens": 40, "rank": 1, "micro_batch": 2, "sequence": 3}


def test_rows_of_spikes_are_a_table_and_not_in_the_events(tmp_path: Path) -> None:
    spikes = [
        {
            "event": "loss_spike",
            "step": step,
            "message": "high",
            "rows": [{**PLACE, "row": 7, "step": step, "loss": 9.0}],
            "rows_total": 90,
        }
        for step in (3, 1200)
    ]
    old = {"event": "loss_spike", "step": 1, "message": "of another version"}
    run = record(tmp_path / "one", [old, *spikes])
    (table,) = spike_tables([run, record(tmp_path / "two", [])], 1)
    assert table.rows == [["1,200", "a.jsonl", "7", "40", "1", "2", "9"]]
    assert table.caption == "one: 1 of 180 rows, those with the highest losses of the newest spike first"
    assert [event.text for event in events_of(run, 9).shown] == ["of another version", "high", "high"]


def test_events_without_message_show_their_fields_and_bad_times_are_unknown(tmp_path: Path) -> None:
    lines = [
        {"event": "halting", "step": 3, "time": 1e300, "reason": "SIGTERM", "count": 1234, "on": None},
        {"event": "odd"},
    ]
    first, second = events_of(record(tmp_path / "one", lines), 10).shown
    assert (first.time, first.text) == ("–", "reason: SIGTERM, count: 1,234, on: null")
    assert (second.step, second.text, second.is_warning) == ("–", "", False)


def test_event_has_sizes_and_durations_in_units_on_one_line(tmp_path: Path) -> None:
    saved = {
        "event": "checkpoint_saved",
        "step": 9,
        "time": 1.0,
        "seconds": 90.0,
        "stall_seconds": 0.71,
        "size_bytes": 3 << 30,
    }
    spike = {"event": "loss_spike", "step": 9, "message": "high"}
    found = events_of(record(tmp_path / "one", [saved, spike]), 10)
    assert found.shown[0].text == "time: 1m30s, stall: 0.7s, size: 3.00 GiB"
    assert found.warnings == events_of(record(tmp_path / "two", [saved, spike]), 0).warnings == 1


def test_event_shows_durations_and_sizes_that_are_not_finite(tmp_path: Path) -> None:
    line = {
        "event": "stall",
        "step": 1,
        "time": 1795398078.2,
        "wait_seconds": float("nan"),
        "peak_bytes": float("inf"),
        "seconds": 3.0,
    }
    (event,) = events_of(record(tmp_path / "one", [line]), 10).shown
    assert event.text == "wait_seconds: nan, peak_bytes: inf, time: 3.0s"


def test_routine_events_are_left_out_first(tmp_path: Path) -> None:
    saved = [{"event": "checkpoint_saved", "step": step} for step in range(100)]
    lines = [
        {"event": "loss_spike", "step": 0, "message": "high"},
        *saved,
        {"event": "train_finished", "step": 100},
    ]
    found = events_of(record(tmp_path / "one", lines), 4)
    assert [(event.name, event.step) for event in found.shown] == [
        ("loss_spike", "0"),
        ("checkpoint_saved", "98"),
        ("checkpoint_saved", "99"),
        ("train_finished", "100"),
    ]
    assert found.left_out == 98


def sample(step: int, text: str) -> dict[str, Any]:
    return {
        "event": "samples",
        "step": step,
        "seconds": 1.0,
        "samples": [{"prompt": "one plus", "text": text}],
    }


def test_samples_of_runs_are_in_the_order_of_steps_by_prompt(tmp_path: Path) -> None:
    runs = [
        record(tmp_path / name, [sample(step, f"{name} {step}") for step in (100, 200)])
        for name in ("one", "two")
    ]
    (found,) = samples_of(runs, steps=12, characters=100)
    assert found.texts == [
        ("100", "one", "one 100"),
        ("100", "two", "two 100"),
        ("200", "one", "one 200"),
        ("200", "two", "two 200"),
    ]


def test_long_and_many_samples_are_shortened_with_first_and_last(tmp_path: Path) -> None:
    run = record(tmp_path / "one", [sample(step, "x" * 50) for step in range(1, 101)])
    (found,) = samples_of([run], steps=5, characters=10)
    assert (found.texts[0][0], found.texts[-1][0], len(found.texts), found.left_out) == ("1", "100", 5, 95)
    assert found.texts[0][2] == "xxxxxxxxxx … (40 more characters)"
