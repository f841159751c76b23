"""`train`: validate → prepare → write the run directory → launch → merge."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import NamedRecipe, verb
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, usage_error
from fsdp_tune.core.option import Option
from fsdp_tune.jobs.options import TrainOptions


@verb
def train(
    screen: Screen,
    context: typer.Context,
    recipe: NamedRecipe,
    options: TrainOptions,
    dry_run: Annotated[bool, Option("Print the resolved recipe, the command and the environment; start and write nothing.")] = False,
    full: Annotated[bool, Option("With --dry-run: print every key, not only those that differ from the defaults.")] = False,
    no_start: Annotated[bool, Option("Write the run directory and print the commands that start it.")] = False,
    verbose: Annotated[bool, Option("Print every value and kernel that was chosen, with the reason.")] = False,
) -> None:
    """Fine-tune a model by a recipe, and merge the result into an ordinary model directory.

    Exit codes: 0 finished, 1 failed, 2 recipe or usage, 3 out of device memory, 4 non-finite, 5 hang or lost rank,
    130 Ctrl-C after saving, 143 saved and stopped. Arguments after `--` go to `accelerate launch`.

    \b
    Examples:
        fsdp-tune train --config gpt2_smoke
        fsdp-tune train my.yaml --set training.learning_rate=1e-4 --resume auto
        fsdp-tune train llama7b_full_shard --dry-run
    """
    from fsdp_tune.cli import train_view as view
    from fsdp_tune.jobs.train import WrittenRun, preview, write_only

    if full and not dry_run:
        raise usage_error("usage", "`--full` belongs to `--dry-run`", hint="add `--dry-run`, or leave out `--full`")
    loaded = recipe.load()
    options = replace(options, **context.meta["arguments"])
    screen.verbose = verbose
    if dry_run:
        view.show_preview(screen, preview(loaded, options, observer=screen), full=full)
        return
    result = (write_only if no_start else fsdp_tune.train)(loaded, options, observer=screen)
    if not isinstance(result, WrittenRun):
        view.show_end(screen, result)
        raise typer.Exit(EXIT_CODE_OF_REASON[result.exit_reason])
    view.show_commands(screen, result)
