"""Plan a recipe: what it needs, how fast it is, and which recipe is best, before the first GPU-hour.

Other jobs use the steps: decide what a recipe leaves to a plan, trace in a child process, predict, search,
learn from a run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_tune.core.atomic import check_output_file, write_file
from fsdp_tune.core.command import Target
from fsdp_tune.core.devices import this_machine
from fsdp_tune.core.errors import usage_error
from fsdp_tune.core.gpus import CPU, Hardware, cpu_rank, detect, known_hardware
from fsdp_tune.jobs.observer import Observer, session
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.plan_session import PlanSession, budget_of, decisions
from fsdp_tune.jobs.ranked_recipe import recipe_text
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.planner.gpu_file import find_or_read_hardware
from fsdp_tune.planner.predict.predict import Plan
from fsdp_tune.planner.search.alternatives import devices_of_machine
from fsdp_tune.planner.search.scaling import forced_changes, machines_for
from fsdp_tune.recipe.read.loader import LoadedRecipe, parse_recipe
from fsdp_tune.recipe.read.overrides import OptionOverride
from fsdp_tune.recipe.rules.contradictions import INPUTS
from fsdp_tune.recipe.schema.keys import value_of
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.recipe.world import World


def plan(
    recipe: LoadedRecipe,
    *,
    gpu: str | None = None,
    num_gpus: int | None = None,
    target: Target | None = None,
    search: bool = True,
    exact: bool = False,
    calibrate: Path | None = None,
    dollars_per_hour: float | None = None,
    write: Path | None = None,
    allowed: Allowed = Allowed(),
    observer: Observer = Observer(),
) -> Plan:
    """Predict memory, time, communication and disk of a recipe from a traced step, and rank recipes that fit.
    Starts nothing.

    `gpu` is a name of the table or a YAML file, by default this machine's; `num_gpus` counts those of all
    machines. `target` ranks other recipes (fastest by default); without `search` only this recipe is planned.
    `exact` traces every layer. `calibrate` learns the GPU's speed from a finished run. `dollars_per_hour` is
    the price of one GPU. `write` is a file for the best recipe.
    Raises: FsdpTuneError. A recipe that does not fit is not an error: `fits` of the result is yes, tight or
    no.
    """
    with session(recipe):
        if not search and (target or write):
            raise usage_error(
                "usage", "`--no-search` ranks nothing: leave it out, or `--target` and `--write`"
            )
        if dollars_per_hour is not None and not 0 <= dollars_per_hour < math.inf:
            raise usage_error(
                "usage",
                f"`--dollars-per-hour {dollars_per_hour}` is not a price",
                hint="--dollars-per-hour 2.5",
            )
        if write is not None:
            check_output_file(write)
        planned = planned_here(recipe, gpu, num_gpus, allowed, observer)
        if dollars_per_hour is not None:
            planned = replace(planned, hardware=replace(planned.hardware, dollars_per_hour=dollars_per_hour))
        if planned.hardware.name == CPU:
            if target or write:
                raise usage_error(
                    "usage",
                    "recipes are ranked for GPUs, and this one runs on the CPU",
                    hint="name a GPU by `--gpu`",
                )
            search = False
        with PlanSession(planned.recipe, planned.hardware, exact=exact) as plans:
            if calibrate is not None:
                observer.message(plans.calibrate(calibrate))
            decided = plans.decide()
            observer.notices(decided.notices)
            made = replace(plans.with_experts(plans.plan()), decided=planned.forced | decisions(decided))
            observer.planned(made, "recipe")
            return _ranked(plans, planned, made, target or "fastest", write, observer) if search else made


@dataclass(frozen=True, slots=True)
class PlannedHere:
    """The recipe for the GPUs that are planned, and the keys that the user wrote, by section."""

    recipe: Recipe
    hardware: Hardware
    written: dict[str, object]
    forced: dict[str, str]
    """Key → the value that `--num-gpus` forces, with the reason."""


def planned_here(
    loaded: LoadedRecipe, gpu: str | None, num_gpus: int | None, allowed: Allowed, observer: Observer
) -> PlannedHere:
    plain = loaded.recipe
    on_cpu = gpu is None and plain.launch.device == "cpu"
    hardware = None if on_cpu else find_or_read_hardware(gpu) if gpu is not None else _own_gpu()
    options: list[OptionOverride] = []
    forced: dict[str, str] = {}
    if num_gpus is not None:
        machine_devices = devices_of_machine(hardware) if hardware is not None else num_gpus
        options, forced = _on_other_ranks(loaded, num_gpus, machine_devices)
    written = _with_options(loaded, options)
    # GPUs are planned, whatever the recipe runs on here
    if hardware is not None and plain.launch.device != "cuda":
        options.append(OptionOverride(f"plan for {hardware.name}", "launch.device=cuda"))
    resolution = resolve_recipe(_with_options(loaded, options), allowed, observer, planned=hardware)
    check_cache(resolution.recipe)
    observer.notices(resolution.notices)
    if hardware is None:
        budget = budget_of(resolution.recipe, None)
        if budget is None:
            raise usage_error(
                "no-gpu-named", "the memory of this machine is not known", hint="name a GPU by `--gpu`"
            )
        hardware = cpu_rank(budget.usable_bytes)
    return PlannedHere(
        resolution.recipe,
        hardware,
        written.recipe.model_dump(mode="json", by_alias=True, exclude_unset=True),
        forced,
    )


def _with_options(loaded: LoadedRecipe, options: list[OptionOverride]) -> LoadedRecipe:
    return parse_recipe(
        loaded.text, loaded.path, loaded.overrides, name=loaded.recipe.name, options=options, unneeded=INPUTS
    )


def _on_other_ranks(
    loaded: LoadedRecipe, num_gpus: int, machine_devices: int
) -> tuple[list[OptionOverride], dict[str, str]]:
    """Return the keys that `--num-gpus` sets, and those that it forces. Keys given by `--set` are left to
    contradict."""
    machines = machines_for(num_gpus, machine_devices)
    given = {override.partition("=")[0].strip() for override in loaded.overrides}
    forced = {
        key: value
        for key, value in forced_changes(loaded.recipe, World(num_gpus, machines)).items()
        if key not in given
    }
    option = f"--num-gpus {num_gpus}"
    keys = {"launch.num_processes": num_gpus, "launch.num_machines": machines} | forced
    options = [
        OptionOverride(option, f"{key}={value if isinstance(value, str) else json.dumps(value)}")
        for key, value in keys.items()
    ]
    instead = {key: json.dumps(value_of(loaded.recipe, key)) for key in forced}
    return options, {
        key: f"{json.dumps(value)} instead of {instead[key]}, for `{option}`" for key, value in forced.items()
    }


def _own_gpu() -> Hardware:
    name = this_machine("auto").device_name
    found = detect(name)
    if found is not None:
        return found
    problem = f"this machine's {name} is not in the table" if name else "this machine shows no GPU"
    raise usage_error(
        "no-gpu-named", problem, hint=f"name one by `--gpu`: {', '.join(known_hardware())}, or a YAML file"
    )


def _ranked(
    plans: PlanSession,
    planned: PlannedHere,
    made: Plan,
    target: Target,
    write: Path | None,
    observer: Observer,
) -> Plan:
    """Add the ranked recipes and the scaling table to a plan, and write the best recipe."""
    with observer.progress("trying recipes", None, "recipes") as bar:
        found = plans.search(target, lambda _changes: bar.advance())
    best = found.ranked[0].recipe if found.ranked and found.ranked[0].plan.fits != "no" else None
    smallest = plans.smallest_hardware(found.ranked) if best is None else None
    alternatives = tuple(each.plan for each in found.ranked)
    others = plans.other_trainings() if best is None or best.fsdp.offload_params else ()
    made = replace(
        made,
        alternatives=alternatives,
        best_because=found.because,
        smallest_hardware=smallest,
        other_trainings=others,
    )
    observer.planned(made, "ranking")
    made = replace(made, scaling=tuple(plans.scaling()))
    observer.planned(made, "scaling")
    if write is not None:
        if best is None:
            raise usage_error(
                "nothing-fits", f"no recipe fits {made.num_processes} × {made.gpu}, so there is none to write"
            )
        why = [
            f"# {made.recipe} for {made.num_processes} × {made.gpu}, as `fsdp-tune plan` ranks it.",
            f"# Why: {made.best_because}.",
        ]
        write_file(write, recipe_text(plans, write, planned.written, found.ranked[0], why))
        observer.message(f"the best recipe is {write}")
    return made
