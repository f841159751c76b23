"""The record of which rows a run has trained: in checkpoints, and what is known of those without one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.data.preparation import Prepared, rows_of_step
from fsdp_tune.data.row_order import Attempt, continued
from fsdp_tune.data.row_record import ROWS_FACT, RowRecord, record_of
from fsdp_tune.data.skipped_rows import SkippedRow
from fsdp_tune.data.store import RowStore
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, RunDir
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.manifest import Manifest
from tests.data.support import prepared, recipe_for, write_jsonl

TEXTS = [{"text": chr(97 + number) * (3 + number % 4)} for number in range(20)]


def with_batch(recipe: Recipe, size: int) -> Recipe:
    training = recipe.training.model_copy(update={"per_device_train_batch_size": size, "data_seed": 42})
    return recipe.model_copy(update={"training": training})


def checkpoint(run: RunDir, step: int, **facts: Any) -> Checkpoint:
    return Checkpoint(run.checkpoint(step), step, Manifest(CHECKPOINT_KIND, {}, {"step": step, **facts}))


def start_with(folder: Path, recipe: Recipe) -> str:
    """Write the recipe of a start. Returns the digest that its checkpoints have."""
    folder.mkdir(parents=True, exist_ok=True)
    RunDir(folder).recipe_json.write_text(recipe.model_dump_json(by_alias=True))
    digest = RunDir(folder).recipe_digest()
    assert digest is not None
    return digest


def test_record_survives_the_manifest_of_a_checkpoint(tmp_path: Path) -> None:
    record = RowRecord(
        (Attempt(0, 4), Attempt(9, 8)), (SkippedRow("a.jsonl", 3, 9),), "key", 7, shuffle=False
    )
    manifest = Manifest(CHECKPOINT_KIND, {}, {"step": 12, ROWS_FACT: record.as_dict()})
    read = Manifest.from_json(manifest.to_json())
    assert record_of(Checkpoint(tmp_path, 12, read)) == record
    assert record_of(None) == RowRecord(skipped=()), "nothing is trained"
    with pytest.raises(FsdpTuneError, match="cannot be read by this version"):
        record_of(
            Checkpoint(
                tmp_path, 12, Manifest(CHECKPOINT_KIND, {}, {ROWS_FACT: {"attempts": "of another version"}})
            )
        )


def test_checkpoint_without_a_record_has_the_batch_of_its_saved_recipe(tmp_path: Path) -> None:
    run, recipe = RunDir(tmp_path / "run"), recipe_for(tmp_path, tmp_path / "a.jsonl")
    first = start_with(run.history / "001", with_batch(recipe, 4))
    second = start_with(run.path, with_batch(recipe, 8))
    assert record_of(checkpoint(run, 5, recipe_digest=first)) == RowRecord((Attempt(0, 4),))
    assert record_of(checkpoint(run, 9, recipe_digest=second)) == RowRecord((Attempt(0, 8),))
    for digest in (None, "blake2b:of another recipe"):
        assert record_of(checkpoint(run, 9, recipe_digest=digest)) == RowRecord(), "unknown"
    RunDir(run.history / "001").recipe_json.write_text("{")
    assert (
        record_of(checkpoint(run, 5, recipe_digest=RunDir(run.history / "001").recipe_digest()))
        == RowRecord()
    )


def rows_by_number(text: str | None) -> list[int]:
    assert text is not None
    return [int(each.partition(" ")[0]) for each in text.split(", ")]


@pytest.mark.parametrize("packing", [False, True])
def test_rows_of_step_are_those_of_the_attempt_that_trained_it(tmp_path: Path, packing: bool) -> None:
    """Of 20 rows: 2 steps of 2 rows, then of 3, in the directory of the run and in its history."""
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), packing=packing, max_length=8)
    recipe = recipe_for(tmp_path, tmp_path / "a.jsonl", packing=packing, max_length=8)
    run = RunDir(tmp_path / "run")
    earlier = RunDir(run.history / "001")
    before, after = with_batch(recipe, 2), with_batch(recipe, 3)
    for folder, of_start, step in ((earlier, before, 0), (run, after, 2)):
        start_with(folder.path, of_start)
        found = found.continued(of_start.global_batch_size, step)
        found.write(folder.data_json)
        ResumeRequest(str(run.checkpoint(step)) if step else None).write(folder.resume_json)
    rows = found.order(before, RowStore(found.train)).rows_of(0).tolist()
    assert [rows_by_number(rows_of_step(run.data_json, after, step)) for step in (1, 2, 3)] == [
        rows[:2],
        rows[2:4],
        rows[4:7],
    ]
    assert [rows_by_number(rows_of_step(earlier.data_json, before, step)) for step in (2, 3)] == [
        rows[2:4],
        rows[4:6],
    ]
    # A restart of the last command found no usable checkpoint and started over.
    ResumeRequest(None).write(run.resume_json)
    again = (
        found.continued(after.global_batch_size, 0).order(after, RowStore(found.train)).rows_of(0).tolist()
    )
    assert rows_by_number(rows_of_step(run.data_json, after, 1)) == again[:3]


def test_rows_of_step_names_a_row_that_was_left_out_later(tmp_path: Path) -> None:
    recipe = with_batch(recipe_for(tmp_path, tmp_path / "a.jsonl"), 4)
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS)).continued(
        recipe.global_batch_size, 0
    )
    row = int(found.order(recipe, RowStore(found.train)).batch_after(0)[0])
    left_out = replace(found, skipped=(SkippedRow(str(tmp_path / "a.jsonl"), row + 1, 3),))
    left_out.write(tmp_path / "data.json")
    assert rows_by_number(rows_of_step(tmp_path / "data.json", recipe, 1))[0] == row


def test_restart_from_an_older_checkpoint_has_that_checkpoints_record(tmp_path: Path) -> None:
    """The data of the command were continued from step 9; its restart continues step 5, which another attempt
    wrote."""
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    recipe, file = with_batch(recipe_for(tmp_path, tmp_path / "a.jsonl"), 3), str(tmp_path / "a.jsonl")
    of_command = replace(
        found,
        attempts=(Attempt(0, 2), Attempt(9, 3)),
        skipped=(SkippedRow(file, 1, 2), SkippedRow(file, 4, 9)),
    )
    record = RowRecord((Attempt(0, 4), Attempt(2, 2)), (SkippedRow(file, 1, 4),))
    restarted = of_command.continued(recipe.global_batch_size, 5, record)
    assert restarted.attempts == (Attempt(0, 4), Attempt(2, 2), Attempt(5, 3))
    assert {each.row: each.step for each in restarted.skipped} == {1: 4, 4: 5}
    assert restarted.record(recipe) == RowRecord(
        restarted.attempts, restarted.skipped, found.key, 42, shuffle=True
    )


def test_data_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    found = prepared(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    found.write(tmp_path / "data.json")
    raw = json.loads((tmp_path / "data.json").read_text())
    del raw["attempts"], raw["document_digest"]
    (tmp_path / "data.json").write_text(json.dumps(raw))
    read = Prepared.read(tmp_path / "data.json")
    assert read is not None
    recipe = with_batch(recipe_for(tmp_path, tmp_path / "a.jsonl"), 4)
    assert read.continued(recipe.global_batch_size, 6).attempts == continued((), 0, 4)
    shutil.rmtree(tmp_path / "cache")
    assert rows_of_step(tmp_path / "data.json", recipe, 1) is None
