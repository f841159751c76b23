"""`plan`: what a recipe needs, how fast it is, and which recipe is best, before the first GPU-hour."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fsdp_tune.cli.options import (
    Allowed,
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
from fsdp_tune.core.errors import usage_error

if TYPE_CHECKING:
    from fsdp_tune.cli.plan_job import PlanJob
    from fsdp_tune.core.devices import Machine
    from fsdp_tune.planner.hardware.gpus import Hardware
    from fsdp_tune.planner.predict.predict import Plan
    from fsdp_tune.recipe.read.overrides import OptionSays
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
    trust_remote_code: TrustOption = False,
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
        from fsdp_tune.planner.hardware.gpus import CPU
        from fsdp_tune.planner.page import html_page

        if no_search and (target or write):
            raise usage_error("usage", "`--no-search` ranks nothing: leave it out, or `--target` and `--write`")
        wanted = _resolved(screen, chosen_recipe(recipe, config), overrides or [], name, gpu, number, Allowed(trust_remote_code))
        if wanted.hardware.name == CPU and (target or write):
            raise usage_error("usage", "recipes are ranked for GPUs, and this one runs on the CPU", hint="name a GPU by `--gpu`")
        ranks_others = not no_search and wanted.hardware.name != CPU
        made = _made(screen, wanted, target or ("fastest" if ranks_others else None), exact=exact, calibrate=calibrate, write=write)
        if html is not None:
            from fsdp_tune.core.atomic import write_file

            write_file(html, html_page(made))
            screen.say(f"the page is {html}")
        screen.document(made.as_dict())


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is planned: the recipe for these GPUs, and the keys that the user wrote, by section."""

    recipe: Recipe
    hardware: Hardware
    written: dict[str, Any]
    forced: dict[str, str]
    """Key → the value that `--num-gpus` forces, and why."""


def _resolved(
    screen: Screen, source: str, overrides: list[str], name: str | None, gpu: str | None, number: int | None, allowed: Allowed
) -> _Wanted:
    from fsdp_tune.core.devices import this_machine
    from fsdp_tune.planner.hardware.gpus import cpu_rank, find_hardware
    from fsdp_tune.planner.search.candidates import devices_of_machine
    from fsdp_tune.recipe.read.loader import load_recipe
    from fsdp_tune.recipe.read.overrides import OptionSays
    from fsdp_tune.recipe.rules import INPUTS

    plain = load_recipe(source, overrides, name=name, unneeded=INPUTS).recipe
    on_cpu = gpu is None and plain.launch.device == "cpu"
    hardware = None if on_cpu else find_hardware(gpu) if gpu is not None else _own_gpu(this_machine("auto"))
    options: list[OptionSays] = []
    forced: dict[str, str] = {}
    if number is not None:
        devices = devices_of_machine(hardware) if hardware is not None else number
        options, forced = _on_other_ranks(plain, overrides, number, devices)
    written = load_recipe(source, overrides, name=name, options=options, unneeded=INPUTS).recipe
    if hardware is not None and plain.launch.device != "cuda":  # what is planned are GPUs, whatever the recipe runs on here
        options.append(OptionSays(f"plan for {hardware.name}", "launch.device=cuda"))
    asked = asked_recipe(screen, source, overrides, name=name, options=options, unneeded=INPUTS, allowed=allowed)
    screen.notices(asked.resolution.notices)
    if hardware is None:
        from fsdp_tune.cli.plan_auto import budget_of

        budget = budget_of(asked.recipe, None)
        if budget is None:
            raise usage_error("no-gpu-named", "the memory of this machine is not known", hint="name a GPU by `--gpu`")
        hardware = cpu_rank(budget.usable_bytes)
    return _Wanted(asked.recipe, hardware, written.model_dump(mode="json", by_alias=True, exclude_unset=True), forced)


def _on_other_ranks(recipe: Recipe, overrides: list[str], number: int, devices: int) -> tuple[list[OptionSays], dict[str, str]]:
    """Return what `--num-gpus` says of the recipe's keys, and the keys that it forces. What `--set` gives is left to contradict."""
    import json

    from fsdp_tune.planner.search.what_if import forced_changes, machines_for
    from fsdp_tune.recipe.read.overrides import OptionSays
    from fsdp_tune.recipe.schema.not_yet import value_of
    from fsdp_tune.recipe.world import World

    machines = machines_for(number, devices)
    given = {override.partition("=")[0].strip() for override in overrides}
    changes = {key: value for key, value in forced_changes(recipe, World(number, machines)).items() if key not in given}
    said = f"--num-gpus {number}"
    keys = {"launch.num_processes": number, "launch.num_machines": machines} | changes
    options = [OptionSays(said, f"{key}={value if isinstance(value, str) else json.dumps(value)}") for key, value in keys.items()]
    forced = {key: f"{json.dumps(value)} instead of {json.dumps(value_of(recipe, key))}, for `{said}`" for key, value in changes.items()}
    return options, forced


def _own_gpu(machine: Machine) -> Hardware:
    from fsdp_tune.planner.hardware.gpus import detect, known_hardware

    found = detect(machine.device_name)
    if found is not None:
        return found
    shows = f"this machine's {machine.device_name} is not in the table" if machine.device_name else "this machine shows no GPU"
    raise usage_error("no-gpu-named", f"{shows}", hint=f"name one by `--gpu`: {', '.join(known_hardware())}, or a YAML file")


def _made(
    screen: Screen,
    wanted: _Wanted,
    target: Literal["fastest", "cheapest", "largest-context"] | None,
    *,
    exact: bool,
    calibrate: Path | None,
    write: Path | None,
) -> Plan:
    """Plan the recipe and show the answer at once; then rank others and write the first."""
    from fsdp_tune.cli.plan_auto import in_words
    from fsdp_tune.cli.plan_job import PlanJob
    from fsdp_tune.cli.plan_view import show_errors, show_plan, show_ranking, show_scaling

    with PlanJob(screen, wanted.recipe, wanted.hardware, exact=exact) as job:
        if calibrate is not None:
            job.calibrate(calibrate)
        decided = job.decide()
        screen.notices(decided.notices)
        made = replace(job.plan_it(), decided=wanted.forced | in_words(decided))
        show_plan(screen, made)
        if target is not None:
            found = job.search(target)
            ranked = tuple(each.plan for each in found.ranked)
            best = found.ranked[0].recipe if found.ranked and found.ranked[0].plan.fits != "no" else None
            smallest = job.smallest_hardware(found.ranked) if best is None else None
            made = replace(made, alternatives=ranked, best_because=found.because, smallest_hardware=smallest)
            show_ranking(screen, made)
            made = replace(made, scaling=tuple(job.scaling()))
            show_scaling(screen, made)
            if write is not None:
                _write_best(job, write, wanted.written, made, best)
    show_errors(screen, made)
    return made


def _write_best(job: PlanJob, path: Path, written: dict[str, Any], made: Plan, best: Recipe | None) -> None:
    from fsdp_tune.cli.plan_best import best_recipe_text
    from fsdp_tune.core.atomic import write_file

    if best is None:
        raise usage_error("nothing-fits", f"no recipe fits {made.num_processes} × {made.gpu}, so there is none to write")
    if path.exists():
        raise usage_error("output-exists", f"{path} is there already", ways_out=("another name for `--write`",))
    write_file(path, best_recipe_text(job, path, written, made, best))
    job.screen.say(f"the best recipe is {path}")
