"""A drill: interrupt a small run on the user's own cluster in the ways that a cluster does, and compare its
model with an undisturbed one.

It acts on jobs that it has submitted itself, by their ids, and on nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from fsdp_tune.core.command import JsonAnswer
from fsdp_tune.core.errors import FailedError, FsdpTuneError, failed_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.core.tensors.safetensors_header import read_header
from fsdp_tune.core.units import format_seconds
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.results import merge_checkpoint
from fsdp_tune.jobs.slurm_queue import ENDED, QueuedJob, already_queued, call_slurm, job_now, queued_jobs
from fsdp_tune.jobs.submit import Submission, submission
from fsdp_tune.jobs.submit_options import SlurmOptions, SubmitOptions
from fsdp_tune.launch.command.resume import move_aside
from fsdp_tune.launch.run_status import last_lines
from fsdp_tune.merge.merge_options import MergeOptions, hints_with_command
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.job_files import JobFiles, JobStart, read_attempts

RECIPE = "gpt2_smoke"
DIRECTORY = "runs/drill"
TIME_LIMIT = "6m"
CPU_RANKS_A_NODE = 2
ROWS_A_RANK = 8
SAVE_STEPS = 50
STEPS_AFTER_SAVE = 5
"""An interruption without a save shall cost something."""
POLL_SECONDS = 1.0
QUEUE_SECONDS = 5.0
"""Between two looks at the queue."""
START_SECONDS = 900.0
"""Limit for a start to train, without the time in the queue; and for a job to end after it is told to."""
TOLERANCE = 1e-4
"""Largest difference of a weight. On CPUs there is none; kernels of GPUs may add in another order each
time."""


@dataclass(frozen=True, slots=True)
class DrillEvent(JsonAnswer):
    """An interruption, and what it cost."""

    event: str
    start: int
    """The start that it ended, from 0."""
    exit_code: int | None
    """Null: the job was killed before it could write it down."""
    then: str | None
    """As in the ledger of `status`."""
    step: int
    """The last one seen before the end."""
    resumed_at: int
    """The checkpoint that the next start continued from."""
    lost_steps: int
    seconds: float
    """From the interruption until the next start trained, the queue included."""


@dataclass(frozen=True, slots=True)
class DrillAnswer(JsonAnswer):
    """The answer of `submit slurm --drill`."""

    run_dir: str
    undisturbed: str
    jobs: list[str]
    events: list[DrillEvent]
    steps: int
    equal: bool
    """Whether all bytes of both merged models are equal."""
    largest_difference: float
    """Of a weight."""

    @property
    def passed(self) -> bool:
        return self.largest_difference <= TOLERANCE


def drill(
    options: SubmitOptions, slurm: SlurmOptions, overrides: list[str], observer: Observer = Observer()
) -> DrillAnswer:
    """Play preemption, the loss of a node and the time limit with a small job, then train the same steps
    undisturbed and compare.

    Its jobs are cancelled if it ends early. Raises: FailedError `drill-failed` if the job does not come back.
    """
    nodes = options.nodes or 1
    ranks = nodes * (options.gpus_per_node or CPU_RANKS_A_NODE)
    settings = {
        "launch.device": "cpu" if options.gpus_per_node is None else "cuda",
        "launch.num_processes": ranks,
        "launch.num_machines": nodes,
        "training.global_batch_size": ranks * ROWS_A_RANK,
        "training.per_device_train_batch_size": ROWS_A_RANK,
        "training.max_steps": 10_000_000,
        "training.lr_scheduler_type": "constant",
        "training.warmup_steps": 0,
        "training.learning_rate": "1e-4",
        "training.logging_steps": 1,
        "training.save_steps": SAVE_STEPS,
        "data.eval": "null",
        "merge.at_end": "false",
        "output_dir": DIRECTORY,
    }
    own = replace(
        options, time=options.time or TIME_LIMIT, job_name=options.job_name or "fsdp-tune-drill", again=False
    )
    disturbed = submission(RECIPE, _words(overrides, settings), own, slurm, name="drill", observer=observer)
    with _Jobs(observer) as jobs:
        played = _disturb(jobs, disturbed, observer)
        observer.message(f"training {played.steps:,} steps without a disturbance")
        minutes = math.ceil(4 * played.seconds / 60) + 10
        plain = _words(
            overrides,
            settings | {"training.max_steps": played.steps, "output_dir": f"{DIRECTORY}-undisturbed"},
        )
        undisturbed = submission(
            RECIPE, plain, replace(own, time=f"{minutes}m"), slurm, name="drill", observer=observer
        )
        second = _Watched(jobs, replace(undisturbed, block_file=disturbed.files.script), observer)
        second.wait(lambda: second.is_over, "it trains undisturbed", limit=math.inf, needs_job=False)
        if not second.starts or second.starts[-1].then != "finished":
            second.fail("it trains undisturbed")
    runs = [disturbed.files.output_dir, undisturbed.files.output_dir]
    equal, largest = _compare(*(_merged(run, observer) for run in runs))
    return DrillAnswer(str(runs[0]), str(runs[1]), jobs.ids, played.events, played.steps, equal, largest)


def _words(overrides: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    return [*overrides, *(f"{key}={value}" for key, value in settings.items())]


class _Disturbed(NamedTuple):
    """What a run with interruptions reached."""

    events: list[DrillEvent]
    steps: int
    """The step at which the run was stopped."""
    seconds: float
    """That the job ran, over all its starts."""


def _disturb(jobs: _Jobs, disturbed: Submission, observer: Observer) -> _Disturbed:
    """Play the interruptions. Raises: FailedError `drill-failed` if the job leaves no complete checkpoint."""
    first = _Watched(jobs, disturbed, observer)
    events = [
        first.interrupted("preemption", lambda: call_slurm("scontrol", "requeue", first.job)),
        first.interrupted("node loss", first.kill_last_node),
        first.interrupted("time limit", lambda: observer.message("waiting for the time limit")),
    ]
    first.wait(first.has_saved, "it saves a checkpoint")
    call_slurm("scancel", first.job)
    first.wait(lambda: first.is_over, "it is cancelled", needs_job=False)
    checkpoint, _ = latest_checkpoint(RunDir(first.files.output_dir))
    if checkpoint is None:
        raise failed_error(
            "drill-failed",
            f"job {first.job} left no complete checkpoint",
            hint=f"its log is {first.files.log(first.job)}",
        )
    ran = sum((start.ended_at or start.started_at) - start.started_at for start in first.starts)
    return _Disturbed(events, checkpoint.step, ran)


class _Jobs:
    """The ids that this drill has submitted. What is left of them at the end is cancelled."""

    def __init__(self, observer: Observer) -> None:
        self.ids: list[str] = []
        self._observer = observer

    def __enter__(self) -> _Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.ids:
            try:
                now = job_now(job)
                if now is not None and now.state not in ENDED and now.state != "COMPLETING":
                    self._observer.message(f"cancelling job {job}")
                    call_slurm("scancel", job)
            except (FsdpTuneError, StoppedBySignal) as error:
                self._observer.message(f"job {job} may still run: {error}; `scancel {job}` cancels it")


@dataclass
class _Watched:
    """A job of the drill, its run, and the last step that was seen."""

    jobs: _Jobs
    submitted: Submission
    observer: Observer
    job: str = ""
    step: int = 0
    state: QueuedJob | None = None
    looked_at: float = field(default=float("-inf"))
    is_answered: bool = False
    """Whether Slurm has answered a query for the job."""

    def __post_init__(self) -> None:
        if queued := queued_jobs(self.files):
            raise already_queued(queued)  # before its run is moved away
        if RunDir(self.files.output_dir).is_used:
            self.observer.message(
                f"the run of an earlier drill is now {move_aside(RunDir(self.files.output_dir))}"
            )
        self.job = str(self.submitted.submit().job)
        self.jobs.ids.append(self.job)
        self.observer.message(f"job {self.job} submitted; log: {self.files.log(self.job)}")

    @property
    def files(self) -> JobFiles:
        return self.submitted.files

    @property
    def starts(self) -> list[JobStart]:
        return [start for start in read_attempts(self.files.output_dir) if start.job == self.job]

    @property
    def is_over(self) -> bool:
        return self.is_answered and (self.state is None or self.state.state in ENDED)

    @property
    def saved_step(self) -> int:
        checkpoint, _ = latest_checkpoint(RunDir(self.files.output_dir))
        return checkpoint.step if checkpoint is not None else 0

    def has_saved(self) -> bool:
        """Whether the newest start has trained, saved and trained on."""
        starts = self.starts
        return (
            bool(starts)
            and self.saved_step > starts[-1].first_step
            and self.step >= self.saved_step + STEPS_AFTER_SAVE
        )

    def interrupted(self, name: str, interrupt: Callable[[], object]) -> DrillEvent:
        """Interrupt the newest start once it has saved a checkpoint, and wait until the next one trains."""
        self.wait(self.has_saved, "it saves a checkpoint")
        number = len(self.starts)
        self.observer.message(f"{name}: at step {self.step:,}, the newest checkpoint is {self.saved_step:,}")
        began = time.monotonic()
        interrupt()
        if name == "time limit":
            self.wait(
                lambda: self.starts[number - 1].ended_at is not None, "its time limit comes", limit=math.inf
            )
            began = time.monotonic()
        self.wait(lambda: len(self.starts) > number, f"it starts again after {name}")
        ended, now, last = self.starts[number - 1], self.starts[number], self.step
        self.step = now.first_step
        self.wait(lambda: self.step > now.first_step, f"it trains again after {name}")
        lost, seconds = max(0, last - now.first_step), time.monotonic() - began
        self.observer.message(f"{name}: {lost:,} steps lost, training again after {format_seconds(seconds)}")
        return DrillEvent(
            name, ended.start, ended.exit_code, ended.then, last, now.first_step, lost, round(seconds, 1)
        )

    def kill_last_node(self) -> None:
        """Kill all processes of the job's step on its last node, as if that had lost its power."""
        hosts = call_slurm("scontrol", "show", "hostnames", self.starts[-1].nodes).split()
        kill = (
            f'scontrol listpids {self.job}.0 "$SLURMD_NODENAME" | awk "NR > 1 {{print \\$1}}" | xargs '
            "kill -KILL"
        )
        step = (f"--jobid={self.job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={hosts[-1]}")
        call_slurm("srun", *step, "bash", "-c", kill)

    def wait(
        self, is_done: Callable[[], bool], what: str, *, limit: float = START_SECONDS, needs_job: bool = True
    ) -> None:
        """Wait until `is_done`. Raises: FailedError if the job ends before, or runs for `limit` seconds
        without it."""
        began = time.monotonic()
        while not is_done():
            self._look()
            self.step = max([self.step, *self._logged_steps()])
            if self.state is None or self.state.state != "RUNNING":
                began = time.monotonic()  # the queue may take days
            if (needs_job and self.is_over) or time.monotonic() - began > limit:
                self.fail(what)
            time.sleep(POLL_SECONDS)

    def fail(self, what: str) -> NoReturn:
        message = (
            f"job {self.job} was watched until {what}, which did not happen: "
            f"{self.state or 'Slurm has forgotten the job'}"
        )
        raise failed_error("drill-failed", message, hint=f"its log is {self.files.log(self.job)}")

    def _logged_steps(self) -> list[int]:
        """Return the last steps that the newest start has logged. Those that it repeats are in the file until
        its ranks cut it back."""
        if not (starts := self.starts):
            return []
        lines = last_lines(RunDir(self.files.output_dir).metrics_jsonl)
        return [line["step"] for line in lines if "loss" in line and line["time"] >= starts[-1].started_at]

    def _look(self) -> None:
        if time.monotonic() - self.looked_at < QUEUE_SECONDS:
            return
        self.looked_at = time.monotonic()
        before = self.state
        with suppress(FailedError):  # a controller that is busy is asked again
            self.state, self.is_answered = job_now(self.job), True
        if self.state is not None and self.state != before:
            self.observer.message(str(self.state))
        # Slurm lets a requeued job wait for two minutes
        if self.state is not None and self.state.reason == "BeginTime":
            with suppress(FailedError):
                call_slurm("scontrol", "update", f"JobId={self.job}", "StartTime=now")


def _merged(run: Path, observer: Observer) -> Path:
    output = run / "merged"
    with hints_with_command(run):
        return (
            merge_checkpoint(run, MergeOptions(output=output, overwrite=True), observer=observer).output
            / "model.safetensors"
        )


def _compare(one: Path, other: Path) -> tuple[bool, float]:
    """Return whether two files of fp32 tensors are equal, and the largest difference of a number."""
    a, b = one.read_bytes(), other.read_bytes()
    if a == b:
        return True, 0.0
    before, after = _tensors(a), _tensors(b)
    return False, float(np.max([np.abs(before[name] - after[name]).max(initial=0.0) for name in before]))


def _tensors(raw: bytes) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    entries = read_header(lambda at, count: raw[at : at + count], len(raw), {"F32": 4})
    return {
        entry.name: np.frombuffer(raw, np.float32, entry.size_bytes // 4, entry.first_byte)
        for entry in entries
    }
