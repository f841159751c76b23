"""`validate`: check a recipe without GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import NamedRecipe, given, verb
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs.options import ValidateOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.validate import Validation
    from fsdp_tune.recipe.read.loader import LoadedRecipe


@verb
def validate(screen: Screen, recipe: NamedRecipe, options: ValidateOptions) -> None:
    """Check a recipe: keys, values, contradictions, the arithmetic of the batch, model and data. Starts nothing.

    \b
    Example:
        fsdp-tune validate --config llama7b_full_shard --strict
    """
    from fsdp_tune.jobs.answers import CheckedSource, ValidateAnswer
    from fsdp_tune.planner.predict.totals import total_steps
    from fsdp_tune.recipe.schedule import rate_line
    from fsdp_tune.recipe.world import batch_arithmetic

    loaded = recipe.load()
    found = fsdp_tune.validate(loaded, **given(options), observer=screen)
    arithmetic, rate = batch_arithmetic(found.recipe), rate_line(found.recipe, total_steps(found.recipe, None))
    screen.document(
        ValidateAnswer(
            recipe=str(loaded.path),
            valid=not found.problems,
            resolved=found.recipe.model_dump(mode="json", by_alias=True),
            reasons=found.resolution.reasons,
            overrides=list(loaded.overrides),
            arithmetic=arithmetic,
            rate=rate.removeprefix("rate: "),
            model=found.model,
            data=[CheckedSource(**each) for each in found.inputs],
            unchecked=list(found.unchecked),
        )
    )
    if found.problems:
        raise FsdpTuneError(*found.problems)
    _show(screen, loaded, found, arithmetic, rate)


def _show(screen: Screen, loaded: LoadedRecipe, found: Validation, arithmetic: str, rate: str) -> None:
    from fsdp_tune.cli.train_view import adapter_lines, show_decided
    from fsdp_tune.data.format.row_account import account_line

    model = found.model
    show_decided(screen, found.resolution, model)
    if model:
        layers = f"{model['layers']} layers ({', '.join(model['layer_classes'])})"
        screen.message(f"model: {model['parameters']:,} parameters, {layers}, {len(model['units'])} FSDP units")
        for line in adapter_lines(model):
            screen.message(line)
    screen.message(f"batch: {arithmetic}")
    screen.message(rate)
    for each in found.inputs:
        rows = f"first {each['rows_looked_at']} rows are fine"
        screen.message(f"data: {each['set']} from {each['path']}: {each['format']}, loss on {each['loss_on']}; {rows}")
        if each["keys"]:
            screen.message(f"data keys: {each['path']}: {account_line(each['keys'])}")
    for line in found.unchecked:
        screen.message(f"not checked: {line}")
    screen.message(f"{loaded.path} is valid")
