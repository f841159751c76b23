"""Train a recipe on this machine: check the inputs, write the run directory, run the ranks to their end, merge."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fsdp_tune.cluster.submit.slurm import check_allocation
from fsdp_tune.core import processes as children
from fsdp_tune.core.devices import host, versions
from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Notice, Problem, usage_error
from fsdp_tune.core.library_errors import rust_errors_as_os_errors
from fsdp_tune.core.ownership import temporary_directory
from fsdp_tune.core.secrets import MASK, mask_text
from fsdp_tune.core.units import parse_seconds
from fsdp_tune.data.preparation import Prepared, rows_of_step
from fsdp_tune.data.preparation import prepare as prepare_data
from fsdp_tune.data.skipped_rows import NamedRow, read_named_rows
from fsdp_tune.data.stream.units import refuse_changed_files
from fsdp_tune.data.tokenise.sample_prompts import sample_prompts
from fsdp_tune.data.tokenise.tokenizer import load_encoder
from fsdp_tune.jobs.continued_data import continued_data, steps_of_run
from fsdp_tune.jobs.doctor import check_space, notices_of_machine
from fsdp_tune.jobs.evaluating import Evaluating, check_evaluation, evaluating, notices_of_evaluation, refuse_scores_without_room
from fsdp_tune.jobs.inspection import inspect_model, with_tensors
from fsdp_tune.jobs.mirroring import Mirroring, given_back
from fsdp_tune.jobs.observer import Observer, TrainingInputs, TrainResult, session
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.plan import decisions, keep_prediction, plan_here, refuse_what_cannot_fit
from fsdp_tune.jobs.recipes import check_cache, resolve_recipe
from fsdp_tune.jobs.resizing import OwnRun, Resizing, announce_end, held_elsewhere, recorded_devices, refuse_manual_start
from fsdp_tune.jobs.results import is_merged, merge_checkpoint, push, target_of
from fsdp_tune.launch.command.accelerate import LaunchPlan, launch_plan, machine_rank_of, manual_commands
from fsdp_tune.launch.command.default_config import accelerate_default_config
from fsdp_tune.launch.command.ports import check_port
from fsdp_tune.launch.command.resume import (
    Start,
    commands_to_resume,
    decide_start,
    move_aside,
    refuse_beyond_end,
    refuse_when_continued,
    refuse_without_files,
    takes_best,
)
from fsdp_tune.launch.command.run_files import RunFiles, write_run
from fsdp_tune.launch.machines.channel import CountedBar, network_message, open_channel
from fsdp_tune.launch.machines.directories import OwnDirectory
from fsdp_tune.launch.machines.identity import identity_of
from fsdp_tune.launch.machines.launches import Machines
from fsdp_tune.launch.supervise.attempts import Attempts
from fsdp_tune.launch.supervise.early_launch import EarlyLaunch, start_early
from fsdp_tune.launch.supervise.supervisor import Message, Position
from fsdp_tune.merge.merge_options import MergeOptions, hints_with_command
from fsdp_tune.merge.publish import check_access
from fsdp_tune.model.model_files import ModelFacts, base_of, check_vocabulary, save_model_files
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.references import Extension, find_extensions, from_run, without_adapter
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.rules.evaluation import best_is_evaluated
from fsdp_tune.recipe.rules.rates import schedule_of_steps
from fsdp_tune.recipe.schema.keys import as_problem
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.base_model import refuse_other_base, weights_at_start
from fsdp_tune.run.directory import RunDir, latest_checkpoint, locked
from fsdp_tune.run.rank_files import Verdict, read_outcome
from fsdp_tune.run.records import Environment


def train(recipe: LoadedRecipe, options: TrainOptions = TrainOptions(), *, observer: Observer = Observer()) -> TrainResult:
    """Train a recipe to its end on this machine's ranks, restarts included, and merge the result.

    Call it from the main thread, and in a script below `if __name__ == "__main__":`, since tokenising spawns processes. While ranks run,
    SIGINT, SIGTERM and other stop signals are handled here: the first has the ranks save a checkpoint and stop, which returns a result with
    `exit_reason` INTERRUPTED or PREEMPTED; a second stops at once. No process of the run outlives the call, nor this process.
    Raises: FsdpTuneError with the exit code of the command line: 1 failed, 2 recipe or usage, 3 out of device memory, 4 non-finite,
    5 hang or lost rank.
    """
    with session(recipe):
        if threading.current_thread() is not threading.main_thread():
            raise usage_error("not-main-thread", "`train` handles signals, which only the main thread can", hint="call it from there")
        job = _job(recipe, options, observer, starts_here=True)
        with job.connection() as machines:
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
                return job.finished(start)
            with job.written(start) as written:
                return WrittenRun(written.plan.run, manual_commands(written.recipe, written.plan.run))


@dataclass(frozen=True, slots=True)
class Preview:
    """What `train` would do."""

    resolution: Resolution
    plan: LaunchPlan
    start: Start


def preview(recipe: LoadedRecipe, options: TrainOptions = TrainOptions(), *, observer: Observer = Observer()) -> Preview:
    """Resolve a recipe and find its command and first step; start and write nothing, and read no checkpoint's bytes."""
    with session(recipe):
        job = _job(recipe, options, observer)
        elsewhere = None if job.recipe.has_own_directories else ()
        start = decide_start(job.plan.run, job.recipe, options.resume, overwrite=options.overwrite, digests=False, elsewhere=elsewhere)
        if job.mirror is not None:
            observer.notices(job.mirror.preview(start, options.resume))
        return Preview(job.resolution, job.plan, start)


