"""`submit`: train a recipe as a job of a cluster, a subcommand for each engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import NamedRecipe, verb
from fsdp_tune.core.command import Option
from fsdp_tune.core.errors import ExitCode, usage_error
from fsdp_tune.jobs.options import CloudOptions, KubernetesOptions, SlurmOptions, SubmitOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.manifests import ManifestAnswer
    from fsdp_tune.jobs.submit import SubmitAnswer
    from fsdp_tune.launch.submit.clouds import Engine

submit = typer.Typer(name="submit", help="Train a recipe as a job of a cluster.", no_args_is_help=True)


@submit.command("slurm")
@verb
def slurm(
    screen: Screen,
    recipe: NamedRecipe,
    options: SubmitOptions,
    slurm_options: SlurmOptions,
    print_only: Annotated[bool, Option("Print the script; submit and write nothing.", flags=("--print",))] = False,
    follow: Annotated[bool, Option("Show the job's state and log until it ends; the exit code is that of the run.")] = False,
) -> None:
    """Train a recipe as a Slurm job, which saves before its time limit and is requeued until the run has finished.

    The script and the job's log are in RUN.submit. Your own lines in the script (modules, containers, further #SBATCH options) are kept
    when it is written again. A run that has a job in the queue is not submitted twice. Ctrl-C ends `--follow` and leaves the job alone.

    \b
    Examples:
        fsdp-tune submit slurm my.yaml --nodes 2 --gpus-per-node 8 --time 24h --partition gpu
        fsdp-tune submit slurm my.yaml --nodes 2 --gpus-per-node 8 --print
        fsdp-tune submit slurm my.yaml --follow
    """
    from fsdp_tune.jobs.submit import submission

    if print_only and follow:
        raise usage_error("usage", "`--print` submits nothing that `--follow` could show", hint="pass only one of them")
    screen.phase("reading the recipe")
    made = submission(recipe.source(), recipe.overrides, options, slurm_options, name=recipe.name, observer=screen)
    if print_only:
        answer = made.printed()
        screen.document(answer)
        if not screen.json_output:
            screen.end_phase()
            screen.result(answer.text)
        return
    answer = made.submit(finds=follow)
    screen.document(answer)
    screen.end_phase()
    _show(screen, answer)
    if follow and answer.job is not None:
        _follow(screen, answer)


def _show(screen: Screen, answer: SubmitAnswer) -> None:
    if answer.job is None:
        screen.message(f"{answer.run_dir} has finished; nothing is submitted")
        return
    if answer.state != "submitted":
        screen.message(f"job {answer.job} is in the queue already ({answer.state}); nothing is submitted")
        return
    size = f"{answer.machines} nodes" if answer.machines > 1 else "1 node"
    gpus = f" × {answer.gpus_per_machine} GPUs" if answer.gpus_per_machine else ""
    screen.message(f"job {answer.job} submitted: {size}{gpus}; the run is {answer.run_dir}")
    if answer.lead_seconds is not None:
        screen.message(f"told to stop {answer.lead_seconds} s before its time limit: {answer.lead_reason}")
    screen.message(f"script: {answer.script}")
    screen.message(f"log: {answer.log}")


def _follow(screen: Screen, answer: SubmitAnswer) -> None:
    from fsdp_tune.jobs.submit import follow_job

    try:
        ended = follow_job(answer, screen)
    except KeyboardInterrupt:
        screen.message(f"job {answer.job} goes on without this command; `scancel {answer.job}` cancels it")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    screen.document(ended)
    screen.message(f"job {ended.job} ended: {ended.state}, exit code {ended.exit_code}")
    raise typer.Exit(ended.exit_code or 0)


@submit.command("kubernetes")
@verb
def kubernetes(screen: Screen, recipe: NamedRecipe, options: KubernetesOptions) -> None:
    """Write the manifest of a recipe for Kubernetes: the recipe, the job and its network in one file. Submits nothing.

    Mistakes (exit codes 2, 3 and 4) end the job; a preempted, stopped (143) or lost run is started again from its newest checkpoint.

    \b
    Example:
        fsdp-tune submit kubernetes my.yaml --kind jobset --image registry/fsdp-tune@sha256:… --pvc runs:/runs \\
          --set output_dir=/runs/my --secret HF_TOKEN=hub > my.job.yaml
    """
    from fsdp_tune.jobs.manifests import kubernetes_manifest

    _render(screen, kubernetes_manifest(recipe.source(), recipe.overrides, options, name=recipe.name, observer=screen))


@submit.command("skypilot")
@verb
def skypilot(screen: Screen, recipe: NamedRecipe, options: CloudOptions) -> None:
    """Write the task file of a recipe for SkyPilot. Submits nothing.

    \b
    Example:
        fsdp-tune submit skypilot my.yaml --gpu H100 --volume runs:/runs --set output_dir=/runs/my --output my.sky.yaml
    """
    _cloud(screen, recipe, options, "skypilot")


@submit.command("dstack")
@verb
def dstack(screen: Screen, recipe: NamedRecipe, options: CloudOptions) -> None:
    """Write the task file of a recipe for dstack. Submits nothing.

    \b
    Example:
        fsdp-tune submit dstack my.yaml --gpu H100 --image registry/fsdp-tune@sha256:… --volume runs:/runs --set output_dir=/runs/my
    """
    _cloud(screen, recipe, options, "dstack")


def _cloud(screen: Screen, recipe: NamedRecipe, options: CloudOptions, engine: Engine) -> None:
    from fsdp_tune.jobs.manifests import cloud_task

    _render(screen, cloud_task(recipe.source(), recipe.overrides, options, engine, name=recipe.name, observer=screen))


def _render(screen: Screen, made: ManifestAnswer) -> None:
    screen.end_phase()
    screen.document(made)
    if not screen.json_output and made.output is None:
        screen.result(made.manifest)
    elif made.output is not None:
        screen.message(f"wrote {made.output}; submit it with `{made.commands[0]}`")
