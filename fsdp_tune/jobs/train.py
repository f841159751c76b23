"""Train a recipe on this machine: check the inputs, write the run directory, run the ranks to their end,
merge."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fsdp_tune.cluster.submit.slurm import check_allocation
from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, usage_error
from fsdp_tune.core.host import host
from fsdp_tune.core.library_errors import rust_errors_as_os_errors
from fsdp_tune.core.package_versions import versions
from fsdp_tune.data.preparation import rows_of_step
from fsdp_tune.data.skipped_rows import NamedRow, read_named_rows
from fsdp_tune.jobs.checkpoint_scorer import Evaluating, evaluating
from fsdp_tune.jobs.connecting import connecting
from fsdp_tune.jobs.doctor import notices_of_machine
from fsdp_tune.jobs.machine_plan import keep_prediction
from fsdp_tune.jobs.mirroring import Mirroring, given_back
from fsdp_tune.jobs.observer import Observer, TrainingInputs, TrainResult, session
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.jobs.resizing import Resizing, held_elsewhere, recorded_devices, refuse_manual_start
from fsdp_tune.jobs.results import target_of
from fsdp_tune.jobs.start_notices import changed_extensions, launch_notices
from fsdp_tune.jobs.training_end import conclude, finished
from fsdp_tune.jobs.training_inputs import InputChecks, inspected_recipe
from fsdp_tune.launch.command.accelerate import LaunchPlan, launch_plan, machine_rank_of, manual_commands
from fsdp_tune.launch.command.ports import check_port
from fsdp_tune.launch.command.resume import (
    Start,
    decide_start,
    move_aside,
    refuse_when_continued,
    refuse_without_files,
)
from fsdp_tune.launch.command.run_files import RunFiles, write_run
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.launch.supervise.attempts import Attempts
from fsdp_tune.launch.supervise.early_launch import EarlyLaunch, start_early
from fsdp_tune.launch.supervise.launch_events import Message, Position
from fsdp_tune.merge.publish import check_access
from fsdp_tune.model.model_files import ModelFacts, save_model_files
from fsdp_tune.recipe.extensions import Extension, find_extensions
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import weights_at_start
from fsdp_tune.run.claim import locked
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.rank_files import Verdict
from fsdp_tune.run.records import Environment


def train(
    recipe: LoadedRecipe, options: TrainOptions = TrainOptions(), *, observer: Observer = Observer()
) -> TrainResult:
    """Train a recipe to its end on this machine's ranks, restarts included, and merge the result.

    Call it from the main thread, and in a script below `if __name__ == "__main__":`, since tokenising spawns
    processes. While ranks run, SIGINT, SIGTERM and other stop signals are handled here: the first has the
    ranks save a checkpoint and stop, which returns a result with `exit_reason` INTERRUPTED or PREEMPTED; a
    second stops at once. No process of the run outlives the call, nor this process.
    Raises: FsdpTuneError with the exit code of the command line: 1 failed, 2 recipe or usage, 3 out of device
    memory, 4 non-finite, 5 hang or lost rank.
    """
    with session(recipe):
        if threading.current_thread() is not threading.main_thread():
            raise usage_error(
                "not-main-thread",
                "`train` handles signals, which only the main thread can",
                hint="call it from there",
            )
        job = _job(recipe, options, observer, starts_here=True)
        with connecting(recipe, job.recipe, job.plan, job.extensions, options, observer) as machines:
            job = replace(job, connected=machines)
            if job.plan.machine_rank > 0:
                return job.follow()
            with given_back(job.mirror):
                return job.lead()


@dataclass(frozen=True, slots=True)
class WrittenRun:
    run: RunDir
    commands: tuple[str, ...]
    """Each starts the run."""


def write_only(
    recipe: LoadedRecipe, options: TrainOptions = TrainOptions(), *, observer: Observer = Observer()
) -> WrittenRun | TrainResult:
    """Do as `train` until the ranks would start. Returns the result of a run that has already finished."""
    with session(recipe):
        job = _job(recipe, replace(options, machine_rank=0), observer)
        refuse_manual_start(job.recipe)
        with given_back(job.mirror):
            start = job.decide_start()
            if start.is_finished:
                return finished(job.plan.run, job.recipe, observer, start)
            with job.written(start) as written:
                return WrittenRun(written.plan.run, manual_commands(written.recipe, written.plan.run))


@dataclass(frozen=True, slots=True)
class Preview:
    """What `train` would do."""

    resolution: Resolution
    plan: LaunchPlan
    start: Start


def preview(
    recipe: LoadedRecipe, options: TrainOptions = TrainOptions(), *, observer: Observer = Observer()
) -> Preview:
    """Resolve a recipe and find its command and first step; start and write nothing, and read no checkpoint's
    bytes."""
    with session(recipe):
        job = _job(recipe, options, observer)
        elsewhere = None if job.recipe.has_own_directories else ()
        start = decide_start(
            job.plan.run,
            job.recipe,
            options.resume,
            overwrite=options.overwrite,
            digests=False,
            elsewhere=elsewhere,
        )
        if job.mirror is not None:
            observer.notices(job.mirror.preview(start, options.resume))
        return Preview(job.resolution, job.plan, start)


def _job(
    loaded: LoadedRecipe, options: TrainOptions, observer: Observer, *, starts_here: bool = False
) -> _Job:
    """Resolve a recipe. Unless `starts_here`, the GPUs and the address of the first machine may be those of
    other machines."""
    observer.phase("finding the devices of this machine")
    resolution = resolve_recipe(
        loaded,
        options.allowed,
        observer,
        starts_ranks=True,
        starts_here=starts_here,
        resume=options.resume,
        elsewhere=options.is_elsewhere,
    )
    observer.notices(resolution.notices)
    recipe = resolution.recipe
    if starts_here and options.machine_rank is None:
        observer.notices(check_allocation(recipe, os.environ))
    rank = (
        machine_rank_of(recipe, options.machine_rank, os.environ)
        if starts_here
        else options.machine_rank or 0
    )
    address = None if starts_here else "FIRST_MACHINE"
    run = RunDir(Path(recipe.output_dir))
    plan = launch_plan(
        recipe, run, machine_rank=rank, extra=options.launcher_arguments, unknown_address=address
    )
    skipped = () if options.skip_rows is None or rank > 0 else tuple(read_named_rows(options.skip_rows))
    mirror = Mirroring.of(run, recipe, observer, rank)
    extensions = () if options.is_elsewhere else find_extensions(recipe)
    return _Job(loaded, resolution, plan, extensions, options, observer, skipped, mirror)


@dataclass(frozen=True, slots=True)
class _Job:
    """One `train` on one machine."""

    loaded: LoadedRecipe
    resolution: Resolution
    plan: LaunchPlan
    extensions: Sequence[Extension]
    options: TrainOptions
    observer: Observer
    skipped: Sequence[NamedRow] = ()
    """Rows that `options.skip_rows` names."""
    mirror: Mirroring | None = None
    early: EarlyLaunch | None = None
    """The first launcher, if it has been started while the inputs were checked."""
    connected: Machines | None = None
    """The machines of the run; None where no rank is started."""
    model: ModelFacts | None = None
    """Once the inputs are checked."""

    @property
    def recipe(self) -> Recipe:
        return self.resolution.recipe

    def advance(self, n: int = 1) -> None:
        """Count work, so that other machines see progress."""
        if self.connected is not None:
            self.connected.advance(n)

    def lead(self) -> TrainResult:
        """Train on the only machine, or the first: refuse bad input before anything is written, then write,
        run and merge."""
        self.observer.notices(notices_of_machine(self.recipe, self.plan))
        start = self.decide_start()
        assert self.connected is not None, "`train` connects the machines first"
        if start.is_finished:
            self.connected.conclude(Verdict(ExitCode.OK, ExitReason.FINISHED, start.step))
            if self.mirror is None and not self.recipe.evaluation.is_on:
                return finished(self.plan.run, self.recipe, self.observer, start)
            # What an earlier command could not send or evaluate.
            with (
                locked(self.plan.run) as notices,
                self.sending(None),
                self.evaluating(had_finished=True) as evaluations,
            ):
                self.observer.notices(notices)
                return finished(self.plan.run, self.recipe, self.observer, start, evaluations)
        with (
            self.written(start, starts_ranks=True) as job,
            self.sending(start.step),
            job.evaluating() as evaluations,
        ):
            ended = job.run_ranks()
            self.connected.close()  # the others need not wait for the merge
            return conclude(job.plan.run, job.recipe, job.observer, ended, evaluations)

    def sending(self, start_step: int | None) -> AbstractContextManager[None]:
        return self.mirror.sending(start_step) if self.mirror is not None else nullcontext()

    def evaluating(self, *, had_finished: bool = False) -> AbstractContextManager[Evaluating | None]:
        return evaluating(self.plan.run, self.recipe, self.observer, had_finished=had_finished)

    def decide_start(self) -> Start:
        run, options = self.plan.run, self.options
        self.observer.phase("choosing the first step")
        held = held_elsewhere(self.connected, run, self.recipe, options)
        decide = partial(
            decide_start,
            run,
            self.recipe,
            options.resume,
            overwrite=options.overwrite,
            progress=self.advance,
            elsewhere=held,
        )
        start, mirror = decide(), self.mirror
        if (
            mirror is not None
            and not start.is_finished
            and mirror.prepare(start, options.resume, overwrite=options.overwrite)
        ):
            start = decide()
        if start.checkpoint is None and not start.is_new:  # nor has the mirror what is missing
            refuse_without_files(latest_checkpoint(run, elsewhere=held)[1])
        self.observer.notices(
            [
                *launch_notices(self.loaded, self.plan),
                *start.notices,
                *changed_extensions(self.extensions, start),
            ]
        )
        for change in start.trajectory_changes:
            self.observer.message(f"from step {start.step} on {change}")
        return start

    @contextmanager
    def written(self, start: Start, *, starts_ranks: bool = False) -> Iterator[_Job]:
        """Check the inputs, write the run directory and own it. Yields this job with a recipe in which every
        key is decided.

        If it `starts_ranks`, those of a single machine are started meanwhile. The launchers of several would
        wait for each other.
        """
        run = self.plan.run
        if self.options.resume is not None:  # a mistyped directory is a new run
            source = start.checkpoint.path.name if start.checkpoint else "step 0"
            self.observer.message(f"{run.path}: {'a new run' if start.is_new else 'resumed'} from {source}")
        check_cache(self.recipe)
        check_port(self.recipe)
        if self.recipe.training.push_to_hub:
            self.observer.phase("checking the access to the hub")
            check_access(target_of(self.recipe))
        checks = InputChecks(
            self.loaded, self.resolution, run, self.options, self.observer, self.skipped, self.advance
        )
        with (
            start_early(self.plan, inspected_recipe(self.recipe, start))
            if starts_ranks and self.plan.has_all_ranks
            else nullcontext() as early
        ):
            inputs = checks.check(start, early)
            with replace(self, resolution=inputs.resolution, early=early, model=inputs.model).owned(
                start, inputs
            ) as job:
                yield job

    @contextmanager
    def owned(self, start: Start, inputs: TrainingInputs) -> Iterator[_Job]:
        """Write the run directory and own it. Yields this job."""
        run = self.plan.run
        self.observer.inputs_checked(inputs)
        self.observer.phase("writing the run directory")
        if self.options.overwrite and run.is_used:
            self.observer.message(f"the old run is now {move_aside(run)}")
        if start.is_new:
            self.write(inputs, start)
        with locked(run) as notices:
            self.observer.notices(notices)
            refuse_when_continued(run, start)
            if not start.is_new:
                self.write(inputs, start)
            self.observer.run_opened(run, self.plan.screen_log)
            yield self

    def write(self, inputs: TrainingInputs, start: Start) -> None:
        extensions, before = (
            [each.as_dict() for each in self.extensions],
            None if start.is_new else self.plan.run.environment_json,
        )
        files = RunFiles(
            recipe_text=self.loaded.text,
            overrides=self.loaded.overrides,
            recipe=self.recipe,
            reasons=self.resolution.reasons,
            plan=self.plan,
            environment=Environment(
                versions(),
                host(),
                recorded_devices(),
                extensions,
                weights_at_start(before, self.recipe.model),
            ),
            data=inputs.data,
            start=start,
            save_model=lambda directory: self._save_model(directory, inputs),
            profile=self.options.profile,
            command=self.options.command,
            saves=self.options.saves,
        )
        write_run(self.plan.run, files)
        keep_prediction(self.plan.run, inputs.plan)
        if self.recipe.evaluation.is_on:
            inputs.evaluation.write(self.plan.run.evaluation_json)

    def _save_model(self, directory: Path, inputs: TrainingInputs) -> None:
        with rust_errors_as_os_errors(directory):  # tokenizers writes tokenizer.json
            save_model_files(directory, inputs.model, inputs.encoder.tokenizer, inputs.encoder.origin)
        if inputs.base is not None:
            inputs.base.write(directory / self.plan.run.base_json.name)

    def run_ranks(self) -> Verdict:
        """Run the ranks of this machine to their end, restarts included."""
        plan, observer = self.plan, self.observer
        ranks = (
            f"ranks {plan.ranks.start} to {plan.ranks.stop - 1}"
            if len(plan.ranks) > 1
            else f"rank {plan.ranks.start}"
        )
        observer.message(f"starting {ranks} on {self.recipe.launch.device}; the run is {plan.run.path}")
        rows = partial(rows_of_step, plan.run.data_json, self.recipe)
        newer = self.mirror.newer_copy if self.mirror is not None else None
        sizes = Resizing.of(
            self.loaded, self.recipe, plan.run, plan.machine_rank, self.options, observer, self.model
        )
        attempts = Attempts(
            plan, self.recipe, rows, self.early, self.connected, newer_copy=newer, sizes=sizes
        ).events()
        with observer.training(), closing(attempts) as events:
            for event in events:
                if self.mirror is not None:
                    self.mirror.tend()
                if isinstance(event, Verdict):
                    return event
                if isinstance(event, Message):
                    observer.message(event.text)
                elif isinstance(event, Position):
                    observer.position(event.step, event.phase, event.done, event.planned)
                elif plan.machine_rank == 0:
                    observer.metrics(event.line)
        raise AssertionError("the supervisor ends with a verdict")

    def follow(self) -> TrainResult:
        """Run the ranks of a machine other than the first, once that has written the run directory."""
        run, rank = self.plan.run, self.plan.machine_rank
        assert self.connected is not None, "`train` connects the machines first"
        assert self.plan.first_machine is not None, "there are several"
        shape = f"{self.recipe.world_size} ranks, {self.recipe.local_world_size} on each machine"
        where = f"{self.plan.first_machine.ip}:{self.plan.first_machine.control_port}"
        self.observer.notices(notices_of_machine(self.recipe, self.plan))
        self.observer.message(
            f"machine {rank}: waiting for the first machine ({where}) to prepare {run.path} for {shape}"
        )
        ended = self.connected.join()
        if ended is None:
            self.observer.run_opened(run, self.plan.screen_log)
            with self.sending(None):
                ended = self.run_ranks()
        elif ended.reason is ExitReason.FINISHED:
            return TrainResult(run, self.recipe, ExitReason.FINISHED, machine_rank=rank, had_finished=True)
        result = TrainResult(run, self.recipe, ended.reason, machine_rank=rank, signal=ended.signal)
        if ended.problem is not None:
            self.observer.run_ended(result)
            raise FsdpTuneError(ended.problem, exit_code=ended.exit_code)
        return result
