"""The rows of a stream do not depend on the number of ranks or loader processes, nor on where a run was
stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.stream.lanes import Lane, StreamRow
from fsdp_tune.data.stream.row_stream import RowStream
from fsdp_tune.worker.rows.batches import Collator
from fsdp_tune.worker.rows.streamed_rows import NO_ROW, StreamedRows
from fsdp_tune.worker.step_observer import LoggedStep
from fsdp_tune.worker.stop_request import end_loader_processes
from tests.data.support import write_jsonl
from tests.data.test_lanes import stream_of

STEPS = 6
Step = list[tuple[int, str]]
"""(row, place) of every row that the ranks read in a step, sorted."""


@pytest.fixture(autouse=True)
def ended_loader_processes() -> Iterator[None]:
    """Loader processes ignore SIGTERM, and the interpreter would wait for those of an unfinished iterator for
    ever."""
    yield
    end_loader_processes()


@pytest.fixture
def stream(tmp_path: Path) -> RowStream:
    rows = [{"text": "x" * (1 + number * 7 % 50) + str(number)} for number in range(500)]
    return stream_of(
        tmp_path, write_jsonl(tmp_path / "a.jsonl", rows), packing=True, lanes=8, shuffle_buffer_size=80
    )


def ranks_of(stream: RowStream, ranks: int, folder: Path) -> list[StreamedRows]:
    per_rank = stream.global_batch // ranks
    micro_batch = 2 if per_rank % 2 == 0 else 1
    return [
        StreamedRows(
            stream,
            None,
            Collator(0, 8),
            rank,
            ranks,
            micro_batch,
            per_rank // micro_batch,
            STEPS,
            folder / f"bad-{rank}",
        )  # type: ignore[arg-type]
        for rank in range(ranks)
    ]


def steps_of(ranks: list[StreamedRows], workers: int, count: int) -> list[Step]:
    batches = [
        list(
            islice(
                iter(rank.batches(workers=workers, pin_memory=False, prefetch=None)),
                count * rank.accumulation,
            )
        )
        for rank in ranks
    ]
    steps: list[Step] = []
    for step in range(count):
        rows = [
            row
            for rank, given in zip(ranks, batches, strict=True)
            for batch in given[step * rank.accumulation : (step + 1) * rank.accumulation]
            for row in zip(batch.row_ids, batch.origins, strict=True)
        ]
        steps.append(sorted(rows))
    return steps


def states_of(ranks: list[StreamedRows]) -> dict[str, object]:
    every = [({lane: state.as_list() for lane, state in rank.states.items()}, rank.tokens) for rank in ranks]
    with patch("fsdp_tune.worker.rows.streamed_rows.gather", lambda _: every):
        return ranks[0].state()


@pytest.mark.parametrize(
    ("ranks", "workers"),
    [
        (2, 0),
        (2, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 0), (4, 0), (1, 3), (2, 1), (4, 3)]),
    ],
)
def test_steps_are_the_same_on_any_number_of_ranks_and_workers(
    stream: RowStream, ranks: int, workers: int, tmp_path: Path
) -> None:
    expected = steps_of(ranks_of(stream, 1, tmp_path), 0, STEPS)
    every = ranks_of(stream, ranks, tmp_path)
    assert steps_of(every, workers, STEPS) == expected
    for step, rows in enumerate(expected):
        assert [row for row, _ in rows] == every[0].rows_of_all_ranks(step)


@pytest.mark.parametrize(
    ("before", "workers_before", "after", "workers_after"),
    [
        (2, 2, 4, 0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(4, 3, 2, 0), (1, 0, 4, 0), (4, 0, 1, 3), (2, 1, 4, 0)]
        ),
    ],
)
def test_run_goes_on_with_the_next_rows(
    stream: RowStream, before: int, workers_before: int, after: int, workers_after: int, tmp_path: Path
) -> None:
    expected = steps_of(ranks_of(stream, 1, tmp_path), 0, STEPS)
    stopped = ranks_of(stream, before, tmp_path)
    assert steps_of(stopped, workers_before, 2) == expected[:2]
    resumed = ranks_of(stream, after, tmp_path)
    for rank in resumed:
        rank.restore(states_of(stopped), 2)
    assert steps_of(resumed, workers_after, STEPS - 2) == expected[2:]
    straight = ranks_of(stream, 1, tmp_path)
    steps_of(straight, 0, STEPS)
    assert [sum(counts) for counts in zip(*(rank.tokens for rank in resumed), strict=True)] == straight[
        0
    ].tokens


OLDER = {"lanes": {lane: [[[0, 0, 3]], [0.0], 0, 0, 3, 0, 0, 0] for lane in range(8)}, "tokens": [9]}


@pytest.mark.parametrize("older", [OLDER, None, [9]], ids=["older version", "no state", "prepared rows"])
def test_checkpoint_of_another_order_is_refused(stream: RowStream, older: object, tmp_path: Path) -> None:
    rank = ranks_of(stream, 1, tmp_path)[0]
    with pytest.raises(FsdpTuneError, match="read streams in another order") as caught:
        rank.restore(older, 2)
    assert "--overwrite" in (caught.value.problems[0].hint or "")


@pytest.mark.parametrize("ranks", [1, 8])
def test_resume_with_another_global_batch_reads_each_row_once(
    stream: RowStream, ranks: int, tmp_path: Path
) -> None:
    expected = [row for step in steps_of(ranks_of(stream, 1, tmp_path), 0, 7) for row in step]
    stopped = ranks_of(replace(stream, global_batch=4), 1, tmp_path)
    assert [row for step in steps_of(stopped, 0, 3) for row in step] == expected[:12]
    resumed = ranks_of(stream, ranks, tmp_path)
    for rank in resumed:
        rank.restore(states_of(stopped), 3)
    steps = steps_of(resumed, 0, 4)
    assert [row for step in steps for row in step] == expected[12:44]
    assert [row for row, _ in steps[1]] == resumed[0].rows_of_all_ranks(4)


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_a_loader_process_keeps_its_place(tmp_path: Path, workers: int) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "{number}"}}\n' for number in range(60)) + "{broken\n"
    )
    rows = ranks_of(stream_of(tmp_path, tmp_path / "a.jsonl", lanes=2, shuffle_buffer_size=8), 1, tmp_path)[0]
    with pytest.raises(FsdpTuneError) as caught:
        list(iter(rows.batches(workers=workers, pin_memory=False, prefetch=None)))
    assert caught.value.problems[0].where.line == 61


def facts_of(ranks: list[StreamedRows]) -> dict[str, int]:
    """Return the metrics that `ranks` gather."""
    own: list[object] = []
    with patch("fsdp_tune.worker.rows.streamed_rows.gather", lambda value: own.append(value) or [value]):
        for rank in ranks:
            rank.facts(LoggedStep(1))
    with patch("fsdp_tune.worker.rows.streamed_rows.gather", lambda _: own):
        return ranks[0].facts(LoggedStep(1))


def test_ranks_that_share_rows_count_them_once(tmp_path: Path) -> None:
    rows = [{"text": "x" * (1 + number * 7 % 50) + str(number)} for number in range(500)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    stream = stream_of(tmp_path, source, lanes=8, shuffle_buffer_size=8, max_length=24, overlong="truncate")
    alone, first = ranks_of(stream, 1, tmp_path)[0], ranks_of(stream, 1, tmp_path)[0]
    second = replace(first, counts=False)
    assert steps_of([first], 0, 40) == steps_of([second], 0, 40) == steps_of([alone], 0, 40)
    assert states_of([first, second]) == states_of([alone])
    assert facts_of([first, second]) == facts_of([alone])
    assert facts_of([alone])["rows_truncated"] > 0
    state = states_of([alone])
    for rank in (first, second):
        rank.restore(state, 40)
    assert (first.tokens, second.tokens) == (alone.tokens, [0])


def trained_ids(ranks: list[StreamedRows]) -> list[str]:
    """Return the places of all rows of `ranks`, until no lane has one left."""
    readers = [iter(rank.batches(workers=0, pin_memory=False, prefetch=None)) for rank in ranks]
    places: list[str] = []
    while True:
        batches = [
            next(reader)
            for rank, reader in zip(ranks, readers, strict=True)
            for _ in range(rank.accumulation)
        ]
        if any(batch.tokens for batch in batches):
            places += [place for batch in batches for place in batch.origins if place != NO_ROW]
            continue
        if all(len(rank.ended) == len(rank.states) for rank in ranks):
            return places


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 4))])
@pytest.mark.parametrize(
    "options",
    [{"packing": True}, {"overlong": "drop", "max_length": 40}, {"packing": True, "on_bad_row": "skip"}],
)
def test_lanes_of_different_lengths_are_read_to_their_ends(
    tmp_path: Path, ranks: int, options: dict[str, Any]
) -> None:
    """Lanes have as many rows of the files, which become different numbers of rows of the run."""
    draw = random.Random(1)
    texts = ["x" * min(60, round(draw.lognormvariate(2.5, 1))) + str(number) for number in range(600)]
    lines = [json.dumps({"text": text}) for text in texts] + (
        ["{broken"] * 20 if "on_bad_row" in options else []
    )
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    entry = {"path": str(tmp_path / "a.jsonl"), "repeats": 1}
    defaults: dict[str, Any] = {
        "lanes": 16,
        "max_length": 64,
        "shuffle_buffer_size": 64,
        "max_bad_share": 0.5,
    }
    stream = stream_of(tmp_path, entry, **(defaults | options))
    every = ranks_of(stream, ranks, tmp_path)
    trained_ids(every)
    expected = sum(len(text) + 1 for text in texts if "overlong" not in options or len(text) < 40)
    assert sum(rank.tokens[0] for rank in every) == expected
    assert sum(state.rows_read for rank in every for state in rank.states.values()) == len(lines)


@pytest.mark.parametrize(
    ("before", "after", "stop"),
    [
        (4, 1, 35),
        (1, 4, 41),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(2, 4, 20), (1, 2, 37), (2, 1, 39), (4, 2, 44)]
        ),
    ],
)
def test_run_that_is_resumed_while_lanes_end_reads_the_rest(
    tmp_path: Path, before: int, after: int, stop: int
) -> None:
    """The first of the lanes ends in step 36, and in step 44 half of them have no row left."""
    draw = random.Random(2)
    texts = ["x" * min(60, round(draw.lognormvariate(2.5, 1))) + str(number) for number in range(900)]
    entry = {"path": str(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])), "repeats": 1}
    stream = stream_of(tmp_path, entry, lanes=16, max_length=64, packing=True, shuffle_buffer_size=64)
    straight = ranks_of(stream, 1, tmp_path)
    expected = trained_ids(straight)
    assert straight[0].tokens == [sum(len(text) + 1 for text in texts)]
    stopped = ranks_of(stream, before, tmp_path)
    first = [place for step in steps_of(stopped, 0, stop) for _, place in step if place != NO_ROW]
    resumed = ranks_of(stream, after, tmp_path)
    for rank in resumed:
        rank.restore(states_of(stopped), stop)
    assert sorted(first + trained_ids(resumed)) == sorted(expected)
    assert sum(rank.tokens[0] for rank in resumed) == straight[0].tokens[0]


def test_skipped_rows_are_listed_once_also_if_steps_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "{number}"}}\n' for number in range(60)) + "{broken\n"
    )
    entry = {"path": str(tmp_path / "a.jsonl"), "repeats": 1}
    rows = ranks_of(
        stream_of(tmp_path, entry, lanes=2, shuffle_buffer_size=8, on_bad_row="skip"), 1, tmp_path
    )[0]
    assert len(trained_ids([rows])) == 60
    assert len((tmp_path / "bad-0").read_text().splitlines()) == 1
    restarted = ranks_of(rows.stream, 1, tmp_path)[0]
    restarted.restore(
        {
            "version": restarted.stream.state_version,
            "lanes": {lane: rows.stream.first_state().as_list() for lane in range(2)},
            "tokens": [0],
        },
        0,
    )
    assert len(trained_ids([restarted])) == 60
    assert len((tmp_path / "bad-0").read_text().splitlines()) == 1


@pytest.fixture
def short(tmp_path: Path) -> RowStream:
    """A stream of 60 rows that ends."""
    rows = [{"text": f"row {number}"} for number in range(60)]
    entry = {"path": str(write_jsonl(tmp_path / "a.jsonl", rows)), "repeats": 1, "label": "a"}
    return stream_of(tmp_path, entry, lanes=8, shuffle_buffer_size=8)


def gathering(*others: Any) -> Any:
    """Return what stands for `gather`: this rank's value, and what the `others` give at each call."""
    left = list(others)

    def gathered(value: object) -> list[object]:
        return [value, *(left.pop(0) if left else [])]

    return patch("fsdp_tune.worker.rows.streamed_rows.gather", gathered)


