"""The files of a run over several machines that depend on the machine, and on how many there are.

Continue a run on fewer machines, or on more of them again: its recipe, launch and files for each number
(`launch.min_machines`). Write the run directory of a machine with its own (`launch.shared_directory: false`)
from the first machine's files.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from fsdp_tune.core.atomic import write_file
from fsdp_tune.core.devices import visible_devices
from fsdp_tune.core.errors import FsdpTuneError, Problem, usage_error
from fsdp_tune.core.host import host
from fsdp_tune.core.package_versions import versions
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.data.preparation import prepare as prepare_data
from fsdp_tune.data.read.sources import OF_ROWS
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.jobs.checkpoint_scorer import scored_where_there_is_room
from fsdp_tune.jobs.machine_plan import keep_prediction, plan_here, refuse_what_cannot_fit
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.launch.command.accelerate import LaunchPlan, launch_plan
from fsdp_tune.launch.command.recipe_changes import check, compare
from fsdp_tune.launch.command.resume import Start, decide_start, move_aside, read_resolved
from fsdp_tune.launch.command.run_files import RunFiles, write_resized, write_run
from fsdp_tune.launch.machines.channel import CountedBar
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.machines.store import SERVED_SECONDS
from fsdp_tune.launch.supervise.attempts import Resized
from fsdp_tune.model.model_files import ModelFacts
from fsdp_tune.recipe.extensions import Extension
from fsdp_tune.recipe.fewer_machines import recipe_for_machines, smaller_sizes
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.claim import locked
from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, Held, RunDir, checkpoint_step
from fsdp_tune.run.launch_files import LaunchRecord, ResumeRequest
from fsdp_tune.run.manifest import Manifest
from fsdp_tune.run.records import Environment


@dataclass(frozen=True)
class Resizing:
    """The sizes of a run on one of its machines."""

    loaded: LoadedRecipe
    resolved: Recipe
    """For all machines, as the run started."""
    run: RunDir
    machine: int
    options: TrainOptions
    observer: Observer
    model: ModelFacts | None = None
    """None on a machine that is not the first, which decides nothing."""

    @classmethod
    def of(
        cls,
        loaded: LoadedRecipe,
        resolved: Recipe,
        run: RunDir,
        machine: int,
        options: TrainOptions,
        observer: Observer,
        model: ModelFacts | None = None,
    ) -> Resizing | None:
        """Return None if the run needs all of its machines."""
        resizing = cls(loaded, resolved, run, machine, options, observer, model)
        return resizing if len(resizing._sizes) > 1 else None

    @cached_property
    def _sizes(self) -> frozenset[int]:
        smaller = smaller_sizes(self.loaded.recipe, self.resolved).items()
        return frozenset(
            {self.resolved.launch.num_machines, *(machines for machines, reason in smaller if reason is None)}
        )

    def allows(self, machines: int) -> bool:
        """Return whether the run can continue on this number of machines."""
        return machines in self._sizes

    def plan(self, members: Sequence[int]) -> LaunchPlan:
        """Return the launch of this machine. Its files are named by its own number, which its ranks do not
        depend on."""
        return self._plan(self._resolve(len(members)).recipe, members)

    def _plan(self, recipe: Recipe, members: Sequence[int]) -> LaunchPlan:
        made = launch_plan(
            recipe, self.run, machine_rank=members.index(self.machine), extra=self.options.launcher_arguments
        )
        return replace(made, machine_rank=self.machine)

    def resize(self, members: Sequence[int]) -> Resized:
        """Write the files of the run for these machines.

        Raises: FsdpTuneError if the recipe does not fit their memory, or would not continue the same
        training.
        """
        self.observer.phase(f"planning for {len(members)} of {self.resolved.launch.num_machines} machines")
        resolution = self._resolve(len(members))
        decided, predicted, notices = plan_here(resolution.recipe)
        self.observer.notices(notices)
        if not self.options.ignore_plan:
            refuse_what_cannot_fit(predicted)
        recipe = decided.recipe.model_copy(
            update={"model": self.resolved.model, "data": self.resolved.data, "lora": self.resolved.lora}
        )
        if changed := check(compare(self.resolved, recipe)):
            raise AssertionError(f"another number of machines changes {', '.join(map(str, changed))}")
        if self.model is not None and not self.options.ignore_plan:
            recipe, notices = scored_where_there_is_room(recipe, self.model, predicted)
            self.observer.notices(notices)
        plan = self._plan(recipe, members)
        write_resized(self.run, recipe, resolution.reasons | decided.reasons, plan)
        keep_prediction(self.run, predicted)
        return Resized(
            plan, self._start_step(), recipe.world_size, recipe.training.gradient_accumulation_steps or 1
        )

    def _resolve(self, machines: int) -> Resolution:
        recipe = self.loaded.recipe
        if machines != self.resolved.launch.num_machines:
            recipe = recipe_for_machines(recipe, self.resolved, machines)
        sized = replace(self.loaded, recipe=recipe)
        return resolve_recipe(
            sized,
            self.options.allowed,
            Observer(),
            starts_ranks=True,
            starts_here=True,
            resume=self.options.resume,
        )

    def _start_step(self) -> int:
        request = ResumeRequest.read(self.run.resume_json)
        return (
            (checkpoint_step(Path(request.resume_from)) or 0)
            if request is not None and request.resume_from is not None
            else 0
        )


@dataclass
class OwnRun:
    """The run directory of this machine, which is not the first. It prepares the same data from its own
    sources."""

    loaded: LoadedRecipe
    recipe: Recipe
    """As this machine has resolved it."""
    plan: LaunchPlan
    extensions: Sequence[Extension]
    options: TrainOptions
    observer: Observer
    stack: ExitStack
    """Ends with the command; it gets the lock of the directory."""
    _data: Prepared | None = None
    _is_locked: bool = False
    _starts_over: bool = field(init=False)
    """Whether the directory is still that of a run to move aside for `--overwrite`."""

    def __post_init__(self) -> None:
        self._starts_over = self.options.overwrite and self.plan.run.is_used

    def prepare(self, advance: Callable[[int], None]) -> None:
        """Check the directory, and prepare the data, counting rows. Raises: FsdpTuneError."""
        run, options = self.plan.run, self.options
        decide_start(
            run, self.recipe, options.resume, overwrite=options.overwrite, digests=False, elsewhere=None
        )
        check_cache(self.recipe)
        if run.is_used and not self._starts_over:
            self._lock()
        encoder = load_encoder(self.recipe)
        with self.observer.progress("tokenising", None, "rows") as bar:
            progress = CountedBar(bar, advance)
            self._data = prepare_data(
                self.recipe, encoder, progress=progress, verify=options.verify_data, run=run.path
            )

    def _lock(self) -> None:
        if not self._is_locked:
            self.observer.notices(self.stack.enter_context(locked(self.plan.run)))
            self._is_locked = True

    def install(self, received: RunDir) -> Problem | None:
        """Write the run directory from the files of the first machine. Returns why this machine cannot take
        part, or None."""
        theirs, record = Prepared.read(received.data_json), LaunchRecord.read(received.launch_json)
        environment = Environment.read(received.environment_json) or Environment()
        request, data = ResumeRequest.read(received.resume_json) or ResumeRequest(), self._data
        assert data is not None, "the data are prepared before"
        if theirs is None or record is None:
            return Problem("run-files-missing", "machine 0 has sent no data.json or launch.json")
        first = read_resolved(received)
        problem = other_data(
            f"machine {self.plan.machine_rank} ({socket.gethostname()})", data, theirs
        ) or self._start_over(request)
        if problem is not None:
            return problem
        run = self.plan.run
        # also one that another command has made since: that of machine 0 if both see one directory
        if not (is_new := not run.is_used):
            try:
                self._lock()
            except FsdpTuneError as error:
                return replace(
                    error.problems[0],
                    hint="if all machines see this directory, set `launch.shared_directory: true`",
                    ways_out=(),
                )
        own = {
            "output_dir": self.recipe.output_dir,
            "data": first.data.model_copy(update={"cache_dir": self.recipe.data.cache_dir}),
        }
        files = RunFiles(
            recipe_text=received.recipe_yaml.read_text(encoding="utf-8"),
            overrides=(),
            recipe=first.model_copy(update=own),
            reasons=record.reasons,
            plan=self.plan,
            environment=Environment(
                versions(),
                host(),
                recorded_devices(),
                [each.as_dict() for each in self.extensions],
                environment.base,
            ),
            data=replace(data, skipped=theirs.skipped, attempts=theirs.attempts),
            start=self._start(request, is_new=is_new),
            save_model=partial(_copy_files, received.model),
            profile=record.profile,
            command=self.options.command,
            saves=request.saves,
            first_machine={"host": str(environment.host.get("name")), "directory": first.output_dir},
        )
        write_run(run, files)
        if received.plan_json.exists():
            write_file(run.plan_json, received.plan_json.read_bytes())
        self._lock()
        return None

    def _start_over(self, request: ResumeRequest) -> Problem | None:
        """Move the old run aside for `--overwrite`, before the first launch, now that machine 0 has accepted
        the start."""
        if not self._starts_over:
            return None
        if request.resume_from is not None:
            message = (
                f"machine {self.plan.machine_rank} was started with `--overwrite`, and machine 0 resumes "
                f"from {request.resume_from}"
            )
            return Problem(
                "machines-differ", message, hint="pass `--overwrite` on all machines, or `--resume` on all"
            )
        try:
            self.observer.message(f"the old run is now {move_aside(self.plan.run)}")
        except FsdpTuneError as error:
            return error.problems[0]
        self._starts_over = False
        return None

    def _start(self, request: ResumeRequest, *, is_new: bool) -> Start:
        """Return the start of the first machine, in this machine's directory. Its manifest may not be here
        yet."""
        start = Start(
            is_new=is_new,
            digests_checked=request.digests_checked,
            from_run=tuple(request.from_run),
            ends_here=request.ends_at is not None,
        )
        step = checkpoint_step(Path(request.resume_from)) if request.resume_from is not None else None
        if step is None:
            return start
        return replace(
            start, checkpoint=Checkpoint(self.plan.run.checkpoint(step), step, Manifest(CHECKPOINT_KIND, {}))
        )


def held_elsewhere(
    machines: Machines | None, run: RunDir, recipe: Recipe, options: TrainOptions
) -> Sequence[Held] | None:
    """Return what other machines have of the checkpoints of a run that continues, as `decide_start` takes it.

    Waits for the machines, unless the run has finished: then None. Raises: FsdpTuneError if one is missing.
    """
    if machines is None or options.resume is None or not recipe.has_own_directories:
        return ()
    found = decide_start(
        run, recipe, options.resume, overwrite=options.overwrite, digests=False, elsewhere=None
    )
    return None if found.is_finished else machines.held_elsewhere()


def other_data(here: str, data: Prepared, first: Prepared) -> Problem | None:
    """Return how the data of a machine differ from those of machine 0, or None. `here` names it.

    Files of a stream are not read before the training, so their copies are compared by size and time.
    """
    for name in sorted(data.stamps.keys() | first.stamps.keys()):
        mine, theirs = data.stamps.get(name), first.stamps.get(name)
        if mine == theirs:
            continue
        if mine is None or theirs is None:
            message = (
                f"{here} and machine 0 do not have the same files of `data`: {name} is only on "
                f"{here if theirs is None else 'machine 0'}"
            )
            return Problem("machines-differ", message, hint=SAME_DATA)
        (my_size, _, _), (size, _, mark) = mine.partition(":"), theirs.partition(":")
        if size == OF_ROWS:
            return Problem(
                "machines-differ", f"{name} has other rows on {here} than on machine 0", hint=SAME_DATA
            )
        if my_size != size:
            message = f"{name} has {int(my_size):,} bytes on {here} and {int(size):,} on machine 0"
            return Problem("machines-differ", message, hint=SAME_DATA)
        if not mark.isdecimal() or "://" in name:
            return Problem(
                "machines-differ",
                f"{name} is another version on {here} than on machine 0 (its ETag differs)",
                hint=SAME_DATA,
            )
        moment = f"@{int(mark) // 10**9}.{int(mark) % 10**9:09}"
        hint = (
            "copy files with their times (`cp -p`, `rsync -t`); if the copies are the same: `touch -d "
            f"{moment} {name}` on {here}"
        )
        return Problem(
            "machines-differ", f"{name} has another modification time on {here} than on machine 0", hint=hint
        )
    if data.key != first.key:
        return Problem("machines-differ", f"{here} prepares other data than machine 0", hint=SAME_DATA)
    return None


SAME_DATA = "the files of `data`, their order and the tokenizer must be the same on all machines"


def refuse_manual_start(recipe: Recipe) -> None:
    """Refuse to only write a run whose files the commands send to each other. Raises: usage error."""
    if recipe.has_own_directories:
        message = (
            "with `launch.shared_directory: false` the machines' commands write their run directories "
            "together"
        )
        raise usage_error(
            "contradiction", message, hint="start `fsdp-tune train` on each machine, without `--no-start`"
        )


def _copy_files(source: Path, target: Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def recorded_devices() -> list[dict[str, object]]:
    """Return the visible devices of this machine for environment.json."""
    return [
        {"kind": each.kind, "name": each.name, "memory_bytes": each.memory_bytes}
        for each in visible_devices(os.environ)
    ]


def announce_end(
    observer: Observer, machines: Machines, _kind: object, error: BaseException | None, _trace: object
) -> None:
    """Report why this command ends before it tells the other machines, which may take the limit of their last
    reading."""
    if isinstance(error, FsdpTuneError | StoppedBySignal) and machines.others:
        observer.message(
            f"{error.problems[0].message}; this machine tells the others before it ends (at most "
            f"{SERVED_SECONDS:g} s)"
        )
