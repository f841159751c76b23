"""The data of a run that continues: its attempts, its rows that are left out, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.row_order import Attempt
from fsdp_tune.data.row_record import ROWS_FACT, RowRecord
from fsdp_tune.data.skipped_rows import SkippedRow
from fsdp_tune.jobs.continued_data import continued_data, steps_of_run
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.data.support import prepared, recipe_for, write_jsonl
from tests.data.test_row_record import TEXTS, checkpoint, start_with, with_batch


class Noted(Observer):
    def __init__(self) -> None:
        self.codes: list[str] = []

    def notices(self, notices: Any) -> None:
        self.codes += [notice.code for notice in notices if isinstance(notice, Notice)]


class Case:
    """A run of 20 rows in batches of 4, of which step 2 has a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, RunDir(folder / "run")
        self.file = write_jsonl(folder / "a.jsonl", TEXTS)
        self.data = prepared(folder, self.file)
        self.recipe = with_batch(recipe_for(folder, self.file), 4)
        self.noted = Noted()

    def record(self, **changes: Any) -> RowRecord:
        return replace(RowRecord((Attempt(0, 4),), (), self.data.key, 42, shuffle=True), **changes)

    def stream(self, recipe: Recipe, **source: Any) -> Recipe:
        """Return the recipe of a stream of the same rows, whose data the case then has."""
        settings = {"streaming": True, "stream_lanes": 2, "curriculum": source.pop("curriculum", [])}
        self.data = prepared(self.folder, {"path": str(self.file), **source}, **settings)
        return with_batch(
            recipe_for(self.folder, {"path": str(self.file), **source}, **settings), recipe.global_batch_size
        )

    def resume(self, recipe: Recipe, **facts: Any) -> Prepared:
        start = Start(checkpoint(self.run, 2, **facts), is_new=False)
        return continued_data(recipe, start, self.data, (), self.noted, run=self.run, overwrite=False)


def test_another_global_batch_is_an_attempt_and_changes_the_number_of_steps(tmp_path: Path) -> None:
    case = Case(tmp_path)
    recipe = with_batch(case.recipe, 6)
    recipe = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"num_train_epochs": 1.0})}
    )
    found = case.resume(recipe, **{ROWS_FACT: case.record().as_dict()})
    assert found.attempts == (Attempt(0, 4), Attempt(2, 6))
    assert (steps_of_run(recipe, found), case.noted.codes) == (2 + 2, [])


def test_batch_of_a_checkpoint_without_record_is_that_of_its_recipe_or_reported(tmp_path: Path) -> None:
    case = Case(tmp_path)
    saved = start_with(case.run.path, case.recipe)
    assert case.resume(with_batch(case.recipe, 6), recipe_digest=saved).attempts == (
        Attempt(0, 4),
        Attempt(2, 6),
    )
    assert case.noted.codes == []
    assert case.resume(with_batch(case.recipe, 6)).attempts == (Attempt(0, 6),)
    assert case.noted.codes == ["batch-not-recorded"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"data_seed": 7}, "data_seed`: 7 → 42"), ({"shuffle": False}, "shuffle`: false → true")],
)
def test_checkpoint_without_its_run_is_refused_for_another_order_of_rows(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    case = Case(tmp_path)
    with pytest.raises(FsdpTuneError, match=message):
        case.resume(case.recipe, **{ROWS_FACT: case.record(**changes).as_dict()})


def test_checkpoint_without_its_run_is_refused_for_other_repeats_of_a_stream(tmp_path: Path) -> None:
    case = Case(tmp_path)
    once, recipe = case.stream(case.recipe, repeats=1), case.stream(case.recipe, repeats=2)
    recorded = case.data.record(once)
    assert RowRecord.from_dict(recorded.as_dict()) == recorded
    with pytest.raises(FsdpTuneError, match=r"`data.train\[0\].repeats`: 1 → 2 cannot change on resume"):
        case.resume(recipe, **{ROWS_FACT: recorded.as_dict()})
    # an earlier version did not record them
    case.resume(recipe, **{ROWS_FACT: replace(recorded, repeats=None).as_dict()})


def test_checkpoint_without_its_run_is_refused_for_another_global_batch_of_a_curriculum(
    tmp_path: Path,
) -> None:
    case = Case(tmp_path)
    for stages in ([], [{"until_step": 5, "weights": [1.0]}]):
        recipe = case.stream(case.recipe, curriculum=stages)
        recorded = replace(case.data.record(recipe), attempts=(Attempt(0, 4),)).as_dict()
        assert case.resume(recipe, **{ROWS_FACT: recorded}).attempts == (Attempt(0, 4),)
        larger = with_batch(recipe, 6)
        if not stages:
            assert case.resume(larger, **{ROWS_FACT: recorded}).attempts[-1] == Attempt(2, 6)
            continue
        with pytest.raises(
            FsdpTuneError, match=r"`training.global_batch_size`: 4 → 6 cannot change on resume"
        ):
            case.resume(larger, **{ROWS_FACT: recorded})


def test_checkpoint_without_its_run_is_refused_for_other_data(tmp_path: Path) -> None:
    case = Case(tmp_path)
    recorded = case.record().as_dict()
    case.data = prepared(tmp_path, write_jsonl(tmp_path / "b.jsonl", TEXTS[1:]))
    with pytest.raises(FsdpTuneError, match="the training data are not those"):
        case.resume(case.recipe, **{ROWS_FACT: recorded})


def test_rows_left_out_are_those_of_the_checkpoint_and_of_the_run(tmp_path: Path) -> None:
    """A start that left out row 4 saved nothing: it is left out from the checkpoint on, whatever step the
    run's data have."""
    case = Case(tmp_path)
    start_with(case.run.path, case.recipe)
    rows = [SkippedRow(str(case.file), 3, 0), SkippedRow(str(case.file), 4, 0)]
    replace(case.data, skipped=tuple(rows)).write(case.run.data_json)
    recorded = case.record(skipped=(SkippedRow(str(case.file), 3, 1),))
    found = case.resume(case.recipe, **{ROWS_FACT: recorded.as_dict()})
    assert {each.row: each.step for each in found.skipped} == {3: 1, 4: 2}
    old = case.resume(case.recipe)
    assert {each.row: each.step for each in old.skipped} == {3: 0, 4: 0}, (
        "an earlier version recorded the run's data only"
    )
