"""Connect the machines of a run: several find each other before the first decides where it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.core.units import parse_seconds
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.resizing import OwnRun, announce_end
from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.machines.channel import network_message, open_channel
from fsdp_tune.launch.machines.directories import OwnDirectory
from fsdp_tune.launch.machines.identity import identity_of
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.recipe.extensions import Extension
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.schema.recipe import Recipe


@contextmanager
def connecting(
    loaded: LoadedRecipe,
    recipe: Recipe,
    plan: LaunchPlan,
    extensions: Sequence[Extension],
    options: TrainOptions,
    observer: Observer,
) -> Iterator[Machines]:
    """Yield the machines of the run; several find each other in this context."""
    with ExitStack() as stack:
        own = OwnRun(loaded, recipe, plan, extensions, options, observer, stack)
        folder = stack.enter_context(temporary_directory("channel-")) if recipe.has_own_directories else None
        machines = stack.enter_context(_machines(own, folder))
        stack.push(partial(announce_end, observer, machines))
        if folder is not None and plan.machine_rank > 0:
            own.prepare(machines.advance)
        yield machines


def _machines(own: OwnRun, folder: Path | None) -> Machines:
    """`folder`: where the channel finds archives; None if all machines see the run directory."""
    plan, recipe = own.plan, own.recipe
    if plan.first_machine is None:
        return Machines(plan.run)
    ip, port = plan.first_machine.ip, plan.first_machine.control_port
    own.observer.message(network_message(plan.route, ip, plan.env))
    extensions = [f"extension {each.kind} {each.name} {each.version}" for each in own.extensions]
    return Machines(
        plan.run,
        plan.machine_rank,
        recipe.launch.num_machines,
        hang_seconds=parse_seconds(recipe.launch.hang_timeout),
        replacement_seconds=parse_seconds(recipe.launch.replacement_timeout),
        channel=open_channel(plan.machine_rank, recipe.launch.num_machines, ip, port, folder),
        identity=identity_of(recipe, plan.env, extensions),
        directory=OwnDirectory(
            plan.run, folder, digests=recipe.checkpoint.verify == "digest", install=own.install
        )
        if folder
        else None,
    )