def test_stream_has_ended_when_no_rank_has_a_row_left(short: RowStream, tmp_path: Path) -> None:
    ranks = ranks_of(short, 2, tmp_path)
    trained_ids(ranks)
    own = [ranks[1]._cursors()]
    read = [(sum(each.read for each in cursors), min(each.passes for each in cursors)) for cursors in own[0]]
    with (
        gathering([True], [read]),
        pytest.raises(
            FsdpTuneError, match=r"no row left for step 9: 60 of 60 rows of `a` were read"
        ) as caught,
    ):
        ranks[0].skip_empty(8)
    problem = caught.value.problems[0]
    assert (problem.code, caught.value.exit_code) == ("stream-ended", 2)
    assert "--set training.max_steps=8" in str(problem.hint)
    with gathering([True], [[]]), pytest.raises(FsdpTuneError, match="30 of 60 rows"):
        ranks[0].skip_empty(8)  # the other shares the rows of this one


def test_step_whose_rows_are_empty_on_this_rank_alone_is_left_out(short: RowStream, tmp_path: Path) -> None:
    """Another rank still has rows, and those of the next step follow them by number."""
    ranks = ranks_of(short, 2, tmp_path)
    trained_ids(ranks)
    before = ranks[0].rows_of_all_ranks(9)
    with gathering([False]):
        ranks[0].skip_empty(8)
    assert ranks[0].rows_of_all_ranks(9) == [row + short.global_batch for row in before]


