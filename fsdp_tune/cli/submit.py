"""The commands that make a recipe's file for a scheduler, a cluster or a cloud."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fsdp_tune.cli.output import Screen
from fsdp_tune.cli.verbs import NamedRecipe, verb
from fsdp_tune.jobs.options import CloudOptions, KubernetesOptions

if TYPE_CHECKING:
    from fsdp_tune.jobs.answers import ManifestAnswer
    from fsdp_tune.launch.submit.clouds import Engine

submit = typer.Typer(name="submit", help="Run a recipe through a scheduler, in a cluster or in a cloud.", no_args_is_help=True)


@submit.command("kubernetes")
@verb
def submit_kubernetes(screen: Screen, recipe: NamedRecipe, options: KubernetesOptions) -> None:
    """Write the manifest of a recipe for Kubernetes: the recipe, the job and its network in one file. Submits nothing.

    Mistakes (exit codes 2, 3 and 4) end the job; a preempted, stopped (143) or lost run is started again from its newest checkpoint.

    \b
    Example:
        fsdp-tune submit kubernetes my.yaml --kind jobset --image registry/fsdp-tune@sha256:… --pvc runs:/runs \\
          --set output_dir=/runs/my --secret HF_TOKEN=hub > my.job.yaml
    """
    from fsdp_tune.jobs.submit import submit_kubernetes

    _show(screen, submit_kubernetes(recipe.load(), options, observer=screen))


@submit.command("skypilot")
@verb
def submit_skypilot(screen: Screen, recipe: NamedRecipe, options: CloudOptions) -> None:
    """Write the task file of a recipe for SkyPilot. Submits nothing.

    \b
    Example:
        fsdp-tune submit skypilot my.yaml --gpu H100 --volume runs:/runs --set output_dir=/runs/my --output my.sky.yaml
    """
    _cloud(screen, recipe, options, "skypilot")


@submit.command("dstack")
@verb
def submit_dstack(screen: Screen, recipe: NamedRecipe, options: CloudOptions) -> None:
    """Write the task file of a recipe for dstack. Submits nothing.

    \b
    Example:
        fsdp-tune submit dstack my.yaml --gpu H100 --image registry/fsdp-tune@sha256:… --volume runs:/runs --set output_dir=/runs/my
    """
    _cloud(screen, recipe, options, "dstack")


def _cloud(screen: Screen, recipe: NamedRecipe, options: CloudOptions, engine: Engine) -> None:
    from fsdp_tune.jobs.submit import submit_cloud

    _show(screen, submit_cloud(recipe.load(), options, engine, observer=screen))


def _show(screen: Screen, made: ManifestAnswer) -> None:
    screen.document(made)
    if not screen.json_output and made.output is None:
        screen.result(made.manifest)
    elif made.output is not None:
        screen.message(f"wrote {made.output}; submit it with `{made.commands[0]}`")
