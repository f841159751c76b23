"""Lanes of a stream: every row of a pass once, the same from any state on, with the shares of the recipe."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.store import evaluation_hashes
from fsdp_tune.data.stream.lanes import Lane, StreamRow
from fsdp_tune.data.stream.row_stream import LaneState, RowStream
from tests.data.streams import read, rows_of_lanes, rows_of_run, stream_of
from tests.data.support import prepared, write_jsonl


def texts(name: str, count: int, length: int = 8) -> list[dict[str, str]]:
    return [{"text": f"{name}{number:05}".ljust(length, ".")} for number in range(count)]


def share_of_first(rows: Iterable[StreamRow]) -> float:
    """Return the share of the first source in the tokens of rows."""
    amounts: Counter[int] = Counter()
    for row in rows:
        for source, tokens in zip(row.sources, row.lengths, strict=True):
            amounts[source] += tokens
    return amounts[0] / amounts.total()


def test_lane_goes_on_from_any_state(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", [{"text": "x" * (1 + number * 7 % 50) + str(number)} for number in range(300)]
    )
    stream = stream_of(tmp_path, tmp_path / "a.jsonl", packing=True, lanes=2, shuffle_buffer_size=40)
    rows = list(islice(Lane(stream, 1, stream.first_state()), 400))
    for at in (0, 1, 57, 130, 398):
        state = LaneState.from_list(rows[at].after.as_list())
        again = list(islice(Lane(stream, 1, state), 399 - at))
        assert [(row.row_id, row.origins, row.input_ids.tolist(), row.after) for row in again] == [
            (row.row_id, row.origins, row.input_ids.tolist(), row.after) for row in rows[at + 1 :]
        ]


def test_order_depends_on_the_seed_and_is_that_of_the_files_without_shuffling(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts("a", 400))
    streams = [
        *(
            stream_of(
                tmp_path, tmp_path / "a.jsonl", lanes=1, shuffle_buffer_size=100, training={"data_seed": seed}
            )
            for seed in (1, 2)
        ),
        stream_of(tmp_path, tmp_path / "a.jsonl", lanes=1, shuffle=False),
    ]
    first, second, plain = (
        [read(row) for row in islice(Lane(stream, 0, stream.first_state()), 400)] for stream in streams
    )
    assert plain == [row["text"] for row in texts("a", 400)]
    assert len({tuple(first), tuple(second), tuple(plain)}) == 3
    assert len(set(first[:100])) == 100


@pytest.mark.parametrize("strategy", ["bfd", "wrapped"])
def test_rows_are_packed_with_less_than_one_percent_left_free(tmp_path: Path, strategy: str) -> None:
    lengths = np.random.default_rng(0).integers(3, 60, 4000)
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x" * int(length)} for length in lengths])
    stream = stream_of(
        tmp_path,
        tmp_path / "a.jsonl",
        packing=True,
        packing_strategy=strategy,
        max_length=128,
        shuffle_buffer_size=400,
    )
    rows = rows_of_run(stream, 1000)
    assert sum(len(row.input_ids) for row in rows) / (1000 * 128) > 0.99
    assert all(len(row.origins) == len(row.lengths) for row in rows)


def test_sources_have_their_shares_of_tokens(tmp_path: Path) -> None:
    """The rows of `b` are three times as long."""
    write_jsonl(tmp_path / "a.jsonl", texts("a", 200, 10))
    write_jsonl(tmp_path / "b.jsonl", texts("b", 200, 34))
    entries = [
        {"path": str(tmp_path / "a.jsonl"), "weight": 3.0},
        {"path": str(tmp_path / "b.jsonl"), "weight": 1.0},
    ]
    stream = stream_of(tmp_path, *entries, shuffle_buffer_size=400, mixture={"weight_by": "tokens"})
    assert share_of_first(rows_of_run(stream, 1600)) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("overlong", ["split", "drop", "truncate"])
def test_shares_of_tokens_are_of_those_that_overlong_rows_keep(tmp_path: Path, overlong: str) -> None:
    """Every other row of `b` is five times as long as a row may be."""
    write_jsonl(tmp_path / "a.jsonl", texts("a", 400, 30))
    write_jsonl(
        tmp_path / "b.jsonl",
        [row for pair in zip(texts("b", 200, 320), texts("c", 200, 30), strict=True) for row in pair],
    )
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0} for name in "ab"]
    options: dict[str, Any] = {
        "shuffle_buffer_size": 400,
        "mixture": {"weight_by": "tokens"},
        "overlong": overlong,
    }
    assert share_of_first(rows_of_run(stream_of(tmp_path, *entries, **options), 2000)) == pytest.approx(
        0.5, abs=0.03
    )


def test_curriculum_changes_shares_at_its_steps(tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", texts(name, 200))
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0} for name in "ab"]
    stages = [{"until_step": 40, "weights": [1.0, 0.0]}, {"until_step": 80, "weights": [0.0, 1.0]}]
    stream = stream_of(tmp_path, *entries, curriculum=stages, shuffle_buffer_size=64)
    sources = [row.sources[0] for row in rows_of_run(stream, 120 * 8)]
    assert set(sources[: 40 * 8]) == {0}
    assert set(sources[50 * 8 : 80 * 8]) == {1}, "a stage begins with a window"
    assert 0.3 < sum(sources[90 * 8 :]) / len(sources[90 * 8 :]) < 0.7


def test_bad_row_is_named_with_its_line_or_skipped(tmp_path: Path) -> None:
    rows = [*(f'{{"text": "row {number}"}}' for number in range(90)), "{broken", '{"text": "last"}']
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    stream = stream_of(tmp_path, tmp_path / "a.jsonl", shuffle_buffer_size=16)
    with pytest.raises(FsdpTuneError) as caught:
        rows_of_run(stream, 400)
    assert (caught.value.problems[0].where.source, caught.value.problems[0].where.line) == (
        str(tmp_path / "a.jsonl"),
        91,
    )
    skipping = stream_of(
        tmp_path, {"path": str(tmp_path / "a.jsonl"), "repeats": 1}, shuffle_buffer_size=16, on_bad_row="skip"
    )
    found = rows_of_lanes(skipping)
    assert len(found) == 91
    assert [bad.reason[:8] for row in found for _, bad in row.bad] == ["not JSON"]


def test_keys_that_no_format_reads_are_refused_wherever_they_are_in_a_stream(tmp_path: Path) -> None:
    rows = [
        row | ({"stars": 5} if number == 50 else {"id": number}) for number, row in enumerate(texts("a", 64))
    ]
    entry = {"path": str(write_jsonl(tmp_path / "a.jsonl", rows)), "repeats": 1}
    with pytest.raises(FsdpTuneError, match="`stars` is not read by the format text") as caught:
        rows_of_lanes(stream_of(tmp_path, entry, shuffle_buffer_size=16))
    assert "--set 'data.ignore_columns=[stars]'" in (caught.value.problems[0].hint or "")
    assert (
        len(rows_of_lanes(stream_of(tmp_path, entry, shuffle_buffer_size=16, ignore_columns=["stars"]))) == 64
    )
    skipped = rows_of_lanes(stream_of(tmp_path, entry, shuffle_buffer_size=16, on_bad_row="skip"))
    assert (len(skipped), [bad.unread for row in skipped for _, bad in row.bad]) == (63, [("stars",)])


def test_lanes_without_rows_give_empty_ones(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts("a", 3))
    stream = stream_of(tmp_path, {"path": str(tmp_path / "a.jsonl"), "repeats": 1}, lanes=8)
    rows = rows_of_run(stream, 24)
    assert sorted(read(row) for row in rows if row.lengths) == [row["text"] for row in texts("a", 3)]
    assert [row.row_id for row in rows] == list(range(24))
    again = list(islice(Lane(stream, 5, LaneState.from_list(rows[13].after.as_list())), 3))
    assert [(row.row_id, row.lengths) for row in again] == [(21, ()), (29, ()), (37, ())]


def test_lane_whose_stage_has_ended_goes_on_with_the_next(tmp_path: Path) -> None:
    """The first source has rows for 12 of the 20 steps, and lanes wait with empty rows for the second one."""
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", texts(name, 100))
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0, "repeats": 1} for name in "ab"]
    stream = stream_of(
        tmp_path, *entries, curriculum=[{"until_step": 20, "weights": [1.0, 0.0]}], shuffle_buffer_size=64
    )
    rows = rows_of_run(stream, 400)
    assert Counter(read(row) for row in rows if row.lengths) == {
        row["text"]: 1 for name in "ab" for row in texts(name, 100)
    }
    assert {row.sources for row in rows[: 20 * 8]} == {(0,), ()}
    at = next(number for number, row in enumerate(rows) if number >= 18 * 8 and not row.lengths)
    resumed = islice(iter(Lane(stream, at % stream.lanes, rows[at].after)), 20)
    assert [row.origins for row in resumed] == [
        row.origins for row in rows[at + stream.lanes :: stream.lanes][:20]
    ]


@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_source_with_fewer_rows_than_lanes_has_its_share(tmp_path: Path, shuffle: bool) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts("a", 5))
    write_jsonl(tmp_path / "b.jsonl", texts("b", 2000))
    entries = ({"path": str(tmp_path / f"{name}.jsonl"), "weight": 0.5} for name in "ab")
    stream = stream_of(tmp_path, *entries, lanes=16, shuffle=shuffle, shuffle_buffer_size=160)
    counts = Counter(read(row)[:6] for row in rows_of_run(stream, 800) if read(row)[0] == "a")
    assert counts.total() == pytest.approx(400, rel=0.1)
    assert min(counts.values()) > 0.9 * max(counts.values())
    for number in range(stream.lanes):
        rows = list(islice(iter(Lane(stream, number, stream.first_state())), 40))
        resumed = islice(iter(Lane(stream, number, rows[19].after)), 20)
        assert [read(row) for row in resumed] == [read(row) for row in rows[20:]]


def test_lane_that_took_a_source_for_empty_keeps_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_tune.data.stream.lanes.EMPTY_PASSES", 0)
    write_jsonl(tmp_path / "a.jsonl", texts("a", 4))
    write_jsonl(tmp_path / "b.jsonl", texts("b", 200))
    entries = ({"path": str(tmp_path / f"{name}.jsonl"), "weight": 0.5} for name in "ab")
    stream = stream_of(tmp_path, *entries, lanes=8, shuffle_buffer_size=80)
    for number in range(stream.lanes):
        rows = list(islice(iter(Lane(stream, number, stream.first_state())), 40))
        resumed = islice(iter(Lane(stream, number, rows[19].after)), 20)
        assert [read(row) for row in resumed] == [read(row) for row in rows[20:]]


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rows_without_targets_do_not_turn_for_ever(tmp_path: Path, packing: bool) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}] * 40)
    with pytest.raises(FsdpTuneError, match="has a token to train"):
        rows_of_run(stream_of(tmp_path, tmp_path / "a.jsonl", packing=packing, max_length=16), 1)


@pytest.mark.parametrize(
    ("weight_by", "packing"),
    [
        ("tokens", True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("tokens", False), ("rows", True))),
    ],
)
def test_sources_of_empty_rows_end_the_run(tmp_path: Path, weight_by: str, packing: bool) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"text": ""}] * 400)
    stream = stream_of(
        tmp_path, tmp_path / "a.jsonl", packing=packing, max_length=64, mixture={"weight_by": weight_by}
    )
    with pytest.raises(FsdpTuneError, match="rows that were read in turn has a token to train"):
        rows_of_run(stream, 1)


def test_windows_without_targets_are_passed_over(tmp_path: Path) -> None:
    """Each lane has windows of one chunk, and the bad row is in one without rows to train."""
    rows = [*['{"text": ""}'] * 40, "{broken", *(json.dumps(row) for row in texts("a", 40))]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    entry = {"path": str(tmp_path / "a.jsonl"), "repeats": 1}
    stream = stream_of(tmp_path, entry, lanes=1, shuffle=False, shuffle_buffer_size=8, on_bad_row="skip")
    found = list(islice(Lane(stream, 0, stream.first_state()), 40))
    assert [read(row) for row in found] == [row["text"] for row in texts("a", 40)]
    assert len([bad for row in found for bad in row.bad]) == 1
    again = list(islice(Lane(stream, 0, LaneState.from_list(found[7].after.as_list())), 32))
    assert [row.row_id for row in again] == [row.row_id for row in found[8:]]


def test_bad_rows_above_their_share_end_a_window_that_does_not_fill(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + "{broken\n" * 400)
    stream = stream_of(
        tmp_path, tmp_path / "a.jsonl", lanes=1, packing=True, max_length=4096, on_bad_row="skip"
    )
    with pytest.raises(FsdpTuneError, match=r"rows \(100 %\) cannot be used, more than"):
        rows_of_run(stream, 1)


def test_rows_of_evaluation_sets_are_counted_in_all_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts("a", 1500))
    write_jsonl(tmp_path / "eval.jsonl", [*texts("a", 1500)[1100:1120], {"text": "other"}])
    evals = [{"path": str(tmp_path / "eval.jsonl"), "label": "held"}]
    data = prepared(tmp_path, tmp_path / "a.jsonl", streaming=True, stream_lanes=4, eval=evals)
    stream = replace(stream_of(tmp_path, tmp_path / "a.jsonl"), evaluated=evaluation_hashes(data.train))
    assert len(stream.evaluated) == 21
    last = {
        row.row_id % 4: row.after.rows_evaluated
        for row in rows_of_run(replace(stream, window_rows=375), 3000)
    }
    assert sum(last.values()) == pytest.approx(40, abs=20)
    assert sum(last.values()) >= 20
    alone = prepared(tmp_path, tmp_path / "a.jsonl", streaming=True, stream_lanes=4)
    assert len(evaluation_hashes(alone.train)) == 0


def test_truncated_rows_are_counted_through_a_resume(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "a.jsonl", [{"text": "x" * (40 if number % 3 == 0 else 5)} for number in range(60)]
    )
    entry = {"path": str(tmp_path / "a.jsonl"), "repeats": 1}
    stream = stream_of(
        tmp_path, entry, lanes=1, shuffle=False, shuffle_buffer_size=16, max_length=16, overlong="truncate"
    )
    found = list(islice(Lane(stream, 0, stream.first_state()), 60))
    assert max(len(row.input_ids) for row in found) == 16
    assert found[-1].after.rows_truncated == 20
    assert sorted({row.after.rows_truncated for row in found}) != [0, 20], "counted window by window"
    resumed = list(islice(Lane(stream, 0, LaneState.from_list(found[30].after.as_list())), 29))
    assert resumed[-1].after.rows_truncated == 20


def test_packed_rows_of_several_sources_follow_their_shares_all_the_way(tmp_path: Path) -> None:
    """Not only over a window, whose rows are shuffled."""
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", texts(name, 300, 20))
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0} for name in "ab"]
    for weight_by in ("tokens", "rows"):
        stream = stream_of(
            *(tmp_path, *entries),
            lanes=1,
            packing=True,
            max_length=24,
            shuffle_buffer_size=200,
            mixture={"weight_by": weight_by},
        )
        rows = list(islice(Lane(stream, 0, stream.first_state()), 200))
        assert [read(row) for row in rows] != sorted(read(row) for row in rows)
        for at in range(0, 200, 4):
            assert share_of_first(rows[at : at + 4]) == pytest.approx(0.5, abs=0.26), (weight_by, at)
        state = LaneState.from_list(rows[70].after.as_list())
        again = list(islice(Lane(stream, 0, state), 100))
        assert [read(row) for row in again] == [read(row) for row in rows[71:171]]


def test_packed_rows_keep_the_order_of_the_file_without_shuffling(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", texts("a", 60, 10))
    entry = {"path": str(tmp_path / "a.jsonl"), "repeats": 1}
    stream = stream_of(
        tmp_path, entry, lanes=1, shuffle=False, packing=True, packing_strategy="wrapped", max_length=22
    )
    text = "".join(read(row) for row in rows_of_lanes(stream))
    assert text == "".join(row["text"] for row in texts("a", 60, 10))


def uncounted(stream: RowStream) -> RowStream:
    """Return a stream that knows the rows of none of its files, such as files of the hub."""
    return replace(stream, sources=tuple(replace(source, rows=None) for source in stream.sources))


@pytest.mark.parametrize("shuffle", [True, False])
def test_files_of_unknown_length_are_read_by_one_lane_each_and_by_another_in_the_next_pass(
    tmp_path: Path, shuffle: bool
) -> None:
    for name in "abc":
        write_jsonl(tmp_path / f"{name}.jsonl", texts(name, 7))
    entry = {"path": str(tmp_path / "*.jsonl"), "repeats": 2}
    stream = uncounted(stream_of(tmp_path, entry, lanes=2, shuffle=shuffle, shuffle_buffer_size=8))
    lanes = [
        list(takewhile(lambda row: row.lengths, Lane(stream, number, stream.first_state())))
        for number in range(2)
    ]
    every = [row["text"] for name in "abc" for row in texts(name, 7)]
    assert sorted(read(row) for rows in lanes for row in rows) == sorted(every * 2)
    for number, rows in enumerate(lanes):
        if not shuffle:  # else each pass deals the files anew
            assert sorted(map(read, rows)) == sorted(every)
        for at in (0, 5, 11, len(rows) - 2):
            state = LaneState.from_list(rows[at].after.as_list())
            again = islice(Lane(stream, number, state), len(rows) - at - 1)
            assert [read(row) for row in again] == [read(row) for row in rows[at + 1 :]], at


def test_source_without_rows_leaves_its_share_to_the_others(tmp_path: Path) -> None:
    for name in "ab":
        write_jsonl(tmp_path / f"{name}.jsonl", texts(name, 20))
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 1.0, "repeats": 1} for name in "ab"]
    stream = stream_of(tmp_path, *entries, shuffle_buffer_size=8)
    empty, other = stream.sources
    stream = replace(stream, sources=(replace(empty, rows=0, repeats=None), other))
    lanes = [Lane(stream, number, stream.first_state()) for number in range(stream.lanes)]
    assert all(lane._readers[0].has_ended for lane in lanes), "not after passes without a row"
    found = rows_of_lanes(stream)
    assert sorted(read(row) for row in found) == [row["text"] for row in texts("b", 20)]


def test_row_with_the_old_and_the_new_name_of_a_column_is_a_bad_row_of_its_line(tmp_path: Path) -> None:
    rows = [{"body": f"row {number}"} | ({"text": "other"} if number == 40 else {}) for number in range(80)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    entry = {"path": str(path), "repeats": 1, "rename_columns": {"body": "text"}}
    with pytest.raises(FsdpTuneError, match="`text`") as caught:
        rows_of_lanes(stream_of(tmp_path, entry, shuffle_buffer_size=16))
    assert caught.value.problems[0].where.line == 41
    skipping = rows_of_lanes(stream_of(tmp_path, entry, shuffle_buffer_size=16, on_bad_row="skip"))
    [(name, _)] = [each for row in skipping for each in row.bad]
    assert (len(skipping), str(path) in name) == (79, True)