def test_epochs_are_the_complete_passes_of_the_source_with_the_fewest(tmp_path: Path) -> None:
    for name, count in (("a", 40), ("b", 400)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} {number}"} for number in range(count)])
    entries = [{"path": str(tmp_path / f"{name}.jsonl"), "weight": 0.5} for name in "ab"]
    rows = ranks_of(stream_of(tmp_path, *entries, lanes=2, shuffle_buffer_size=8), 1, tmp_path)[0]
    assert rows.epochs_after(0) == 0.0
    steps_of([rows], 0, 50)
    assert (rows.epochs_after(50), rows.order) == (0.0, None), "a was read five times, b not yet once"
    steps_of([rows], 0, 60)
    assert rows.epochs_after(110) == 1.0


def test_digest_is_of_what_decides_the_order(stream: RowStream, tmp_path: Path) -> None:
    def digest_of(changed: RowStream) -> str:
        return ranks_of(changed, 1, tmp_path)[0].digest()

    changes: dict[str, Any] = {"names": ("b.jsonl",), "lanes": 4, "seed": stream.seed + 1, "window_rows": 11}
    changes |= {"shuffle": not stream.shuffle, "shares": ((0, (0.5,)),), "global_batch": 16}
    others = [replace(stream, **{name: value}) for name, value in changes.items()]
    assert len({digest_of(each) for each in (stream, *others)}) == len(others) + 1
    assert digest_of(replace(stream, most_bad=0.5)) == ranks_of(stream, 4, tmp_path)[3].digest()


