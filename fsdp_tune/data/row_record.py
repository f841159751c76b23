"""The record of what decides which rows a run has trained. Each checkpoint has it, and the start that
continues it reads it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from fsdp_tune.core.errors import usage_error
from fsdp_tune.data.row_order import Attempt
from fsdp_tune.data.skipped_rows import SkippedRow
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import Checkpoint, RunDir
from fsdp_tune.run.records import Document

ROWS_FACT = "rows"
"""The record among the facts of a checkpoint's manifest."""


@dataclass(frozen=True, slots=True)
class RowRecord(Document):
    """What decides the rows of the steps before a checkpoint. None: not recorded, since an earlier version
    wrote the checkpoint."""

    attempts: tuple[Attempt, ...] = ()
    """Empty: unknown."""
    skipped: tuple[SkippedRow, ...] | None = None
    data_key: str | None = None
    data_seed: int | None = None
    shuffle: bool | None = None
    repeats: tuple[int | None, ...] | None = None
    """Of each source of a stream; None also for prepared rows, which have none."""


def record_of(checkpoint: Checkpoint | None) -> RowRecord:
    """Return the record of a checkpoint, or of a run that has trained no step.

    An earlier version recorded nothing, and counted all steps with the global batch of its recipe, so this is
    what is known of them.
    """
    if checkpoint is None:
        return RowRecord(skipped=())
    facts = checkpoint.manifest.facts
    raw: dict[str, object] | None = facts.get(ROWS_FACT)
    if raw is not None:
        try:
            return RowRecord.from_dict(raw)
        except (ValueError, TypeError) as error:
            message = f"{checkpoint.path}: the record of its rows cannot be read by this version"
            raise usage_error(
                "checkpoint-unusable", message, hint="continue with the version in its `launch.json`"
            ) from error
    saved = _saved_recipe(RunDir(checkpoint.path.parent), facts.get("recipe_digest"))
    return RowRecord() if saved is None else RowRecord((Attempt(0, saved.global_batch_size),))


def _saved_recipe(run: RunDir, recipe_digest: str | None) -> Recipe | None:
    """Return the recipe with which a checkpoint was written, of the run's last start or of an earlier one."""
    for folder in [run.path, *sorted(run.history.glob("*"), reverse=True)]:
        saved = RunDir(folder)
        with suppress(OSError, ValueError, AssertionError):
            if recipe_digest is not None and saved.recipe_digest() == recipe_digest:
                return Recipe.model_validate_json(saved.recipe_json.read_bytes())
    return None
