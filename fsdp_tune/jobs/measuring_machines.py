"""`plan --measure` on several machines: the first one ranks recipes and calls each trial, and all train it.

A trial is a launch of `train`. So the first machine's files decide what its ranks train, and the recipe of
another machine only has to be equal where `train` compares it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from fsdp_tune.core.errors import STOP_CODES, ExitCode, FsdpTuneError, failed_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.recipes import resolve_recipe
from fsdp_tune.jobs.trial import FOLDER_PREFIX, TrialSettings, folder_of_trials
from fsdp_tune.launch.command.accelerate import check_machine_rank, machine_rank_of, main_process_address
from fsdp_tune.launch.machines.calls import FirstMachine, LaunchCall, OtherMachine
from fsdp_tune.launch.machines.channel import Channel, open_channel
from fsdp_tune.launch.machines.directories import READ_SECONDS, VISIBLE_SECONDS
from fsdp_tune.launch.machines.store import SERVED_SECONDS
from fsdp_tune.planner.predict.predict import MeasuredPlan, Plan
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.rank_files import ECHO_CODES

_RUN = re.compile(rf"({re.escape(FOLDER_PREFIX)}\w+)/(\d+)", re.ASCII)
"""What a call names. The store has no authentication, so no other path is used."""


def machine_of(recipe: Recipe, given: int | None) -> int:
    """Return the number of this machine; `given` as for `train`. Raises: usage error if it is unknown or not
    one of the recipe's."""
    machine = machine_rank_of(recipe, given, os.environ)
    check_machine_rank(machine, recipe.launch.num_machines)
    return machine


@contextmanager
def calling(recipe: Recipe, settings: TrialSettings, observer: Observer) -> Iterator[FirstMachine | None]:
    """Yield what calls the other machines, and tell them at the end how this command ends; None for a single
    machine."""
    machines = recipe.launch.num_machines
    if machines == 1:
        yield None
        return
    with FirstMachine(_opens(recipe, 0), machines, settings.hang_seconds(recipe)) as caller:
        try:
            yield caller
        except (FsdpTuneError, StoppedBySignal) as error:
            observer.message(
                f"{error.problems[0].message}; this machine tells the others before it ends (at most "
                f"{SERVED_SECONDS:g} s)"
            )
            raise


def follow(loaded: LoadedRecipe, settings: TrialSettings, observer: Observer) -> Plan:
    """Train each trial with the first machine. Returns its plan with the measured recipes, without others.

    Raises: FsdpTuneError if it has failed or was stopped, or if this machine cannot follow.
    """
    machine = machine_of(loaded.recipe, settings.machine_rank)
    with OtherMachine(_opens(loaded.recipe, machine)) as calls, ExitStack() as stack:
        resolution = resolve_recipe(loaded, settings.allowed, observer, starts_ranks=True, starts_here=True)
        observer.notices(resolution.notices)
        output = Path(resolution.recipe.output_dir)
        own = stack.enter_context(folder_of_trials(output)) if resolution.recipe.has_own_directories else None
        observer.message(f"machine {machine}: waiting for the first machine, which ranks recipes")
        while (call := calls.next_call()).state != "final":
            observer.message(f"machine {machine}: measuring, trial {call.call}")
            folder = _run_directory(call, output, own)
            try:
                settings.train(loaded, folder)
            except FsdpTuneError as error:
                is_stop = error.exit_code in STOP_CODES
                is_own = error.exit_code is ExitCode.USAGE and error.problems[0].code not in ECHO_CODES
                if is_stop or is_own:  # else the first machine decides whether the next trial is started
                    raise
                observer.message(f"not measured: {error.problems[0].message}")
        made = _plan_of(call)
        observer.planned(made, "measured")
        return made


def _opens(recipe: Recipe, machine: int) -> Callable[[str], Channel]:
    """Return what opens a channel of a topic to the store of the first machine.

    Raises: usage error if its address is unknown.
    """
    address = main_process_address(recipe, os.environ)
    machines, port = recipe.launch.num_machines, address.control_port
    return lambda topic: open_channel(machine, machines, address.ip, port, topic=topic)


def _run_directory(call: LaunchCall, output: Path, own: Path | None) -> Path:
    """Return the run directory of a trial: in `own`, or on the disk that all machines see.

    Raises: FailedError if it is not there.
    """
    if (found := _RUN.fullmatch(call.run)) is None:
        raise failed_error("machine-failed", f"machine 0 has called a run `{call.run[:80]}`")
    if own is not None:
        return own / found[2]
    parents, deadline = (output.absolute(), *output.absolute().parents), time.monotonic() + VISIBLE_SECONDS
    while True:
        for parent in parents:
            if (parent / found[1]).is_dir():
                return parent / call.run
        if time.monotonic() > deadline:
            message = f"this machine does not see the directory of machine 0 above {output}: {found[1]}"
            hint = (
                "`output_dir` must be one directory that all machines see; `launch.shared_directory: false` "
                "gives each machine its own"
            )
            raise failed_error("run-directory-not-shared", message, hint=hint)
        time.sleep(READ_SECONDS)


def _plan_of(call: LaunchCall) -> Plan:
    """Return the plan of the first machine. Raises: FailedError if it is not one."""
    try:
        found: dict[str, Any] = (call.result or {})["plan"]
        measured = TypeAdapter(tuple[MeasuredPlan, ...]).validate_python(found["measured"])
        return replace(Plan.from_dict(found), measured=measured)
    except (KeyError, TypeError, ValueError) as error:
        raise failed_error("machine-failed", f"machine 0 has sent no plan: {error}") from error
