"""Rows that a run leaves out: which file names them, what remains of the rows and of their order."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_tune.core.errors import FsdpTuneError, Where
from fsdp_tune.data.batches import epoch_order
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.read.row_files import BadRow
from fsdp_tune.data.read.sources import find_source
from fsdp_tune.data.row_order import Attempt, RowOrder
from fsdp_tune.data.skipped_rows import NamedRow, SkippedRow, read_named_rows
from fsdp_tune.data.store import Row, RowStore
from fsdp_tune.data.stream.units import stream_units
from tests.data.streams import read, rows_of_run, stream_of
from tests.data.support import prepared, recipe_for, write_jsonl
from tests.data.test_row_stream import server  # noqa: F401  a fixture

GLOBAL_BATCH = 4


def order_of(lengths: Sequence[int], *removed: tuple[int, list[int]]) -> RowOrder:
    def order(epoch: int, of: np.ndarray, size: int) -> np.ndarray:
        return epoch_order(
            of, seed=3, epoch=epoch, shuffle=True, group_by_length=True, global_batch_size=size
        )

    of_steps = [(step, np.array(rows, np.int64)) for step, rows in removed]
    return RowOrder(order, np.array(lengths, np.int64), [Attempt(0, GLOBAL_BATCH)], of_steps)


@given(count=st.integers(6, 40), gone=st.sets(st.integers(0, 39), max_size=4), epoch=st.integers(0, 2))
def test_rows_removed_from_the_start_leave_the_order_of_a_file_without_them(
    count: int, gone: set[int], epoch: int
) -> None:
    kept = [row for row in range(count) if row not in gone]
    lengths = [1 + row * 7 % 11 for row in range(count)]
    order = order_of(lengths, (0, [row for row in gone if row < count]))
    alone = order_of([lengths[row] for row in kept])
    assert order.rows_of(epoch).tolist() == [kept[row] for row in alone.rows_of(epoch)]
    assert (order.steps(epoch), order.total_steps(2.5)) == (alone.steps(epoch), alone.total_steps(2.5))


@given(
    count=st.integers(6, 40),
    step=st.integers(1, 25),
    gone=st.sets(st.integers(0, 39), max_size=5),
    more=st.integers(0, 9),
)
def test_rows_removed_later_leave_the_past_and_close_up(
    count: int, step: int, gone: set[int], more: int
) -> None:
    removed = [row for row in gone if row < count][: count - 1]
    before, order = order_of([1] * count), order_of([1] * count, (step, removed))
    epoch, index = before.locate(step)
    assert order.locate(step) == (epoch, index)
    for earlier in range(step):
        assert order.batch_after(earlier).tolist() == before.batch_after(earlier).tolist(), (
            "trained steps stay"
        )
    done, rest = np.split(before.rows_of(epoch), [index * GLOBAL_BATCH])
    assert (
        order.rows_of(epoch).tolist() == [*done, *(row for row in rest if index == 0 or row not in removed)]
        or index == 0
    )
    assert set(order.rows_of(epoch)[index * GLOBAL_BATCH :]) == set(rest) - set(removed)
    assert sorted(order.rows_of(epoch + 1)) == [row for row in range(count) if row not in removed]
    later = [
        row
        for at in range(order.first_step(epoch + 1), order.first_step(epoch + 2))
        for row in order.batch_after(at)
    ]
    assert later == order.rows_of(epoch + 1).tolist(), "each row once, none of them empty"
    again = order_of([1] * count, (step, removed), (step + more, []))
    assert again.rows_of(epoch + 1).tolist() == order.rows_of(epoch + 1).tolist()


@given(rows=st.integers(1, 400), hundredths=st.integers(1, 999))
def test_part_of_an_epoch_has_the_steps_that_the_trainer_and_the_plan_count(
    rows: int, hundredths: int
) -> None:
    """`Trainer.set_initial_training_values` multiplies and rounds up; 1.1 epochs of 10 steps are 11."""
    epochs = hundredths / 100
    assert order_of([1] * rows).total_steps(epochs) == math.ceil(epochs * math.ceil(rows / GLOBAL_BATCH))


def test_a_step_of_which_all_rows_are_skipped_is_left_out() -> None:
    order = order_of([1] * 12)
    bad = order.batch_after(1).tolist()
    skipped = order_of([1] * 12, (1, bad))
    assert [skipped.batch_after(step).tolist() for step in (0, 1)] == [
        order.batch_after(step).tolist() for step in (0, 2)
    ]
    assert (skipped.steps(0), skipped.steps(1), skipped.total_steps(2)) == (2, 2, 4)


def test_file_takes_places_and_objects_and_reports_every_other_line(tmp_path: Path) -> None:
    file = tmp_path / "skip"
    file.write_text('a.jsonl:3\n\n{"file": "b c.jsonl", "row": 7, "tokens": 9}\nC:\\x.jsonl:2\n')
    assert [(each.file, each.row, each.where.line) for each in read_named_rows(file)] == [
        ("a.jsonl", 3, 1),
        ("b c.jsonl", 7, 3),
        ("C:\\x.jsonl", 2, 4),
    ]
    file.write_text(
        'a.jsonl\na.jsonl:0\n{"file": "a"}\n{"file": "a", "row": true}\n[1]\na.jsonl:5\n{"file": '
        '["a"], "row": 1}\n'
    )
    with pytest.raises(FsdpTuneError) as raised:
        read_named_rows(file)
    assert [problem.where.line for problem in raised.value.problems] == [1, 2, 3, 4, 5, 7]
    assert all(problem.code == "skip-rows-line" for problem in raised.value.problems)
    file.write_text(
        f"a.jsonl:{2**40}\na.jsonl:{'9' * 5000}\n" + json.dumps({"file": "a.jsonl", "row": 2**63}) + "\n"
    )
    with pytest.raises(FsdpTuneError) as raised:
        read_named_rows(file)
    assert [problem.where.line for problem in raised.value.problems] == [1, 2, 3], (
        "no number of a row is so large"
    )
    file.write_text("\n")
    with pytest.raises(FsdpTuneError, match="names no row"):
        read_named_rows(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(FsdpTuneError, match="cannot be read"):
        read_named_rows(file)
    with pytest.raises(FsdpTuneError, match="cannot be read"):
        read_named_rows(tmp_path / "none")


def named(*places: tuple[str, int]) -> list[NamedRow]:
    return [NamedRow(file, row, Where("skip", line)) for line, (file, row) in enumerate(places, 1)]


TEXTS = [{"text": chr(97 + number) * (3 + number % 4)} for number in range(20)]


def without(
    found: Prepared, folder: Path, *rows: int, earlier: Sequence[SkippedRow] = (), step: int = 0
) -> Prepared:
    recipe = recipe_for(folder, folder / "a.jsonl").model_copy(update={})
    return found.without(recipe, named(*(("a.jsonl", row) for row in rows)), earlier, step)


def content(store: RowStore, rows: Sequence[int]) -> list[list[int]]:
    return [store[row].input_ids.tolist() for row in rows]


def test_rows_of_a_store_without_skipped_ones_are_those_of_a_file_without_them(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    skipped = without(found, tmp_path, 5, 18)
    recipe = recipe_for(tmp_path, tmp_path / "a.jsonl")
    fewer = prepared(
        tmp_path,
        write_jsonl(tmp_path / "b.jsonl", [row for at, row in enumerate(TEXTS, 1) if at not in (5, 18)]),
    )
    stores = skipped.training_store(), RowStore(fewer.train)
    orders = [
        each.order(recipe, store).rows_of(1).tolist()
        for each, store in zip((skipped, fewer), stores, strict=True)
    ]
    assert content(stores[0], orders[0]) == content(stores[1], orders[1])
    assert (skipped.key, skipped.train) == (found.key, found.train), "nothing is prepared again"


def test_packed_rows_lose_the_skipped_example_alone(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), packing=True)
    store, skipped = RowStore(found.train), without(found, tmp_path, 5).training_store()
    assert len(store) > 1
    for row in range(len(store)):
        kept = [at for at, (_, line) in enumerate(store.origins(row)) if line != 5]
        assert skipped.origins(row) == [store.origins(row)[at] for at in kept]
        assert skipped[row].lengths == tuple(store[row].lengths[at] for at in kept)
        assert len(skipped.files_of([row])[1]) == len(skipped.are_complete(row)) == len(kept)
    assert sum(len(skipped[row].lengths) for row in range(len(store))) == len(TEXTS) - 1
    assert np.array_equal(skipped.lengths, store.lengths)
    copy: RowStore = pickle.loads(pickle.dumps(skipped))
    assert [copy.origins(row) for row in range(len(copy))] == [
        skipped.origins(row) for row in range(len(copy))
    ]


def test_packed_row_is_left_out_when_its_last_example_is(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), packing=True)
    store, recipe = RowStore(found.train), recipe_for(tmp_path, tmp_path / "a.jsonl")
    first, *others = [line for _, line in store.origins(0)]
    half = without(found, tmp_path, first)
    assert sorted(half.order(recipe, store).rows_of(0)) == list(range(len(store)))
    empty = without(found, tmp_path, *others, earlier=half.skipped, step=30)
    order = empty.order(recipe, store)
    assert (order.batch_after(0).tolist(), 0 in order.rows_of(order.locate(30)[0] + 1)) == (
        half.order(recipe, store).batch_after(0).tolist(),
        False,
    )


def test_run_keeps_what_it_skips_and_adds_to_it(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    first = without(found, tmp_path, 3)
    file = str(tmp_path / "a.jsonl")
    assert first.skipped == (SkippedRow(file, 3, 0),)
    again = without(found, tmp_path, 3, 4, earlier=first.skipped, step=6)
    assert again.skipped == (SkippedRow(file, 3, 0), SkippedRow(file, 4, 6))
    assert without(found, tmp_path, earlier=again.skipped, step=9).skipped == again.skipped
    assert without(found, tmp_path, earlier=again.skipped, step=2).skipped[1].step == 2, (
        "from an earlier checkpoint on"
    )
    again.write(tmp_path / "data.json")
    assert Prepared.read(tmp_path / "data.json") == again


def test_rows_that_a_run_skips_are_found_in_moved_files_or_refused(tmp_path: Path) -> None:
    first = without(prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS)), tmp_path, 3)
    (tmp_path / "moved").mkdir()
    found = prepared(tmp_path / "moved", write_jsonl(tmp_path / "moved" / "a.jsonl", TEXTS))
    again = without(found, tmp_path / "moved", earlier=first.skipped, step=9)
    assert again.skipped == (SkippedRow(str(tmp_path / "moved" / "a.jsonl"), 3, 0),)
    assert again.training_store().files_of is not None
    (tmp_path / "renamed").mkdir()
    other = prepared(tmp_path / "renamed", write_jsonl(tmp_path / "renamed" / "b.jsonl", TEXTS))
    with pytest.raises(FsdpTuneError, match="the training data have no such row"):
        without(other, tmp_path / "renamed", earlier=first.skipped, step=9)


def test_rows_of_renamed_files_are_skipped_by_their_new_names(tmp_path: Path) -> None:
    """Their data are in the cache by the old names. A row that was skipped before has one of these."""
    old, new = tmp_path / "old.jsonl", tmp_path / "a.jsonl"
    first = prepared(tmp_path, write_jsonl(old, TEXTS)).without(
        recipe_for(tmp_path, old), named(("old.jsonl", 3)), (), 0
    )
    old.rename(new)
    found = prepared(tmp_path, new)
    again = without(found, tmp_path, 5, earlier=first.skipped, step=6)
    assert again.skipped == (SkippedRow(str(new), 3, 0), SkippedRow(str(new), 5, 6))
    copy: RowStore = pickle.loads(pickle.dumps(again.training_store()))
    assert [len(copy[row].input_ids) == 0 for row in range(6)] == [row in (2, 4) for row in range(6)]
    with pytest.raises(FsdpTuneError, match=r"is not a file of the training data"):
        found.without(recipe_for(tmp_path, new), named(("old.jsonl", 4)), (), 0)


def test_row_of_a_file_whose_name_another_has_now_is_refused(tmp_path: Path) -> None:
    one, other = write_jsonl(tmp_path / "a.jsonl", TEXTS), write_jsonl(tmp_path / "b.jsonl", TEXTS[:9])
    first = without(prepared(tmp_path, one, other), tmp_path, 3)
    for path, name in ((one, "c"), (other, "a.jsonl"), (tmp_path / "c", "b.jsonl")):
        path.rename(tmp_path / name)
    swapped = prepared(tmp_path, other, one)
    assert swapped.key == first.key
    with pytest.raises(FsdpTuneError, match="the training data have no such row"):
        without(swapped, tmp_path, earlier=first.skipped, step=9)


def test_start_before_the_step_of_a_skipped_row_leaves_it_out_from_there(tmp_path: Path) -> None:
    """Such as a restart without a checkpoint. Its rows are empty, and an order that still has them would end
    an epoch early."""
    recipe = recipe_for(tmp_path, tmp_path / "a.jsonl")
    found = without(prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS)), tmp_path, 5, step=50)
    store = found.training_store()
    assert not len(store[4].input_ids)
    assert 4 in found.order(recipe, store).rows_of(0)
    assert 4 not in found.continued(GLOBAL_BATCH, 0).order(recipe, store).rows_of(0)
    assert found.continued(GLOBAL_BATCH, 70).skipped == found.skipped


def test_names_that_are_no_training_rows_are_errors_with_their_line(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), eval={"rows": 5})
    held = RowStore(next(iter(found.evals.values()))).origins(0)[0][1]
    recipe = recipe_for(tmp_path, tmp_path / "a.jsonl")
    with pytest.raises(FsdpTuneError) as raised:
        found.without(
            recipe,
            named(
                ("a.jsonl", 21),
                ("c.jsonl", 1),
                (str(tmp_path / "a.jsonl"), held),
                ("a.jsonl", 1 if held > 1 else 2),
            ),
            (),
            0,
        )
    problems = [problem for problem in raised.value.problems if problem.code == "skip-rows-unknown"]
    assert [problem.where.line for problem in problems][:3] == [1, 2, 3]


def test_too_few_remaining_rows_are_an_error(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS[:3]))
    with pytest.raises(FsdpTuneError, match="0 rows remain"):
        without(found, tmp_path, 1, 2, 3)


def tokens_of(row: Row) -> int:
    return len(row.input_ids)


@pytest.mark.parametrize("packing", [True, False])
def test_stream_keeps_the_places_of_skipped_rows(tmp_path: Path, packing: bool) -> None:
    texts = [{"text": f"{number}" * (1 + number % 5)} for number in range(60)]
    stream = stream_of(
        tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), packing=packing, shuffle_buffer_size=20
    )
    before = rows_of_run(stream, 24)
    places = [
        (name, int(row)) for origin in before[5].origins[:2] for name, _, row in [origin.rpartition(":")]
    ]
    after = rows_of_run(replace(stream, skipped=frozenset(places)), 24)
    gone = {f"{name}:{row}" for name, row in places}
    for old, new in zip(before, after, strict=True):
        assert (new.row_id, new.after) == (old.row_id, old.after)
        assert new.origins == tuple(origin for origin in old.origins if origin not in gone)
        assert new.is_skipped == (bool(old.origins) and not new.origins)
        if not gone & set(old.origins):
            assert read(new) == read(old)
    assert tokens_of(after[5]) < tokens_of(before[5])


def test_names_in_streams_are_checked_by_their_counts(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    recipe = recipe_for(tmp_path, file, streaming=True, stream_lanes=2)
    found = prepared(tmp_path, file)
    stream = replace(
        found,
        report=found.report.model_copy(update={"stream_sample_rows": 9}),
        stamps={str(file): "1"},
        unit_rows={str(file): 20},
    )
    assert stream.without(recipe, named(("a.jsonl", 20)), (), 4).skipped == (SkippedRow(str(file), 20, 4),)
    with pytest.raises(FsdpTuneError, match="is not a training row"):
        stream.without(recipe, named(("a.jsonl", 21)), (), 4)


@pytest.mark.parametrize(
    ("file", "parts"), [("rows.jsonl", 1), ("rows.jsonl", 3), ("rows.parquet", 1), ("rows.jsonl.gz", 3)]
)
def test_rows_of_files_at_urls_can_be_named_and_are_counted(
    tmp_path: Path,
    server: str,  # noqa: F811
    file: str,
    parts: int,
) -> None:
    """A spike names rows as the stream numbers them: in the parts of a file of lines, and else in the
    file."""
    url = f"{server}/{file}?token=1"
    recipe = recipe_for(tmp_path, {"path": url}, streaming=True, stream_lanes=parts)
    units = stream_units(find_source(recipe.data.train[0], "data.train[0]", streaming=True), parts)
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    stream = replace(
        found,
        report=found.report.model_copy(update={"stream_sample_rows": 9}),
        stamps={url: "1"},
        unit_rows={},
    )
    ends: dict[str, int] = {}
    for unit in units:
        numbers = [row.number if isinstance(row, BadRow) else row[0] for row in unit.read()]
        ends[unit.name] = max([*numbers, ends.get(unit.name, 0)])
    assert (len(ends) > 1) == (file == "rows.jsonl")
    assert stream.without(recipe, named(*ends.items()), (), 4).skipped == tuple(
        SkippedRow(*end, 4) for end in sorted(ends.items())
    )
    for name, last in ends.items():
        with pytest.raises(FsdpTuneError, match="is not a training row"):
            stream.without(recipe, named((name, last + 1)), (), 4)
    with pytest.raises(FsdpTuneError, match="is not a file of the training data"):
        stream.without(recipe, named((f"{url} (part 99 of 99)", 1)), (), 4)


def test_json_line_of_a_spike_names_its_row(tmp_path: Path) -> None:
    line = {
        "file": "a.jsonl",
        "row": 4,
        "tokens": 9,
        "step": 1,
        "rank": 0,
        "micro_batch": 1,
        "sequence": 3,
        "loss": None,
    }
    (tmp_path / "skip").write_text(json.dumps(line))
    assert [(each.file, each.row) for each in read_named_rows(tmp_path / "skip")] == [("a.jsonl", 4)]
