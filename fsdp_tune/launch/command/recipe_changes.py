"""Changes of a recipe between the starts of a run: which may be, which are reported, and which are
refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_tune.core.errors import FsdpTuneError, Problem
from fsdp_tune.recipe.schema.data_section import EvalFraction, EvalRows
from fsdp_tune.recipe.schema.key_effects import OnResume
from fsdp_tune.recipe.schema.keys import effect_of, values_by_key
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.schema.training_fields import PASSED_EFFECTS, TRAINING_FIELDS
from fsdp_tune.run.event_parts import ChangedKey


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    old: object
    new: object
    kind: OnResume

    def __str__(self) -> str:
        return f"`{self.key}`: {_shown(self.old)} → {_shown(self.new)}"

    def answer(self) -> ChangedKey:
        return ChangedKey(self.key, self.old, self.new, self.kind.value)


GLOBAL_BATCH = "training.global_batch_size"


def compare(old: Recipe, new: Recipe) -> list[Change]:
    """Return the keys in which two resolved recipes differ, sorted by name."""
    before, after = _values(old), _values(new)
    differing = [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]
    return [Change(key, before.get(key), after.get(key), _class_here(key, old, new)) for key in differing]


def check(changes: Sequence[Change]) -> list[Change]:
    """Return the changes to report. Raises: FsdpTuneError (exit 2) with one problem for each refused
    change."""
    refused = [change for change in changes if change.kind is OnResume.REFUSED]
    if refused:
        hint = "restore the old value, or start a new run with `--set output_dir=…` or `--overwrite`"
        raise FsdpTuneError(
            *(Problem("resume-refused", f"{change} cannot change on resume", hint=hint) for change in refused)
        )
    return [change for change in changes if change.kind is OnResume.TRAJECTORY]


def _class_here(key: str, old: Recipe, new: Recipe) -> OnResume:
    # Rows held out of the training data change what is trained; separate eval sets do not.
    if key.split(".")[:2] == ["data", "eval"] and not any(
        isinstance(each.data.eval, EvalFraction | EvalRows) for each in (old, new)
    ):
        return OnResume.FREE
    return class_of_global_batch(new) if key == GLOBAL_BATCH else effect_of(key).on_resume


def class_of_global_batch(recipe: Recipe) -> OnResume:
    """A lane of a stream may have half of a window, whose sources follow from the step at which it began in a
    curriculum."""
    return OnResume.REFUSED if recipe.data.curriculum else effect_of(GLOBAL_BATCH).on_resume


def _values(recipe: Recipe) -> dict[str, object]:
    defaults = {f"training.{name}": TRAINING_FIELDS.fields[name].default for name in PASSED_EFFECTS}
    return defaults | values_by_key(recipe) | {GLOBAL_BATCH: recipe.global_batch_size}


def _shown(value: object) -> str:
    # as the recipe spells them
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"
