"""`validate`: everything about a recipe that can be checked without GPUs, all mistakes at once."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdp_tune.cli.options import (
    Allowed,
    AllowEnvOption,
    ConfigArg,
    ConfigOption,
    JsonOption,
    NameOption,
    SetOption,
    TrustOption,
    asked_recipe,
    chosen_recipe,
)
from fsdp_tune.cli.output import Screen, command, stopping_cleanly
from fsdp_tune.core.errors import FsdpTuneError, Notice, Problem

if TYPE_CHECKING:
    from fsdp_tune.cli.data_checks import DataFacts
    from fsdp_tune.cli.model_checks import ModelFacts
    from fsdp_tune.recipe.read.loader import LoadedRecipe
    from fsdp_tune.recipe.resolve import Resolution

StrictOption = Annotated[bool, typer.Option("--strict", help="Count keys that have no effect as errors.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Do not reach for the hub; what would need it is listed as unchecked.")]


def validate(
    recipe: ConfigArg = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    name: NameOption = None,
    strict: StrictOption = False,
    offline: OfflineOption = False,
    trust_remote_code: TrustOption = False,
    allow_env: AllowEnvOption = None,
    json_output: JsonOption = False,
) -> None:
    """Check a recipe: keys, values, contradictions, the arithmetic of the batch, model and data. Starts nothing.

    \b
    Example:
        fsdp-tune validate --config llama7b_full_shard --strict
    """
    with command(json_output) as screen, stopping_cleanly():
        asked = asked_recipe(
            screen,
            chosen_recipe(recipe, config),
            overrides,
            name=name,
            needs_trackers=True,
            strict=strict,
            allowed=Allowed(trust_remote_code, allow_env or ()),
        )
        loaded = asked.loaded
        checked = _check(asked.resolution, offline=offline)
        resolution = _decided(asked.resolution, checked, offline=offline)
        notices = [*loaded.notices, *resolution.notices, *checked.notices]
        checked.problems.extend(_as_error(notice) for notice in notices if strict and notice.strict)
        screen.notices([notice for notice in notices if not (strict and notice.strict)])
        screen.document(_document(loaded, resolution, checked))
        if checked.problems:
            raise FsdpTuneError(*checked.problems)
        _show(screen, loaded, resolution, checked)


class _Checked:
    """What was found beyond the recipe itself."""

    def __init__(self, model: ModelFacts, data: DataFacts) -> None:
        self.model = model.facts
        self.data = data
        self.problems = [*model.problems, *data.problems]
        self.notices = [*model.notices, *data.notices]
        self.unchecked = list(dict.fromkeys([*model.unchecked, *data.unchecked]))


def _check(resolution: Resolution, *, offline: bool) -> _Checked:
    """Model and data at the same time: each takes seconds to import what it needs."""
    from fsdp_tune.cli.data_checks import data_facts
    from fsdp_tune.cli.model_checks import model_facts
    from fsdp_tune.core.processes import threads
    from fsdp_tune.model.build.model_files import check_vocabulary

    recipe = resolution.recipe
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, which is later
    with threads(1) as pool:
        looking = pool.submit(model_facts, recipe, offline=offline)
        data = data_facts(recipe)
        checked = _Checked(looking.result(), data)
    if checked.model.get("packaged"):
        name = recipe.model.name_or_path
        checked.unchecked.append(f"the files of `{name}`: the hub is out of reach, and its shapes are those that the package carries")
    elif checked.model and data.vocabulary_size is not None:
        try:
            check_vocabulary(checked.model, recipe.model, data.vocabulary_size)
        except FsdpTuneError as error:
            checked.problems.extend(error.problems)
    return checked


def _decided(resolution: Resolution, checked: _Checked, *, offline: bool) -> Resolution:
    """What the recipe leaves to a plan, where this machine has the ranks' memory and the model is there; else it is left open."""
    from fsdp_tune.cli.plan_auto import budget_of, card_of, decided
    from fsdp_tune.planner.search.recomputation import KEY, is_open

    recipe = resolution.recipe
    if not is_open(recipe) or checked.problems or not checked.model:
        return resolution
    budget = budget_of(recipe, card_of(recipe))
    if budget is None:
        checked.unchecked.append(
            f"`{KEY}: auto`: this machine does not have the run's memory; `fsdp-tune plan --gpu NAME` decides for a card"
        )
        return resolution
    found = decided(recipe, budget, offline=offline)
    checked.notices.extend(found.notices)
    return replace(resolution, recipe=found.recipe, reasons=resolution.reasons | found.reasons)


def _as_error(notice: Notice) -> Problem:
    return Problem(notice.code, notice.message, notice.where, notice.hint)


def _document(loaded: LoadedRecipe, resolution: Resolution, checked: _Checked) -> dict[str, Any]:
    from fsdp_tune.recipe.world import batch_arithmetic

    return {
        "recipe": str(loaded.path),
        "valid": not checked.problems,
        "resolved": resolution.recipe.model_dump(mode="json", by_alias=True),
        "reasons": resolution.reasons,
        "overrides": list(loaded.overrides),
        "arithmetic": batch_arithmetic(resolution.recipe),
        "model": checked.model,
        "data": checked.data.inputs,
        "unchecked": checked.unchecked,
    }


def _show(screen: Screen, loaded: LoadedRecipe, resolution: Resolution, checked: _Checked) -> None:
    from fsdp_tune.cli.train_view import show_decided
    from fsdp_tune.recipe.world import batch_arithmetic

    show_decided(screen, resolution, checked.model)
    if checked.model:
        layers = f"{checked.model['layers']} layers ({', '.join(checked.model['layer_classes'])})"
        screen.say(f"model: {checked.model['parameters']:,} parameters, {layers}, {len(checked.model['units'])} FSDP units")
    screen.say(f"batch: {batch_arithmetic(resolution.recipe)}")
    for each in checked.data.inputs:
        rows = f"first {each['rows_looked_at']} rows are fine"
        screen.say(f"data: {each['set']} from {each['path']}: {each['format']}, loss on {each['loss_on']}; {rows}")
    for line in checked.unchecked:
        screen.say(f"not checked: {line}")
    screen.say(f"{loaded.path} is valid")
