"""The prepared data of a run that starts or continues: which rows its steps have trained, and which are left
out from now on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_tune.core.errors import Notice
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.row_record import RowRecord, record_of
from fsdp_tune.data.skipped_rows import NamedRow, SkippedRow
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch.command.recipe_changes import GLOBAL_BATCH, Change, check, class_of_global_batch
from fsdp_tune.launch.command.resume import Start, check_data
from fsdp_tune.planner.predict.memory import total_steps
from fsdp_tune.recipe.schema.key_effects import OnResume
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import training_value
from fsdp_tune.run.directory import RunDir


def continued_data(
    recipe: Recipe,
    start: Start,
    data: Prepared,
    named: Sequence[NamedRow],
    observer: Observer,
    *,
    run: RunDir,
    overwrite: bool,
) -> Prepared:
    """Return the data of a start of `run`: its attempts, and its rows without the `named` ones and those that
    it left out before.

    Raises: usage error if the steps before trained other data or another order of the rows, and for names
    that are no training rows.
    """
    record = record_of(start.checkpoint)
    _refuse_other_rows(recipe, start, data, record)
    earlier = [] if overwrite else _skipped_before(start, record, run)
    changed = data.without(recipe, named, earlier, start.step)
    if changed.skipped:
        kept = len({each.origin for each in earlier})
        before = f", {kept:,} of them as before" if kept else ""
        observer.message(
            f"{len(changed.skipped):,} rows of the files are skipped from step {start.step:,} on{before}"
        )
    if start.checkpoint is not None and not record.attempts and not data.is_stream:
        message = (
            f"{start.checkpoint.path} does not record the global batch of its steps: "
            f"{recipe.global_batch_size} is assumed"
        )
        hint = (
            "if it was another one, rows are trained twice or never; `training.global_batch_size` "
            "continues with it"
        )
        observer.notices([Notice("batch-not-recorded", message, hint=hint)])
    return changed.continued(recipe.global_batch_size, start.step, record)


def _skipped_before(start: Start, record: RowRecord, run: RunDir) -> list[SkippedRow]:
    """Return the rows that the run leaves out. Where one occurs twice, the last entry counts.

    A start that trained no step before its end is in the run's data.json only: its rows are left out from the
    checkpoint on.
    """
    if start.checkpoint is None and start.is_new:
        return []
    of_run = Prepared.read(
        (RunDir(start.checkpoint.path.parent) if start.checkpoint is not None else run).data_json
    )
    remembered = of_run.skipped if of_run is not None else ()
    if record.skipped is None:
        return list(remembered)
    return [*(replace(each, step=start.step) for each in remembered), *record.skipped]


def _refuse_other_rows(recipe: Recipe, start: Start, data: Prepared, record: RowRecord) -> None:
    """Compare with the record of the checkpoint, which also one has that was copied without its run."""
    check_data(start, data.key)
    if record.data_key is not None and record.data_key != start.data_key:
        check_data(Start(start.checkpoint, data_key=record.data_key), data.key)
    now = data.record(recipe)
    recorded = [
        ("training.data_seed", record.data_seed, now.data_seed),
        ("data.shuffle", record.shuffle, now.shuffle),
    ]
    changes = [
        Change(key, old, new, OnResume.REFUSED)
        for key, old, new in recorded
        if old is not None and old != new
    ]
    for source, (old, new) in enumerate(zip(record.repeats or (), now.repeats or (), strict=False)):
        if old != new:
            changes.append(Change(f"data.train[{source}].repeats", old, new, OnResume.REFUSED))
    for last in record.attempts[-1:]:
        if last.global_batch_size != recipe.global_batch_size:
            changes.append(
                Change(
                    GLOBAL_BATCH,
                    last.global_batch_size,
                    recipe.global_batch_size,
                    class_of_global_batch(recipe),
                )
            )
    check(changes)


def steps_of_run(recipe: Recipe, data: Prepared) -> int | None:
    """Return the optimizer steps of a run. Without skipped rows, and after a change of the global batch,
    epochs have other numbers."""
    is_regular = not data.skipped and len(data.attempts) <= 1
    if is_regular or data.is_stream or total_steps(recipe, None) is not None:
        return total_steps(recipe, data.train_rows)
    epochs = float(training_value(recipe.training, "num_train_epochs") or 0)
    return data.order(recipe, data.training_store()).total_steps(epochs)
