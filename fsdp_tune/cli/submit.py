"""`submit`: train a recipe as a job of a cluster, a subcommand for each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from fsdp_tune.cli.screen import Screen
from fsdp_tune.cli.verbs import NamedRecipe, verb
from fsdp_tune.core.command import Option
from fsdp_tune.core.errors import ExitCode, usage_error
from fsdp_tune.core.units import format_seconds
from fsdp_tune.jobs.submit_options import CloudOptions, KubernetesOptions, SlurmOptions, SubmitOptions

if TYPE_CHECKING:
    from fsdp_tune.cluster.submit.container_engines import Engine
    from fsdp_tune.jobs.submit import Submission, SubmitAnswer
    from fsdp_tune.jobs.submit_containers import ManifestAnswer

submit = typer.Typer(name="submit", help="Train a recipe as a job of a cluster.", no_args_is_help=True)


@submit.command("slurm")
@verb
def slurm(
    screen: Screen,
    recipe: NamedRecipe,
    options: SubmitOptions,
    slurm_options: SlurmOptions,
    sweep: Annotated[
        Sequence[str],
        Option(
            "Train once for each value of a key, each run on one node as an element of a job array, in a "
            "directory below `output_dir`; the same command again submits those that have not finished. "
            "Repeatable: all combinations.",
            metavar="KEY=VALUE,VALUE",
        ),
    ] = (),
    print_only: Annotated[
        bool, Option("Print the script; submit and write nothing.", flags=("--print",))
    ] = False,
    follow: Annotated[
        bool, Option("Show the job's state and log until it ends; the exit code is that of the run.")
    ] = False,
    drill: Annotated[
        bool,
        Option(
            "Without a recipe: put a small job in runs/drill through preemption, node loss and the time "
            "limit, and compare its model with that of an undisturbed job. Takes about 20 minutes; affects "
            "no other job."
        ),
    ] = False,
) -> None:
    """Train a recipe as a Slurm job. The job saves before its time limit, and is requeued until the run has
    finished.

    The script and the job's log are in RUN.submit. Your own lines in the script (modules, containers, further
    #SBATCH options) are kept when it is written again. A run that has a job in the queue is not submitted
    twice. Ctrl-C ends `--follow`; the job continues.

    \b
    Examples:
        fsdp-tune submit slurm my.yaml --nodes 2 --gpus-per-node 8 --time 24h --partition gpu
        fsdp-tune submit slurm my.yaml --nodes 2 --gpus-per-node 8 --print
        fsdp-tune submit slurm my.yaml --follow
        fsdp-tune submit slurm my.yaml --gpus-per-node 8 --sweep training.learning_rate=1e-5,2e-5
        fsdp-tune submit slurm --drill --nodes 2 --gpus-per-node 8 --partition gpu
    """
    from fsdp_tune.jobs.submit import submission

    if follow:
        _check_follow(print_only=print_only, is_sweep=bool(sweep))
    if drill:
        is_given = recipe.recipe or recipe.config or recipe.name
        _check_drill(is_alone=not (is_given or print_only or follow or sweep or options.again))
        _drill(screen, options, slurm_options, list(recipe.overrides))
    screen.phase("reading the recipe")
    given = (recipe.source(), recipe.overrides, options, slurm_options)
    made = submission(*given, name=recipe.name, sweep=sweep, is_printed=print_only, observer=screen)
    _submit(screen, made, print_only=print_only, follow=follow)


def _check_drill(*, is_alone: bool) -> None:
    """Raises: usage error if a recipe, or an option of one, is given with `--drill`."""
    if not is_alone:
        hint = "leave out the recipe; only options for the size of the job apply"
        raise usage_error("usage", "`--drill` trains its own recipe", hint=hint)


def _check_follow(*, print_only: bool, is_sweep: bool) -> None:
    """Raises: usage error if there is no run, or more than one, that `--follow` could show."""
    if print_only:
        message, hint = "`--print` submits nothing that `--follow` could show", "pass only one of them"
        raise usage_error("usage", message, hint=hint)
    if is_sweep:
        hint = "`fsdp-tune status DIR --watch` shows all runs of a sweep"
        raise usage_error("usage", "`--follow` shows a single run", hint=hint)


def _submit(screen: Screen, made: Submission, *, print_only: bool, follow: bool) -> None:
    answer = made.printed() if print_only else made.submit(finds=follow)
    screen.document(answer)
    screen.end_phase()
    if not print_only:
        _show(screen, answer)
    elif not screen.json_output:
        screen.result(answer.text)
    if follow and answer.job is not None:
        _follow(screen, answer)


def _drill(
    screen: Screen, options: SubmitOptions, slurm_options: SlurmOptions, overrides: list[str]
) -> NoReturn:
    from fsdp_tune.jobs.drill import drill

    found = drill(options, slurm_options, overrides, screen)
    screen.document(found)
    screen.end_phase()
    rows = [
        [
            each.event,
            f"{each.step:,}",
            f"{each.resumed_at:,}",
            f"{each.lost_steps:,}",
            format_seconds(each.seconds),
            "killed" if each.exit_code is None else str(each.exit_code),
        ]
        for each in found.events
    ]
    screen.table("", ["event", "at step", "resumed at", "lost", "until training", "exit code"], rows)
    verdict = (
        "equals, bit for bit,"
        if found.equal
        else f"differs by up to {found.largest_difference:.2g} in a weight from"
    )
    screen.message(
        f"the model after {found.steps:,} steps {verdict} that of a run without these interruptions"
    )
    raise typer.Exit(ExitCode.OK if found.passed else ExitCode.FAILED)


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
    from fsdp_tune.jobs.following import follow_job

    try:
        ended = follow_job(answer, screen)
    except KeyboardInterrupt:
        screen.message(f"job {answer.job} goes on without this command; `scancel {answer.job}` cancels it")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    screen.document(ended)
    screen.message(f"job {ended.job} ended: {ended.state}, exit code {ended.exit_code}")
    raise typer.Exit(ended.exit_code or 0)


PrintOnly = Annotated[
    bool, Option("Print the file and write nothing, as without `--output`.", flags=("--print",))
]


def _check_output(options: KubernetesOptions | CloudOptions, *, print_only: bool) -> None:
    if print_only and options.output is not None:
        raise usage_error(
            "usage", "`--print` writes no file, and `--output` names one", hint="pass only one of them"
        )


@submit.command("kubernetes")
@verb
def kubernetes(
    screen: Screen, recipe: NamedRecipe, options: KubernetesOptions, print_only: PrintOnly = False
) -> None:
    """Write the manifest of a recipe for Kubernetes: the recipe, the job and its network in one file. Submits
    nothing.

    Exit codes 2, 3 and 4 end the job. A preempted, stopped (143) or lost run is started again from its newest
    checkpoint.

    \b
    Example:
        fsdp-tune submit kubernetes my.yaml --kind jobset --image registry/fsdp-tune@sha256:… --pvc runs:/runs \\
          --set output_dir=/runs/my --secret HF_TOKEN=hub > my.job.yaml
    """  # noqa: E501
    from fsdp_tune.jobs.submit_containers import kubernetes_manifest

    _check_output(options, print_only=print_only)
    _render(
        screen,
        kubernetes_manifest(recipe.source(), recipe.overrides, options, name=recipe.name, observer=screen),
    )


@submit.command("skypilot")
@verb
def skypilot(
    screen: Screen, recipe: NamedRecipe, options: CloudOptions, print_only: PrintOnly = False
) -> None:
    """Write the task file of a recipe for SkyPilot. Submits nothing.

    \b
    Example:
        fsdp-tune submit skypilot my.yaml --gpu H100 --volume runs:/runs --set output_dir=/runs/my --output my.sky.yaml
    """  # noqa: E501
    _check_output(options, print_only=print_only)
    _cloud(screen, recipe, options, "skypilot")


@submit.command("dstack")
@verb
def dstack(screen: Screen, recipe: NamedRecipe, options: CloudOptions, print_only: PrintOnly = False) -> None:
    """Write the task file of a recipe for dstack. Submits nothing.

    \b
    Example:
        fsdp-tune submit dstack my.yaml --gpu H100 --image registry/fsdp-tune@sha256:… --volume runs:/runs --set output_dir=/runs/my
    """  # noqa: E501
    _check_output(options, print_only=print_only)
    _cloud(screen, recipe, options, "dstack")


def _cloud(screen: Screen, recipe: NamedRecipe, options: CloudOptions, engine: Engine) -> None:
    from fsdp_tune.jobs.submit_containers import cloud_task

    _render(
        screen,
        cloud_task(recipe.source(), recipe.overrides, options, engine, name=recipe.name, observer=screen),
    )


def _render(screen: Screen, made: ManifestAnswer) -> None:
    screen.end_phase()
    screen.document(made)
    if not screen.json_output and made.output is None:
        screen.result(made.manifest)
    elif made.output is not None:
        screen.message(f"wrote {made.output}; submit it with `{made.commands[0]}`")
