"""`plan`: what a recipe needs, how fast it is, and which recipe is best, before the first GPU-hour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import fsdp_tune
from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import NamedRecipe, given, verb
from fsdp_tune.core.option import Option
from fsdp_tune.jobs.options import PlanOptions


@verb
def plan(
    screen: Screen,
    recipe: NamedRecipe,
    options: PlanOptions,
    html: Annotated[Path | None, Option("Write a page: the memory of a step over time, the ranked recipes.", metavar="FILE")] = None,
) -> None:
    """Predict memory, time, communication and disk of a recipe from a traced step, and rank recipes that fit. Starts nothing.

    Exit code 0 whatever the answer; `fits` is yes, tight or no.

    \b
    Examples:
        fsdp-tune plan --config llama7b_full_shard --gpu A100-40GB --num-gpus 4
        fsdp-tune plan my.yaml --gpu H100-SXM --target cheapest --write best.yaml
    """
    from fsdp_tune.cli.plan_page import html_page
    from fsdp_tune.cli.plan_view import show_errors
    from fsdp_tune.core.atomic import write_file
    from fsdp_tune.recipe.rules import INPUTS

    made = fsdp_tune.plan(recipe.load(unneeded=INPUTS), **given(options), observer=screen)
    show_errors(screen, made)
    if html is not None:
        write_file(html, html_page(made))
        screen.message(f"the page is {html}")
    screen.document(made.as_dict())
