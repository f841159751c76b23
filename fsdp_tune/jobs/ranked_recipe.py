"""The file of a recipe that a plan ranks: as its user would write it, with the changed keys marked, and
loaded and planned again before it is returned."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import failed_error
from fsdp_tune.core.gpus import Hardware
from fsdp_tune.jobs.plan_session import (
    PlanSession,
)
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.planner.search.alternatives import differences
from fsdp_tune.planner.search.auto_recomputation import RECOMPUTATION, RESHARDING
from fsdp_tune.planner.search.candidates import PlannedRecipe
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.rules.contradictions import INPUTS
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe

_BATCH = ("training.global_batch_size", "training.per_device_train_batch_tokens")
"""Keys that the search resets and that `_settle_batch` keeps."""


def recipe_text(
    plans: PlanSession, path: Path, written: dict[str, object], best: PlannedRecipe, why: Sequence[str]
) -> str:
    """Return the text of the file `path`. It begins with the comments `why`.

    `written` are the keys that the user wrote, by section; they keep their place. Raises: FsdpTuneError if
    the text is not a recipe that loads as `best` and fits.
    """
    body = recipe_body(plans.recipe, written, best)
    again = _load(body, path, best.recipe, plans.hardware)
    planned = plans.plan_other(again)
    if planned.fits == "no":
        raise failed_error(
            "written-recipe-differs",
            f"the recipe for {path} does not fit when it is planned again: {planned.fits_because}",
        )
    return "\n".join([*why, _predicted(planned), "", body])


def recipe_body(base: Recipe, written: dict[str, object], best: PlannedRecipe) -> str:
    """Return a ranked recipe as its user would write it, with the changed keys marked. `base` is the resolved
    recipe of the user."""
    changes = best.plan.recipe_changes
    document = _document(written, base, best.recipe, changes)
    return _marked(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), changes)


def _document(
    written: Mapping[str, object], base: Recipe, best: Recipe, changes: Mapping[str, object]
) -> dict[str, object]:
    """Return the keys of the file: the user's, less those that `best` has otherwise, and the changes."""
    document: dict[str, Any] = copy.deepcopy(dict(written))
    sections = {
        section: cast("dict[str, object]", keys)
        for section, keys in document.items()
        if isinstance(keys, dict)
    }
    for section, keys in sections.items():
        for name in list(keys):
            key = f"{section}.{name}"
            if key not in (*changes, *_BATCH) and value_of(best, key) != value_of(base, key):
                del keys[name]
    if document.get("launch", {}).get("device") == "cpu":
        document["launch"]["device"] = best.launch.device
    for key in (RECOMPUTATION, RESHARDING):  # a plan might decide differently for another micro-batch
        section, name = key.split(".")
        if document.get(section, {}).get(name) == "auto":
            document[section][name] = value_of(best, key)
    size = {"launch.num_processes": best.world_size, "launch.num_machines": best.launch.num_machines}
    for key, value in {**changes, **size}.items():
        section, name = key.split(".")
        document.setdefault(section, {})[name] = value
    _settle_batch(document.setdefault("training", {}), best)
    return document


def _settle_batch(training: dict[str, object], best: Recipe) -> None:
    """Write the batch as the user did: by tokens, by the global batch, or by accumulation."""
    if training.get("per_device_train_batch_tokens") is not None:
        training.pop("per_device_train_batch_size", None)
    elif training.get("global_batch_size") is not None:
        training["global_batch_size"] = best.global_batch_size
        training.pop("gradient_accumulation_steps", None)
    else:
        training["gradient_accumulation_steps"] = best.training.gradient_accumulation_steps


def _load(text: str, path: Path, best: Recipe, hardware: Hardware) -> Recipe:
    """Load and resolve the text as `train` would. Raises: FsdpTuneError if it is refused or is not `best`."""
    loaded = parse_recipe(text, path, unneeded=INPUTS)
    machine = Machine(best.launch.device, best.world_size, 1, hardware.name, hardware.capability)
    again = resolve(
        loaded.recipe, machine, cwd=Path.cwd(), assume=best.launch.device, positions=loaded.positions
    ).recipe
    if found := differences(best, again):
        raise failed_error(
            "written-recipe-differs",
            f"the recipe for {path} is not the one that was planned: {', '.join(found)}",
        )
    return again


def _predicted(planned: Plan) -> str:
    predicted = (
        f"# Predicted: {planned.device_gib:.1f} of {planned.usable_gib:.1f} GiB on each GPU (fits: "
        f"{planned.fits})"
    )
    if planned.step_seconds is not None and planned.tokens_per_second_per_device is not None:
        predicted += (
            f", {planned.step_seconds:.3g} s a step, {planned.tokens_per_second_per_device:,.0f} tokens "
            "a second and GPU"
        )
    return f"{predicted}."


def _marked(text: str, changes: Mapping[str, object]) -> str:
    """Mark the lines of changed keys; keys of a section are indented by two."""
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        key = line.split(":")[0]
        if not line.startswith(" "):
            section = key
        is_changed = line.startswith("  ") and f"{section}.{key.strip()}" in changes
        lines.append(f"{line}  # changed by plan" if is_changed else line)
    return "\n".join(lines) + "\n"