def test_batch_is_described_by_its_rows_and_examples(stream: RowStream, tmp_path: Path) -> None:
    [rows] = ranks_of(stream, 1, tmp_path)
    batches = rows.batches(workers=0, pin_memory=False, prefetch=None)
    assert len(batches) == STEPS * rows.accumulation  # type: ignore[arg-type]
    batch = next(iter(batches))
    assert rows.describe(batch) == f"rows 0 ({batch.origins[0]}), 1 ({batch.origins[1]})"
    examples = rows.examples_of(batch)
    assert [len(row) for row in examples] == [len(each) for each in batch.examples]
    assert all("a.jsonl" in name and tokens > 0 for row in examples for (name, _), tokens in row)
    assert sum(tokens for row in examples for _, tokens in row) == batch.tokens


def test_death_of_a_loader_process_names_the_step(stream: RowStream, tmp_path: Path) -> None:
    [rows] = ranks_of(stream, 1, tmp_path)
    died = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.\nmore")
    problem = rows.problem_of(died, 4)
    assert problem is not None
    assert (problem.code, "for step 5 and later, from the stream on" in problem.message) == (
        "loader-died",
        True,
    )
    assert rows.problem_of(RuntimeError("another one"), 4) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_unexpected_error_of_a_lane_names_its_row(
    stream: RowStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """In a loader process torch would pass on only the text of the traceback."""

    class Breaks(Lane):
        def __iter__(self) -> Iterator[StreamRow]:
            for row in super().__iter__():
                if row.row_id == 13:
                    raise ZeroDivisionError("no tokens")
                yield row

    monkeypatch.setattr("fsdp_tune.worker.rows.streamed_rows.Lane", Breaks)
    [rows] = ranks_of(stream, 1, tmp_path)
    with pytest.raises(
        FsdpTuneError, match="row 13 of the stream cannot be read: ZeroDivisionError: no tok"
    ) as caught:
        list(iter(rows.batches(workers=workers, pin_memory=False, prefetch=None)))
    assert (caught.value.problems[0].code, caught.value.exit_code, rows.given) == ("row-unreadable", 1, 13)


def test_rows_of_evaluation_sets_are_in_the_metrics_only_if_there_are_such_sets(
    stream: RowStream, tmp_path: Path
) -> None:
    import numpy as np

    [rows] = ranks_of(stream, 1, tmp_path)
    with gathering():
        assert "rows_also_evaluated" not in rows.facts(LoggedStep(1))
    [rows] = ranks_of(replace(stream, evaluated=np.array([1], np.uint64)), 1, tmp_path)
    state = {lane: replace(each, rows_evaluated=lane) for lane, each in rows.states.items()}
    rows.states = state
    with gathering([([0], [0], 0, 5)]):
        assert rows.facts(LoggedStep(1))["rows_also_evaluated"] == sum(range(8)) + 5
