"""`plan`: what a recipe needs, how fast it is, and which recipe is best, before the first GPU-hour."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fsdp_tune.cli.options import (
    AllowExtensionsOption,
    ConfigArg,
    ConfigOption,
    JsonOption,
    NameOption,
    SetOption,
    TrustOption,
    chosen_recipe,
)
from fsdp_tune.cli.output import command

GpuOption = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME|FILE",
        help="A GPU of the table (A100-40GB, H100-SXM …) or a YAML file; default: this machine's.",
        show_default=False,
    ),
]
NumberOption = Annotated[
    int | None,
    typer.Option(
        "--num-gpus", "--num-processes", metavar="N", min=1, help="GPUs over all machines; overrides the recipe.", show_default=False
    ),
]
TargetOption = Annotated[
    Literal["fastest", "cheapest", "largest-context"] | None,
    typer.Option(
        "--target",
        help="Rank other recipes too: fastest (default of --write), cheapest (fewer GPUs allowed), largest-context.",
        show_default=False,
    ),
]
ExactOption = Annotated[bool, typer.Option("--exact", help="Trace every decoder layer instead of repeating the middle ones.")]
WriteOption = Annotated[
    Path | None, typer.Option("--write", metavar="FILE", help="Write the best recipe, with the reasons as comments.", show_default=False)
]
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page: the memory of a step over time, the ranked recipes.", show_default=False),
]
NoSearchOption = Annotated[bool, typer.Option("--no-search", help="This recipe alone: no alternatives, no scaling table.")]
CalibrateOption = Annotated[
    Path | None,
    typer.Option("--calibrate", metavar="RUN", help="Learn this GPU's speed from the metrics of a finished run.", show_default=False),
]


def plan(
    recipe: ConfigArg = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    name: NameOption = None,
    gpu: GpuOption = None,
    number: NumberOption = None,
    target: TargetOption = None,
    exact: ExactOption = False,
    no_search: NoSearchOption = False,
    write: WriteOption = None,
    html: HtmlOption = None,
    calibrate: CalibrateOption = None,
    trust_remote_code: TrustOption = False,
    allow_extensions: AllowExtensionsOption = False,
    json_output: JsonOption = False,
) -> None:
    """Predict memory, time, communication and disk of a recipe from a traced step, and rank recipes that fit. Starts nothing.

    Exit code 0 whatever the answer; `fits` is yes, tight or no.

    \b
    Examples:
        fsdp-tune plan --config llama7b_full_shard --gpu A100-40GB --num-gpus 4
        fsdp-tune plan my.yaml --gpu H100-SXM --target cheapest --write best.yaml
    """
    with command(json_output) as screen:
        import fsdp_tune
        from fsdp_tune.cli.plan_view import show_errors
        from fsdp_tune.core.atomic import write_file
        from fsdp_tune.planner.page import html_page
        from fsdp_tune.recipe.rules import INPUTS

        loaded = fsdp_tune.load_recipe(chosen_recipe(recipe, config), overrides or (), name=name, unneeded=INPUTS)
        made = fsdp_tune.plan(
            loaded,
            gpu=gpu,
            num_gpus=number,
            target=target,
            search=not no_search,
            exact=exact,
            calibrate=calibrate,
            write=write,
            allowed=fsdp_tune.Allowed(trust_remote_code, extensions=allow_extensions),
            observer=screen,
        )
        show_errors(screen, made)
        if html is not None:
            write_file(html, html_page(made))
            screen.message(f"the page is {html}")
        screen.document(made.as_dict())
