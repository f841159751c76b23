"""`plan`: what a recipe needs, how fast it is, and which recipe is best, before the first GPU-hour."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fsdp_tune.cli.options import ConfigArg, ConfigOption, JsonOption, NameOption, SetOption, asked_recipe, chosen_recipe
from fsdp_tune.cli.output import Screen, command, stopping_cleanly
from fsdp_tune.errors import usage_error

if TYPE_CHECKING:
    from fsdp_tune.plan.hardware import Hardware
    from fsdp_tune.plan.predict import Plan
    from fsdp_tune.recipe.resolve import Machine
    from fsdp_tune.recipe.schema import Recipe

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
    Path | None, typer.Option("--write", metavar="FILE", help="Write the best recipe, with comments that say why.", show_default=False)
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
    json_output: JsonOption = False,
) -> None:
    """Predict memory, time, communication and disk of a recipe from a traced step, and rank recipes that fit. Starts nothing.

    Exit code 0 whatever the answer; `fits` is yes, tight or no.

    \b
    Examples:
        fsdp-tune plan --config llama7b_full_shard --gpu A100-40GB --num-gpus 4
        fsdp-tune plan my.yaml --gpu H100-SXM --target cheapest --write best.yaml
    """
    with command(json_output) as screen, stopping_cleanly():
        from fsdp_tune.plan.page import html_page

        if no_search and (target or write):
            raise usage_error("usage", "`--no-search` ranks nothing: leave it out, or `--target` and `--write`")
        source = chosen_recipe(recipe, config)
        wanted, hardware, written = _resolved(screen, source, overrides or [], name, gpu, number)
        made, best = _made(screen, wanted, hardware, target or ("fastest" if not no_search else None), exact=exact, calibrate=calibrate)
        if write is not None:
            _write_best(screen, write, written, made, best)
        if html is not None:
            from fsdp_tune.atomic import write_file

            write_file(html, html_page(made))
            screen.say(f"the page is {html}")
        screen.document(made.as_dict())


def _resolved(
    screen: Screen, source: str, overrides: list[str], name: str | None, gpu: str | None, number: int | None
) -> tuple[Recipe, Hardware, dict[str, Any]]:
    """The recipe for the GPUs that were asked for, what these are, and the recipe as the user wrote it."""
    from fsdp_tune.bridge.devices import this_machine
    from fsdp_tune.plan.candidates import devices_of_machine
    from fsdp_tune.plan.hardware import find_hardware
    from fsdp_tune.recipe.loader import load_recipe
    from fsdp_tune.recipe.overrides import OptionSays

    hardware = find_hardware(gpu) if gpu is not None else _own_gpu(this_machine("auto"))
    options: list[OptionSays] = []
    if number is not None:
        machines = max(1, -(-number // devices_of_machine(hardware)))
        said = f"--num-gpus {number}"
        options = [OptionSays(said, f"launch.num_processes={number}"), OptionSays(said, f"launch.num_machines={machines}")]
    loaded = load_recipe(source, overrides, name=name, options=options)
    written = loaded.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if loaded.recipe.launch.device != "cuda":  # what is planned are GPUs, whatever the recipe runs on here
        options.append(OptionSays(f"plan for {hardware.name}", "launch.device=cuda"))
    asked = asked_recipe(screen, source, overrides, name=name, options=options)
    screen.notices(asked.resolution.notices)
    return asked.recipe, hardware, written


def _own_gpu(machine: Machine) -> Hardware:
    from fsdp_tune.plan.hardware import detect, known_hardware

    found = detect(machine.device_name)
    if found is not None:
        return found
    shows = f"this machine's {machine.device_name} is not in the table" if machine.device_name else "this machine shows no GPU"
    raise usage_error("no-gpu-named", f"{shows}", hint=f"name one by `--gpu`: {', '.join(known_hardware())}, or a YAML file")


def _made(
    screen: Screen,
    recipe: Recipe,
    hardware: Hardware,
    target: Literal["fastest", "cheapest", "largest-context"] | None,
    *,
    exact: bool,
    calibrate: Path | None,
) -> tuple[Plan, Recipe | None]:
    """The plan of the recipe, shown as soon as it is there, and then the ranking; with the recipe that is ranked first."""
    from fsdp_tune.cli.plan_auto import in_words
    from fsdp_tune.cli.plan_job import PlanJob
    from fsdp_tune.cli.plan_view import show_errors, show_plan, show_ranking, show_scaling

    with PlanJob(screen, recipe, hardware, exact=exact) as job:
        if calibrate is not None:
            job.calibrate(calibrate)
        decided = job.decide()
        screen.notices(decided.notices)
        made = replace(job.plan_it(), decided=in_words(decided))
        show_plan(screen, made)
        best = None
        if target is not None:
            found = job.search(target)
            ranked = tuple(each.plan for each in found.ranked)
            best = found.ranked[0].recipe if found.ranked and found.ranked[0].plan.fits != "no" else None
            smallest = job.smallest_hardware(found.ranked) if best is None else None
            made = replace(made, alternatives=ranked, best_because=found.because, smallest_hardware=smallest)
            show_ranking(screen, made)
            made = replace(made, scaling=tuple(job.scaling()))
            show_scaling(screen, made)
    show_errors(screen, made)
    return made, best


def _write_best(screen: Screen, path: Path, written: dict[str, Any], made: Plan, best: Recipe | None) -> None:
    from fsdp_tune.atomic import write_file
    from fsdp_tune.cli.plan_job import best_recipe_text

    if best is None:
        raise usage_error("nothing-fits", f"no recipe fits {made.num_processes} × {made.gpu}, so there is none to write")
    if path.exists():
        raise usage_error("output-exists", f"{path} is there already", ways_out=("another name for `--write`",))
    if written.get("fsdp", {}).get("activation_checkpointing") == "auto":  # another micro-batch might have it decide otherwise
        written["fsdp"]["activation_checkpointing"] = best.fsdp.activation_checkpointing
    write_file(path, best_recipe_text(written, made))
    screen.say(f"the best recipe is {path}")
