"""Submit a run to Slurm: the batch script, and at most one job of a run in the queue."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_tune.cluster.submit.cluster_job import (
    ArrayTask,
    ClusterJob,
    Lead,
    cores_of_machine,
    estimated_lead,
    measured_lead,
)
from fsdp_tune.cluster.submit.slurm import parse_time, render, user_block
from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import Notice, Where, usage_error
from fsdp_tune.core.ownership import HeldError, owned
from fsdp_tune.core.units import format_seconds, parse_seconds
from fsdp_tune.jobs.machine_plan import checkpoint_bytes
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.recipes import sized_recipe
from fsdp_tune.jobs.slurm_queue import QueuedJob, already_queued, call_slurm, queued_jobs
from fsdp_tune.jobs.submit_options import SlurmOptions, SubmitOptions
from fsdp_tune.jobs.sweep import OWN_KEYS, PlannedRun, plan_sweep
from fsdp_tune.jobs.train import Preview, preview
from fsdp_tune.recipe.read.catalogue import catalogue_directory
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.references import output_directory
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.job_files import JobFiles
from fsdp_tune.run.metrics_file import read_metrics

LOCK_SECONDS = 150.0
"""A second `submit` waits this long for the first, to see its job."""


@dataclass(frozen=True, slots=True)
class SubmitAnswer(JsonAnswer):
    """The answer of `submit slurm`."""

    run_dir: str
    job: str | None
    """Its id; null: nothing was submitted, since the run has finished or only the script was requested."""
    state: str
    """submitted, printed, finished; of a job that was in the queue before, what the queue shows; with
    --follow, how it ended."""
    script: str | None
    """The file that was submitted."""
    log: str | None
    """What the job prints."""
    text: str
    """Content of the script."""
    machines: int
    gpus_per_machine: int
    lead_seconds: int | None
    """From the signal until the time limit; null for a job that was in the queue before."""
    lead_reason: str | None
    exit_code: int | None
    """Of the run, with --follow."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A run that can be submitted: the recipe as the job trains it."""

    loaded: LoadedRecipe
    options: SubmitOptions
    slurm: SlurmOptions
    observer: Observer = Observer()
    block_file: Path | None = None
    """An earlier script with the user's lines; None: that of this run."""
    sweep: Sequence[PlannedRun] = ()
    """The runs of a sweep, each an element of a job array."""
    is_printed: bool = False
    """Whether the script is only printed: what is missing on this machine is then a notice."""

    @property
    def files(self) -> JobFiles:
        return JobFiles(output_directory(self.loaded.recipe, Path.cwd())[0])

    def printed(self) -> SubmitAnswer:
        """Return the script, and write nothing. Raises: as `submit`, but asks Slurm nothing."""
        found = self.loaded.path
        return self._script(found.stem if found.parent == catalogue_directory() else str(found.resolve()))

    def _script(self, config: str) -> SubmitAnswer:
        """Resolve the recipe and return the script. Raises: FsdpTuneError for what `train` would refuse
        before its inputs are read."""
        on_cpus = self.loaded.recipe.launch.device == "cpu"
        if self.loaded.recipe.launch.num_processes == "auto" and not on_cpus:
            hint = "`--gpus-per-node N`, or write `launch.num_processes`, which is for all nodes"
            raise usage_error("submit-size", "the recipe does not say how many GPUs a node has", hint=hint)
        seen = self._previews()
        recipe = seen[0].resolution.recipe
        self.observer.notices(
            [notice for each in seen for notice in (*each.resolution.notices, *each.start.notices)]
        )
        lead, limit = self._lead(recipe), _slurm_time(self.options.time)
        if limit is not None and parse_time(limit) < 2 * lead.seconds:
            message = (
                f"`--time {self.options.time}` is less than twice the {lead.seconds} s that are kept for "
                f"stopping: {lead.reason}"
            )
            raise usage_error(
                "submit-time", message, hint=f"--time {format_seconds(2 * lead.seconds)} or more"
            )
        job = self._job(recipe, config, lead, limit)
        block = self._block()
        if not _MEMORY.search(block or ""):
            message = (
                "the script asks for no memory, and Slurm's default for a job can be less than its ranks need"
            )
            hint = "add `#SBATCH --mem=0` (all memory of a node) or `#SBATCH --exclusive` to your lines in it"
            self.observer.notices([Notice("submit-memory", message, hint=hint)])
        text = render(job, _site(self.slurm), block)
        state = "finished" if all(each.start.is_finished for each in seen) else "printed"
        return SubmitAnswer(
            run_dir=str(self.files.output_dir),
            job=None,
            state=state,
            script=None,
            log=None,
            text=text,
            machines=job.machines,
            gpus_per_machine=job.gpus_per_machine,
            lead_seconds=lead.seconds,
            lead_reason=lead.reason,
            exit_code=None,
        )

    def _job(self, recipe: Recipe, config: str, lead: Lead, limit: str | None) -> ClusterJob:
        """Return the job of the resolved recipe, without the runs of a sweep that have finished."""
        open_ = [each for each in self.sweep if not each.preview.start.is_finished]
        on_cpus = self.loaded.recipe.launch.device == "cpu"
        return ClusterJob(
            name=self.options.job_name or str(recipe.name),
            program=_program(),
            arguments=("train", "--config", config, *self._settings(), "--resume", "auto"),
            output_dir=self.files.output_dir,
            working_directory=Path.cwd(),
            machines=recipe.launch.num_machines,
            gpus_per_machine=0 if on_cpus else recipe.local_world_size,
            lead=lead,
            cpus_per_machine=self.options.cpus_per_node or cores_of_machine(recipe),
            time_limit=limit,
            chooses_port=recipe.launch.num_machines > 1 and recipe.launch.main_process_port == "auto",
            tasks=tuple(
                ArrayTask(each.run.path, tuple(_set(_own_settings(each, self.loaded)))) for each in open_
            ),
            max_stalled_starts=self.options.max_stalled_starts,
        )

    def _previews(self) -> list[Preview]:
        """Raises: FsdpTuneError for what `train` would refuse before its inputs are read."""
        if self.sweep:
            return [each.preview for each in self.sweep]
        options = TrainOptions(resume="auto", allowed=self.options.allowed, is_elsewhere=self.is_printed)
        return [preview(self.loaded, options, observer=self.observer)]

    def _settings(self) -> list[str]:
        if self.sweep:  # each run sets its own name and directory
            return [
                *_set([each for each in self.loaded.overrides if not each.startswith(OWN_KEYS)]),
                *self.options.allowed.options(),
            ]
        name = (
            []
            if self.loaded.recipe.name == self.loaded.path.stem
            else ["--name", str(self.loaded.recipe.name)]
        )
        return [*name, *_set(self.loaded.overrides), *self.options.allowed.options()]

    def _lead(self, recipe: Recipe) -> Lead:
        runs = [each.run for each in self.sweep] or [RunDir(self.files.output_dir)]
        measured = [lead for run in runs if (lead := measured_lead(read_metrics(run))) is not None]
        if measured:
            return max(measured, key=lambda lead: lead.seconds)
        self.observer.phase("tracing a step for the size of a checkpoint")
        return estimated_lead(checkpoint_bytes(recipe))

    def _block(self) -> str | None:
        """Return the user's lines of the earlier script. Raises: usage error if they cannot be found in
        it."""
        try:
            return user_block((self.block_file or self.files.script).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            hint = "put them back, or move it away: a new one has both"
            raise usage_error(
                "submit-block",
                f"your lines in it cannot be kept: {error}",
                where=Where(str(self.block_file or self.files.script)),
                hint=hint,
            ) from None

    def submit(self, *, finds: bool = False) -> SubmitAnswer:
        """Write the script and submit it, unless the run has finished or a job of it is in the queue.

        Such a job is returned if it `finds`. Raises: else usage error `job-queued`; FailedError with Slurm's
        words if it takes no job.
        """
        files = self.files
        DISK.mkdir(files.folder)
        with _alone(files):
            queued = queued_jobs(files)
            if queued and finds and not self.options.again:
                return self._found(queued[0])
            if queued and not self.options.again:
                raise already_queued(queued)
            copy = files.recipe(self.loaded.path.name, self.loaded.text)
            answer = self._script(str(copy))
            if answer.state == "finished":
                return answer
            DISK.mkdir(copy.parent)
            write_file(copy, self.loaded.text, private=True)
            write_file(files.script, answer.text)
            after = ["--dependency=afterany:" + ":".join(job.id for job in queued)] if queued else []
            job = call_slurm("sbatch", "--parsable", *after, str(files.script)).strip().partition(";")[0]
            with DISK.open(files.submitted, "ab") as ledger:
                DISK.write(ledger, json.dumps({"job": job, "time": time.time()}).encode() + b"\n")
            return replace(
                answer, job=job, state="submitted", script=str(files.script), log=str(files.log(job))
            )

    def _found(self, job: QueuedJob) -> SubmitAnswer:
        files, recipe = self.files, self.loaded.recipe
        text = files.script.read_text(encoding="utf-8") if files.script.exists() else ""
        machines = recipe.launch.num_machines
        gpus = (
            0
            if recipe.launch.device == "cpu" or recipe.launch.num_processes == "auto"
            else recipe.launch.num_processes // machines
        )
        return SubmitAnswer(
            run_dir=str(files.output_dir),
            job=job.id,
            state=job.state,
            script=str(files.script),
            log=str(files.log(job.id)),
            text=text,
            machines=machines,
            gpus_per_machine=gpus,
            lead_seconds=None,
            lead_reason=None,
            exit_code=None,
        )


_MEMORY = re.compile(r"^#SBATCH\s+--(mem|exclusive)", re.MULTILINE)


def submission(
    source: str,
    overrides: Sequence[str],
    options: SubmitOptions,
    slurm: SlurmOptions,
    *,
    name: str | None = None,
    sweep: Sequence[str] = (),
    is_printed: bool = False,
    observer: Observer = Observer(),
) -> Submission:
    """Read a recipe with the size that the options give; with `sweep`, resolve the recipe of each run.
    Raises: FsdpTuneError.

    `is_printed`: as in `Submission`.
    """
    loaded = sized_recipe(source, overrides, options.nodes, options.gpus_per_node, name=name)
    of_runs = TrainOptions(allowed=options.allowed, is_elsewhere=is_printed)
    planned = plan_sweep(source, loaded.overrides, sweep, of_runs, name=name) if sweep else ()
    return Submission(loaded, options, slurm, observer, sweep=planned, is_printed=is_printed)


def _set(pairs: Sequence[str]) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def _own_settings(run: PlannedRun, loaded: LoadedRecipe) -> Sequence[str]:
    """Return the overrides that a run of a sweep has in addition to those of all."""
    return [*run.loaded.overrides[len(loaded.overrides) :], f"name={run.loaded.recipe.name}"]


def _program() -> tuple[str, ...]:
    program = Path(sys.executable).with_name("fsdp-tune")
    return (str(program),) if program.is_file() else (sys.executable, "-m", "fsdp_tune")


def _slurm_time(text: str | None) -> str | None:
    """Return a time limit as Slurm writes it: `D-HH:MM:SS`. Raises: usage error."""
    if text is None:
        return None
    with suppress(ValueError):
        parse_time(text)
        return text
    try:
        minutes, seconds = divmod(parse_seconds(text), 60)
    except ValueError:
        raise usage_error(
            "usage",
            f"`--time {text}` is not a time",
            hint="11h30m, or as Slurm writes it: 11:30:00, 1-12:00:00",
        ) from None
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:{seconds:02d}"


def _site(slurm: SlurmOptions) -> dict[str, str]:
    values = {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
    }
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _alone(files: JobFiles) -> Iterator[None]:
    """Hold the lock of submitting this run, after another `submit` has released it. Raises: usage error if it
    does not."""
    deadline = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(owned(files.lock))
                break
            except HeldError as error:
                if time.monotonic() > deadline:
                    message = f"another command submits this run: {error.owner or 'its process is unknown'}"
                    ways_out = (
                        ()
                        if error.is_certain
                        else (f"remove {files.lock} if that process has certainly ended",)
                    )
                    raise usage_error(
                        "submit-in-progress", message, ways_out=("wait for its end", *ways_out)
                    ) from None
            time.sleep(0.2)
        yield
