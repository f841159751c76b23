"""Submit a run to Slurm: the batch script, at most one job of a run in the queue, and following a job to its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

from fsdp_tune.cluster.submit.cluster_job import ArrayTask, ClusterJob, Lead, cores_of_machine, estimated_lead, measured_lead
from fsdp_tune.cluster.submit.slurm import parse_time, render, user_block
from fsdp_tune.core.atomic import DISK, write_file
from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import ExitCode, FailedError, Notice, Where, failed_error, usage_error
from fsdp_tune.core.ownership import HeldError, owned
from fsdp_tune.core.units import format_seconds, parse_seconds
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import SlurmOptions, SubmitOptions, TrainOptions
from fsdp_tune.jobs.plan import checkpoint_bytes
from fsdp_tune.jobs.recipes import sized_recipe
from fsdp_tune.jobs.sweep import OWN_KEYS, PlannedRun, plan_sweep
from fsdp_tune.jobs.train import Preview, preview
from fsdp_tune.recipe.read.catalogue import catalogue_directory
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.references import output_directory
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.job_files import ENDED_BY_SLURM, JobFiles, read_attempts
from fsdp_tune.run.metrics_file import json_objects, read_metrics

CALL_SECONDS = 120.0
"""Limit for a command of the engine."""
LOCK_SECONDS = 150.0
"""A second `submit` waits this long for the first, to see its job."""
POLL_SECONDS = 2.0
UNREACHABLE_SECONDS = 900.0
"""A controller that is restarted answers within minutes. The job does not need it meanwhile."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as the queue shows it."""

    id: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"job {self.id} is {self.state}" + (f" ({self.reason})" if self.reason not in ("", "None") else "")


@dataclass(frozen=True, slots=True)
class SubmitAnswer(JsonAnswer):
    """The answer of `submit slurm`."""

    run_dir: str
    job: str | None
    """Its id; null: nothing was submitted, since the run has finished or only the script was requested."""
    state: str
    """submitted, printed, finished; of a job that was in the queue before, what the queue shows; with --follow, how it ended."""
    script: str | None
    """The file that was submitted."""
    log: str | None
    """What the job prints."""
    text: str
    """Its content."""
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
        """Resolve the recipe and return the script. Raises: FsdpTuneError for what `train` would refuse before its inputs are read."""
        on_cpus = self.loaded.recipe.launch.device == "cpu"
        if self.loaded.recipe.launch.num_processes == "auto" and not on_cpus:
            hint = "`--gpus-per-node N`, or write `launch.num_processes`, which is for all nodes"
            raise usage_error("submit-size", "the recipe does not say how many GPUs a node has", hint=hint)
        seen = self._previews()
        recipe, open_ = seen[0].resolution.recipe, [each for each in self.sweep if not each.preview.start.is_finished]
        self.observer.notices([notice for each in seen for notice in (*each.resolution.notices, *each.start.notices)])
        lead, limit = self._lead(recipe), _slurm_time(self.options.time)
        if limit is not None and parse_time(limit) < 2 * lead.seconds:
            message = f"`--time {self.options.time}` is less than twice the {lead.seconds} s that are kept for stopping: {lead.reason}"
            raise usage_error("submit-time", message, hint=f"--time {format_seconds(2 * lead.seconds)} or more")
        job = ClusterJob(
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
            tasks=tuple(ArrayTask(each.run.path, tuple(_set(_own_settings(each, self.loaded)))) for each in open_),
            max_stalled_starts=self.options.max_stalled_starts,
        )
        block = self._block()
        if not _MEMORY.search(block or ""):
            message = "the script asks for no memory, and Slurm's default for a job can be less than its ranks need"
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

    def _previews(self) -> list[Preview]:
        """Raises: FsdpTuneError for what `train` would refuse before its inputs are read."""
        if self.sweep:
            return [each.preview for each in self.sweep]
        options = TrainOptions(resume="auto", allowed=self.options.allowed, is_elsewhere=self.is_printed)
        return [preview(self.loaded, options, observer=self.observer)]

    def _settings(self) -> list[str]:
        if self.sweep:  # each run sets its own name and directory
            return [*_set([each for each in self.loaded.overrides if not each.startswith(OWN_KEYS)]), *self.options.allowed.options()]
        name = [] if self.loaded.recipe.name == self.loaded.path.stem else ["--name", str(self.loaded.recipe.name)]
        return [*name, *_set(self.loaded.overrides), *self.options.allowed.options()]

    def _lead(self, recipe: Recipe) -> Lead:
        runs = [each.run for each in self.sweep] or [RunDir(self.files.output_dir)]
        measured = [lead for run in runs if (lead := measured_lead(read_metrics(run))) is not None]
        if measured:
            return max(measured, key=lambda lead: lead.seconds)
        self.observer.phase("tracing a step for the size of a checkpoint")
        return estimated_lead(checkpoint_bytes(recipe))

    def _block(self) -> str | None:
        """Return the user's lines of the earlier script. Raises: usage error if they cannot be found in it."""
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

        Such a job is returned if it `finds`. Raises: else usage error `job-queued`; FailedError with Slurm's words if it takes no job.
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
            return replace(answer, job=job, state="submitted", script=str(files.script), log=str(files.log(job)))

    def _found(self, job: QueuedJob) -> SubmitAnswer:
        files, recipe = self.files, self.loaded.recipe
        text = files.script.read_text(encoding="utf-8") if files.script.exists() else ""
        machines = recipe.launch.num_machines
        gpus = 0 if recipe.launch.device == "cpu" or recipe.launch.num_processes == "auto" else recipe.launch.num_processes // machines
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
    """Read a recipe with the size that the options give; with `sweep`, resolve the recipe of each run. Raises: FsdpTuneError.

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
        raise usage_error("usage", f"`--time {text}` is not a time", hint="11h30m, or as Slurm writes it: 11:30:00, 1-12:00:00") from None
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:{seconds:02d}"


def _site(slurm: SlurmOptions) -> dict[str, str]:
    values = {"partition": slurm.partition, "account": slurm.account, "qos": slurm.qos, "constraint": slurm.constraint}
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _alone(files: JobFiles) -> Iterator[None]:
    """Hold the lock of submitting this run, after another `submit` has released it. Raises: usage error if it does not."""
    deadline = time.monotonic() + LOCK_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(owned(files.lock))
                break
            except HeldError as error:
                if time.monotonic() > deadline:
                    message = f"another command submits this run: {error.owner or 'its process is unknown'}"
                    ways_out = () if error.is_certain else (f"remove {files.lock} if that process has certainly ended",)
                    raise usage_error("submit-in-progress", message, ways_out=("wait for its end", *ways_out)) from None
            time.sleep(0.2)
        yield


def already_queued(queued: Sequence[QueuedJob]) -> Exception:
    """Return the usage error for a run that has jobs in the queue."""
    return usage_error(
        "job-queued",
        f"nothing is submitted: {queued[0]}, and trains this run" + (f"; so do {len(queued) - 1} more" if queued[1:] else ""),
        ways_out=(
            "`--follow` shows that job until it ends",
            f"`scancel {queued[0].id}` cancels it; a running one saves first",
            "`--again` submits one that starts after it",
        ),
    )


# ---- The engine's commands.


def call_slurm(*command: str) -> str:
    """Return the output of a command of Slurm. Raises: FailedError with its own words; usage error if it is not on this machine."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CALL_SECONDS, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        hint = "run it on a login node of the cluster; `--print` needs no Slurm"
        raise usage_error("no-slurm", f"there is no `{command[0]}` on this machine", hint=hint) from None
    except subprocess.TimeoutExpired:
        said = f"no answer within {CALL_SECONDS:.0f} s"
    else:
        if not done.returncode:
            return done.stdout
        said = done.stderr.strip() or f"exit code {done.returncode}"
    hint = _REMEDIES.get(command[0], "`scontrol ping` shows whether the controller answers")
    raise failed_error("slurm-failed", f"`{command[0]}` failed: {said}", hint=hint)