def _job(loaded: LoadedRecipe, options: TrainOptions, observer: Observer, *, starts_here: bool = False) -> _Job:
    """Resolve a recipe. Unless `starts_here`, the GPUs and the address of the first machine may be those of other machines."""
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
    rank = machine_rank_of(recipe, options.machine_rank, os.environ) if starts_here else options.machine_rank or 0
    address = None if starts_here else "FIRST_MACHINE"
    run = RunDir(Path(recipe.output_dir))
    plan = launch_plan(recipe, run, machine_rank=rank, extra=options.launcher_arguments, unknown_address=address)
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

    @contextmanager
    def connection(self) -> Iterator[Machines]:
        """Yield the machines of the run; several find each other in this context."""
        with ExitStack() as stack:
            own = OwnRun(self.loaded, self.recipe, self.plan, self.extensions, self.options, self.observer, stack)
            folder = stack.enter_context(temporary_directory("channel-")) if self.recipe.has_own_directories else None
            machines = stack.enter_context(self._machines(own, folder))
            stack.push(partial(announce_end, self.observer, machines))
            if folder is not None and self.plan.machine_rank > 0:
                own.prepare(machines.advance)
            yield machines

    def _machines(self, own: OwnRun, folder: Path | None) -> Machines:
        """`folder`: where the channel finds archives; None if all machines see the run directory."""
        plan, recipe = self.plan, self.recipe
        if plan.first_machine is None:
            return Machines(plan.run)
        ip, port = plan.first_machine.ip, plan.first_machine.control_port
        self.observer.message(network_message(plan.route, ip, plan.env))
        extensions = [f"extension {each.kind} {each.name} {each.version}" for each in self.extensions]
        return Machines(
            plan.run,
            plan.machine_rank,
            recipe.launch.num_machines,
            hang_seconds=parse_seconds(recipe.launch.hang_timeout),
            replacement_seconds=parse_seconds(recipe.launch.replacement_timeout),
            channel=open_channel(plan.machine_rank, recipe.launch.num_machines, ip, port, folder),
            identity=identity_of(recipe, plan.env, extensions),
            directory=OwnDirectory(plan.run, folder, digests=recipe.checkpoint.verify == "digest", install=own.install) if folder else None,
        )

    def advance(self, n: int = 1) -> None:
        """Count work, so that other machines see progress."""
        if self.connected is not None:
            self.connected.advance(n)

    def lead(self) -> TrainResult:
        """Train on the only machine, or the first: refuse bad input before anything is written, then write, run and merge."""
        self.observer.notices(notices_of_machine(self.recipe, self.plan))
        start = self.decide_start()
        assert self.connected is not None, "`train` connects the machines first"
        if start.is_finished:
            self.connected.conclude(Verdict(ExitCode.OK, ExitReason.FINISHED, start.step))
            if self.mirror is None and not self.recipe.evaluation.is_on:
                return self.finished(start)
            # What an earlier command could not send or evaluate.
            with locked(self.plan.run) as notices, self.sending(None), self.evaluating(had_finished=True) as evaluations:
                self.observer.notices(notices)
                return self.finished(start, evaluations)
        with self.written(start, starts_ranks=True) as job, self.sending(start.step), job.evaluating() as evaluations:
            ended = job.run_ranks()
            self.connected.close()  # the others need not wait for the merge
            return job.conclude(ended, evaluations)

    def sending(self, start_step: int | None) -> AbstractContextManager[None]:
        return self.mirror.sending(start_step) if self.mirror is not None else nullcontext()

    def evaluating(self, *, had_finished: bool = False) -> AbstractContextManager[Evaluating | None]:
        return evaluating(self.plan.run, self.recipe, self.observer, had_finished=had_finished)

    def decide_start(self) -> Start:
        run, options = self.plan.run, self.options
        self.observer.phase("choosing the first step")
        held = held_elsewhere(self.connected, run, self.recipe, options)
        decide = partial(decide_start, run, self.recipe, options.resume, overwrite=options.overwrite, progress=self.advance, elsewhere=held)
        start, mirror = decide(), self.mirror
        if mirror is not None and not start.is_finished and mirror.prepare(start, options.resume, overwrite=options.overwrite):
            start = decide()
        if start.checkpoint is None and not start.is_new:  # nor has the mirror what is missing
            refuse_without_files(latest_checkpoint(run, elsewhere=held)[1])
        self.observer.notices([*self._launch_notices(), *start.notices, *self._changed_extensions(start)])
        for change in start.trajectory_changes:
            self.observer.message(f"from step {start.step} on {change}")
        return start

    def _launch_notices(self) -> list[Notice]:
        """Report what would have steered a bare `accelerate launch` on this machine and does not steer this one, and hidden secrets."""
        notices: list[Notice] = []
        if (default := accelerate_default_config(os.environ)) is not None:
            notices.append(Notice("accelerate-config-ignored", f"{default['path']} is not used: the recipe decides"))
        if self.plan.removed:
            notices.append(Notice("stale-environment", f"variables of another job are kept from the ranks: {', '.join(self.plan.removed)}"))
        if hidden := self.plan.masked_variables():
            notices.append(Notice("secret-not-written", f"launch.json lists {', '.join(hidden)} without values, which look like secrets"))
        if mask_text(self.loaded.text) != self.loaded.text:
            message = f"{self.loaded.path} has a comment with what looks like a secret; the run's recipe.yaml gets `{MASK}` instead"
            notices.append(Notice("secret-not-written", message))
        return notices

    def _changed_extensions(self, start: Start) -> list[Notice]:
        """Compare the extensions with those that the resumed run recorded."""
        if start.checkpoint is None:
            return []
        earlier = Environment.read(RunDir(start.checkpoint.path.parent).environment_json) or Environment()
        recorded = {(raw["kind"], raw["name"]): Extension.from_dict(raw) for raw in earlier.extensions}
        changed = [(recorded.get((each.kind, each.name)), each) for each in self.extensions]
        return [
            Notice("extension-changed", f"the steps so far used {before}; from step {start.step} on {now}")
            for before, now in changed
            if before is not None and before != now
        ]

    @contextmanager
    def written(self, start: Start, *, starts_ranks: bool = False) -> Iterator[_Job]:
        """Check the inputs, write the run directory and own it. Yields this job with a recipe in which every key is decided.

        If it `starts_ranks`, those of a single machine are started meanwhile. The launchers of several would wait for each other.
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
        with start_early(self.plan, self._inspected(start)) if starts_ranks and self.plan.has_all_ranks else nullcontext() as early:
            inputs = self._check_inputs(start, early)
            with replace(self, resolution=inputs.resolution, early=early, model=inputs.model).owned(start, inputs) as job:
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

    def _inspected(self, start: Start) -> Recipe:
        """Return the recipe of the model to inspect: a resumed run and its checkpoint have what only its start reads."""
        if start.checkpoint is None:
            return self.recipe
        return without_adapter(from_run(self.recipe, start.checkpoint.path.parent, start.from_run))

    def _check_inputs(self, start: Start, early: EarlyLaunch | None) -> TrainingInputs:
        """Inspect the model and plan in other processes while the data is prepared. Raises: FsdpTuneError with the problems of both."""
        recipe, observer = self.recipe, self.observer
        observer.phase("loading the tokenizer")
        with children.threads(2) as pool:
            here = self._inspected(start)
            inspecting = pool.submit(inspect_model, here, answer=early.inspection if early is not None else None)
            planning = pool.submit(plan_here, here)
            try:
                encoder = load_encoder(here)
                observer.notices(encoder.notices)
                sample_prompts(recipe, encoder)
                with observer.progress("tokenising", None, "rows") as bar:
                    progress = CountedBar(bar, self.advance)
                    data = prepare_data(recipe, encoder, progress=progress, verify=self.options.verify_data, run=self.plan.run.path)
                evaluation = check_evaluation(recipe, encoder, observer)
            except FsdpTuneError as error:
                if error.exit_code is ExitCode.PREEMPTED:  # a signal: do not wait for other problems
                    raise
                raise FsdpTuneError(*inspecting.result().problems, *error.problems, exit_code=error.exit_code) from error
            observer.phase("inspecting the model")
            model = with_tensors(here, inspecting.result(), observer.message)
            observer.phase("planning")
            plan = planning.result()
            decided, predicted, not_planned = plan
        observer.notices([*model.notices, *data.as_notices(), *not_planned])
        # The shapes of well-known models in this package are enough for a plan, never for training.
        is_packaged = model.model is not None and model.model.packaged
        packaged = [f"`{recipe.model.name_or_path}` cannot be reached, and is not in the cache"] if is_packaged else []
        if model.model is None or model.problems or model.unchecked or packaged:
            raise FsdpTuneError(*model.problems, *map(_unreachable, [*model.unchecked, *packaged]))
        observer.notices([*check_vocabulary(model.model, recipe, data.vocabulary_size), *notices_of_evaluation(recipe, model.model)])
        if start.checkpoint is not None and (before := Prepared.read(RunDir(start.checkpoint.path.parent).data_json)) is not None:
            refuse_changed_files(before.stamps, data.stamps)
        overwrite = self.options.overwrite
        data = continued_data(recipe, start, data, self.skipped, observer, run=self.plan.run, overwrite=overwrite)
        base = base_of(recipe, model.model) if recipe.lora is not None else None
        if base is not None and start.checkpoint is not None:
            refuse_other_base(RunDir(start.checkpoint.path.parent).base_json, base)
        steps = steps_of_run(recipe, data)
        refuse_beyond_end(start, steps)
        if steps is not None and (wrong := [*schedule_of_steps(recipe, steps), *best_is_evaluated(recipe, steps)]):
            raise FsdpTuneError(*(as_problem(finding, self.loaded.positions) for finding in wrong), exit_code=ExitCode.USAGE)
        if not self.options.ignore_plan:
            refuse_what_cannot_fit(predicted)
            refuse_scores_without_room(recipe, model.model, predicted)
            facts = {"parameters": model.model.parameters, "trained_parameters": model.model.trained_parameters}
            observer.notices(check_space(recipe, **facts, is_new=start.is_new, steps=steps))
        planned = decided.recipe.model_copy(update={"model": recipe.model, "data": recipe.data, "lora": recipe.lora})
        resolution = replace(self.resolution, recipe=planned, reasons=self.resolution.reasons | decided.reasons)
        return TrainingInputs(resolution, decisions(decided), model.model, encoder, data, predicted, base, steps, evaluation)

    def write(self, inputs: TrainingInputs, start: Start) -> None:
        extensions, before = [each.as_dict() for each in self.extensions], None if start.is_new else self.plan.run.environment_json
        files = RunFiles(
            recipe_text=self.loaded.text,
            overrides=self.loaded.overrides,
            recipe=self.recipe,
            reasons=self.resolution.reasons,
            plan=self.plan,
            environment=Environment(versions(), host(), recorded_devices(), extensions, weights_at_start(before, self.recipe.model)),
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
        ranks = f"ranks {plan.ranks.start} to {plan.ranks.stop - 1}" if len(plan.ranks) > 1 else f"rank {plan.ranks.start}"
        observer.message(f"starting {ranks} on {self.recipe.launch.device}; the run is {plan.run.path}")
        rows = partial(rows_of_step, plan.run.data_json, self.recipe)
        newer = self.mirror.newer_copy if self.mirror is not None else None
        sizes = Resizing.of(self.loaded, self.recipe, plan.run, plan.machine_rank, self.options, observer, self.model)
        attempts = Attempts(plan, self.recipe, rows, self.early, self.connected, newer_copy=newer, sizes=sizes).events()
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

    def conclude(self, ended: Verdict, evaluations: Evaluating | None = None) -> TrainResult:
        """Evaluate and merge a finished run. Raises: FsdpTuneError with the problem of a failed one and the next commands."""
        run = self.plan.run
        outcome = ended.first_outcome.facts if ended.first_outcome else {}
        checkpoint, _ = latest_checkpoint(run, elsewhere=None)
        result = TrainResult(run, self.recipe, ended.reason, ended.step, outcome, checkpoint)
        if ended.problem is not None:
            self.observer.run_ended(result)
            ways_out = (*ended.problem.ways_out, *commands_to_resume(run, checkpoint))
            raise FsdpTuneError(replace(ended.problem, ways_out=ways_out), exit_code=ended.exit_code)
        if ended.reason is ExitReason.FINISHED and evaluations is not None:
            evaluations.finish(ended.signal)
        if ended.reason is ExitReason.FINISHED and self.recipe.merge.at_end:
            self.observer.run_ended(replace(result, exit_reason=ExitReason.FAILED))
            result = replace(result, merged=self.merge())
            if self.recipe.training.push_to_hub:
                result = replace(result, pushed=self.push())
        return result

    def merge(self, *, overwrite: bool = True) -> Path:
        options = MergeOptions(overwrite=overwrite, best=takes_best(self.recipe))
        with hints_with_command(self.plan.run.path):
            return merge_checkpoint(self.plan.run.path, options, observer=self.observer).output

    def push(self) -> str:
        """Upload the adapter if the run has no merged model, else that."""
        run, alone = self.plan.run, self.recipe.lora is not None and self.recipe.merge.adapter == "adapter"
        return push(run.path, adapter=alone, observer=self.observer).url

    def finished(self, start: Start, evaluations: Evaluating | None = None) -> TrainResult:
        """Return the result of a run that has finished, after the evaluations and the merge if a crash prevented them."""
        if evaluations is not None:
            evaluations.finish()
        run = self.plan.run
        outcome = read_outcome(run, 0)
        assert outcome is not None, "the outcome of the first rank is what makes a run finished"
        merged = run.merged if is_merged(run, self.recipe) else self.merge(overwrite=False) if self.recipe.merge.at_end else None
        return TrainResult(run, self.recipe, ExitReason.FINISHED, outcome.step, outcome.facts, start.checkpoint, merged, had_finished=True)

    def follow(self) -> TrainResult:
        """Run the ranks of a machine other than the first, once that has written the run directory."""
        run, rank = self.plan.run, self.plan.machine_rank
        assert self.connected is not None, "`train` connects the machines first"
        assert self.plan.first_machine is not None, "there are several"
        shape = f"{self.recipe.world_size} ranks, {self.recipe.local_world_size} on each machine"
        where = f"{self.plan.first_machine.ip}:{self.plan.first_machine.control_port}"
        self.observer.notices(notices_of_machine(self.recipe, self.plan))
        self.observer.message(f"machine {rank}: waiting for the first machine ({where}) to prepare {run.path} for {shape}")
        ended = self.connected.join()
        if ended is None:
            self.observer.run_opened(run, self.plan.screen_log)
            with self.sending(None):
                ended = self.run_ranks()
        elif ended.reason is ExitReason.FINISHED:
            return TrainResult(run, self.recipe, ExitReason.FINISHED, machine_rank=rank, had_finished=True)
        result = TrainResult(run, self.recipe, ended.reason, machine_rank=rank)
        if ended.problem is not None:
            self.observer.run_ended(result)
            raise FsdpTuneError(ended.problem, exit_code=ended.exit_code)
        return result


def _unreachable(what: str) -> Problem:
    return Problem("model-unreachable", what, hint="give a local directory as `model.name_or_path`, or download it where there is network")
