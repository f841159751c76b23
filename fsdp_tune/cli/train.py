"""`train`: validate → prepare → write the run directory → launch → merge. Each step is an engine's; this file is their order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    VerifyDataOption,
    asked_recipe,
    chosen_recipe,
)
from fsdp_tune.cli.output import Screen, command, stopping_cleanly
from fsdp_tune.core.errors import usage_error

if TYPE_CHECKING:
    from fsdp_tune.launch.command.accelerate import LaunchPlan
    from fsdp_tune.recipe.resolve import Resolution
    from fsdp_tune.recipe.schema import Recipe


def _start_of(resume: str | None) -> str | None:
    """`never` is what happens without the option."""
    return None if resume == "never" else resume


ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|never|PATH",
        help="auto: the newest complete checkpoint of the run. PATH: that checkpoint.",
        callback=_start_of,
        show_default=False,
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Move a used run directory aside and begin anew.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved recipe, the command and the environment; start and write nothing.")
]
NoStartOption = Annotated[bool, typer.Option("--no-start", help="Write the run directory and print the commands that start it.")]
MachineRankOption = Annotated[
    int | None,
    typer.Option(
        "--machine-rank", metavar="N", help="Which machine this is, 0 being the first; inside `srun` Slurm says it.", show_default=False
    ),
]
IgnorePlanOption = Annotated[
    bool, typer.Option("--ignore-plan", help="Start also what the planner says cannot fit on this machine's GPUs.")
]
FullOption = Annotated[bool, typer.Option("--full", help="With --dry-run: print every key, not only those that differ from the defaults.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Print every value and kernel that was chosen, with the reason.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="steps=FIRST:LAST",
        help="Record these steps: RUN/profile gets a Chrome trace of each rank, and what the steps were made of.",
        show_default=False,
    ),
]


def train(
    context: typer.Context,
    recipe: ConfigArg = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    name: NameOption = None,
    resume: ResumeOption = None,
    overwrite: OverwriteOption = False,
    dry_run: DryRunOption = False,
    full: FullOption = False,
    no_start: NoStartOption = False,
    machine_rank: MachineRankOption = None,
    trust_remote_code: TrustOption = False,
    allow_env: AllowEnvOption = None,
    ignore_plan: IgnorePlanOption = False,
    verify_data: VerifyDataOption = False,
    profile: ProfileOption = None,
    verbose: VerboseOption = False,
    json_output: JsonOption = False,
) -> None:
    """Fine-tune a model as a recipe says, and merge the result into an ordinary model directory.

    Exit codes: 0 finished, 1 failed, 2 recipe or usage, 3 out of device memory, 4 non-finite, 5 hang or lost rank,
    130 Ctrl-C after saving, 143 saved and stopped. Arguments after `--` go to `accelerate launch`.

    \b
    Examples:
        fsdp-tune train --config gpt2_smoke
        fsdp-tune train my.yaml --set training.learning_rate=1e-4 --resume auto
        fsdp-tune train llama7b_full_shard --dry-run
    """
    with command(json_output) as screen, stopping_cleanly():
        from fsdp_tune.launch.command.accelerate import machine_rank_of
        from fsdp_tune.run.launch_files import parse_profile

        if full and not dry_run:
            raise usage_error("usage", "`--full` belongs to `--dry-run`", hint="add `--dry-run`, or leave out `--full`")
        profiled = parse_profile(profile) if profile is not None else None
        starts_here = not (dry_run or no_start)
        chosen, allowed = chosen_recipe(recipe, config), Allowed(trust_remote_code, allow_env or ())
        asked = asked_recipe(screen, chosen, overrides, name=name, starts_here=starts_here, needs_trackers=True, allowed=allowed)
        loaded, resolution = asked.loaded, asked.resolution
        screen.notices(resolution.notices)
        rank = machine_rank_of(resolution.recipe, machine_rank, os.environ) if starts_here else machine_rank or 0
        plan = _launch_plan(resolution.recipe, rank, context.meta.get("launcher_arguments", ()), starts_here=starts_here)
        if dry_run:
            _dry_run(screen, resolution, plan, resume, overwrite=overwrite, full=full)
            return
        from fsdp_tune.cli.train_job import Job

        job = Job(screen, loaded, resolution, plan, ignore_plan=ignore_plan, verify_data=verify_data, profile=profiled, verbose=verbose)
        if rank > 0:
            job.follow(resume)
        else:
            job.lead(resume, overwrite=overwrite, no_start=no_start)


def _launch_plan(recipe: Recipe, rank: int, extra: Sequence[str], *, starts_here: bool) -> LaunchPlan:
    from fsdp_tune.launch.command.accelerate import launch_plan
    from fsdp_tune.run.directory import RunDir

    unknown_address = None if starts_here else "FIRST_MACHINE"
    return launch_plan(recipe, RunDir(Path(recipe.output_dir)), machine_rank=rank, extra=extra, unknown_address=unknown_address)


def _dry_run(screen: Screen, resolution: Resolution, plan: LaunchPlan, resume: str | None, *, overwrite: bool, full: bool) -> None:
    from fsdp_tune.cli.train_view import show_dry_run
    from fsdp_tune.launch.command.resume import decide

    show_dry_run(screen, resolution, plan, decide(plan.run, resolution.recipe, resume, overwrite=overwrite, digests=False), full=full)