_REMEDIES = {"sbatch": "options of this command, or your lines in the script, set what it names; `sinfo` shows the partitions"}


def queued_jobs(files: JobFiles) -> list[QueuedJob]:
    """Return the jobs of this run in the queue, those first that were submitted first.

    They are known by their ids, and by their comment: a command that was killed after `sbatch` has written no id.
    """
    try:
        known = {str(line.get("job")) for line in json_objects(files.submitted.read_bytes())}
    except FileNotFoundError:
        known = set[str]()
    return sorted((job for job, comment in _queue() if job.id in known or comment == files.mark), key=lambda job: int(job.id))


def job_now(job: str) -> QueuedJob | None:
    """Return a job, also one that has ended a moment ago; None if the controller has forgotten it. Raises: FailedError."""
    return next((each for each, _ in _queue("--states=all") if each.id == job), None)


def _queue(*options: str) -> Iterator[tuple[QueuedJob, str]]:
    """Yield the jobs of this user with their comments; those of one array have one id."""
    form = ("--noheader", f"--user={os.geteuid()}", "--format=%A|%T|%r|%k")
    for line in call_slurm("squeue", *form, *options).splitlines():
        number, state, reason, comment = (*line.split("|", 3), "", "", "")[:4]
        yield QueuedJob(number, state, reason), comment.strip()


ENDED = frozenset({"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"})


def follow_job(answer: SubmitAnswer, observer: Observer) -> SubmitAnswer:
    """Report the state of a job and the lines of its log until it ends, starts again included. Return the answer with its end.

    Raises: FailedError if the controller does not answer for long.
    """
    job, files = str(answer.job), JobFiles(Path(answer.run_dir))
    with closing(_Log(files.log(job), observer)) as log:
        return _followed(answer, files, log)


def _followed(answer: SubmitAnswer, files: JobFiles, log: _Log) -> SubmitAnswer:
    job = str(answer.job)
    shown: QueuedJob | None = None
    answered_at = time.monotonic()
    while True:
        try:
            now, answered_at = job_now(job), time.monotonic()
        except FailedError:
            if time.monotonic() - answered_at > UNREACHABLE_SECONDS:
                raise
            now = shown
        log.show()
        if now is not None and now != shown:
            log.observer.message(str(now))
            shown = now
        if now is None or now.state in ENDED:
            log.show()
            state, code = _end_of(files, job, now.state if now is not None else "no longer known to Slurm")
            return replace(answer, state=state, exit_code=code)
        time.sleep(POLL_SECONDS)


def _end_of(files: JobFiles, job: str, state: str) -> tuple[str, int]:
    last = next((start for start in reversed(read_attempts(files.output_dir)) if start.job == job), None)
    if last is None or last.exit_code is None or last.then == "requeued":  # what came after it is not in the ledger
        return state, ExitCode.OK if state == "COMPLETED" else ExitCode.FAILED
    return state if last.then == ENDED_BY_SLURM else str(last.then), last.exit_code


class _Log:
    """The new complete lines of a job's output, which does not exist before its start."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self._path, self.observer = path, observer
        self._file: FileIO | None = None
        self._rest = b""

    def show(self) -> None:
        if self._file is None:
            try:
                self._file = FileIO(str(self._path))
            except FileNotFoundError:
                return
        *lines, self._rest = (self._rest + self._file.readall()).split(b"\n")
        for line in lines:
            self.observer.message(line.decode("utf-8", "replace"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
