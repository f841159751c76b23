"""`train`: validate → prepare → write the run directory → launch → merge."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdp_tune.cli.options import (
    AllowEnvOption,
    AllowExtensionsOption,
    ConfigArg,
    ConfigOption,
    JsonOption,
    NameOption,
    SetOption,
    TrustOption,
    VerifyDataOption,
    chosen_recipe,
)
from fsdp_tune.cli.output import command
from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, usage_error


def _resume_of(resume: str | None) -> str | None:
    """Return None for `never`, which is the default."""
    return None if resume == "never" else resume


ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|never|PATH",
        help="auto: the newest complete checkpoint of the run. PATH: that checkpoint.",
        callback=_resume_of,
        show_default=False,
    ),
]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Move a used run directory aside and start over.")]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the resolved recipe, the command and the environment; start and write nothing.")
]
NoStartOption = Annotated[bool, typer.Option("--no-start", help="Write the run directory and print the commands that start it.")]
MachineRankOption = Annotated[
    int | None,
    typer.Option(
        "--machine-rank", metavar="N", help="Which machine this is, 0 being the first; inside `srun` taken from Slurm.", show_default=False
    ),
]
IgnorePlanOption = Annotated[bool, typer.Option("--ignore-plan", help="Start even if the plan does not fit this machine's GPUs.")]
FullOption = Annotated[bool, typer.Option("--full", help="With --dry-run: print every key, not only those that differ from the defaults.")]
VerboseOption = Annotated[bool, typer.Option("--verbose", help="Print every value and kernel that was chosen, with the reason.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="steps=FIRST:LAST",
        help="Record these steps: RUN/profile gets a Chrome trace of each rank and a breakdown of the steps.",
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
    allow_extensions: AllowExtensionsOption = False,
    ignore_plan: IgnorePlanOption = False,
    verify_data: VerifyDataOption = False,
    profile: ProfileOption = None,
    verbose: VerboseOption = False,
    json_output: JsonOption = False,
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
    with command(json_output) as screen:
        import fsdp_tune
        from fsdp_tune.cli import train_view as view
        from fsdp_tune.jobs.train import WrittenRun, preview, write_only
        from fsdp_tune.run.launch_files import parse_profile

        if full and not dry_run:
            raise usage_error("usage", "`--full` belongs to `--dry-run`", hint="add `--dry-run`, or leave out `--full`")
        loaded = fsdp_tune.load_recipe(chosen_recipe(recipe, config), overrides or (), name=name)
        options = fsdp_tune.TrainOptions(
            resume=resume,
            overwrite=overwrite,
            machine_rank=machine_rank,
            profile=parse_profile(profile) if profile is not None else None,
            ignore_plan=ignore_plan,
            verify_data=verify_data,
            allowed=fsdp_tune.Allowed(trust_remote_code, allow_env or (), allow_extensions),
            **context.meta["arguments"],
        )
        screen.verbose = verbose
        if dry_run:
            view.show_preview(screen, preview(loaded, options, observer=screen), full=full)
            return
        result = (write_only if no_start else fsdp_tune.train)(loaded, options, observer=screen)
        if not isinstance(result, WrittenRun):
            view.show_end(screen, result)
            raise typer.Exit(EXIT_CODE_OF_REASON[result.exit_reason])
        view.show_commands(screen, result)
