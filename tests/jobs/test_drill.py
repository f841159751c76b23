"""A drill interrupts its own job, reports what each interruption cost, and compares the models.

Slurm is replaced: its jobs train, save and start again while the drill waits, by a clock that only waiting
advances.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fsdp_tune.cluster.submit.slurm import parse_time
from fsdp_tune.core.errors import FailedError, FsdpTuneError, failed_error
from fsdp_tune.jobs import drill, slurm_queue, submit
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.slurm_queue import ENDED, QueuedJob
from fsdp_tune.jobs.submit_options import SlurmOptions, SubmitOptions
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.job_files import ENDED_BY_SLURM, JobFiles
from fsdp_tune.run.metrics_file import MetricsFile
from tests.run.test_checkpoint_scores import save

QUEUE_SECONDS, IMPORT_SECONDS = 4, 12
STEPS_A_SECOND = 10


class Said(Observer):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass
class Job:
    """A job of two nodes whose run trains up to `max_steps`."""

    id: str
    files: JobFiles
    max_steps: int
    limit_seconds: float = 36.0
    state: str = "PENDING"
    reason: str = "Priority"
    seconds: int = 0
    """In this state."""
    start: int = -1
    step: int = 0

    @property
    def run(self) -> RunDir:
        return RunDir(self.files.output_dir)

    def turn(self, state: str, reason: str = "None") -> None:
        self.state, self.reason, self.seconds = state, reason, 0

    def record(self, event: str, now: float, **fields: object) -> None:
        """Append a line to the ledger, as the batch script does."""
        checkpoint, _ = latest_checkpoint(self.run)
        line = {"event": event, "job": self.id, "start": self.start, "time": int(now), **fields}
        self.files.folder.mkdir(parents=True, exist_ok=True)
        with self.files.attempts.open("a") as ledger:
            ledger.write(json.dumps(line | {"step": checkpoint.step if checkpoint else 0}) + "\n")

    def ends(self, now: float, exit_code: int, then: str, state: str, reason: str = "None") -> None:
        if self.state == "RUNNING":
            self.record("ended", now, exit_code=exit_code, then=then)
        self.turn(state, reason)

    def passes(self, now: float) -> None:
        """Let one second pass."""
        self.seconds += 1
        if self.state == "PENDING" and self.reason != "BeginTime" and self.seconds >= QUEUE_SECONDS:
            self.turn("RUNNING")
            self.start += 1
            self.record("started", now, nodes="node[1-2]")
        elif self.state == "RUNNING" and self.seconds >= IMPORT_SECONDS:
            self.trains(now)
            if self.step == self.max_steps:
                self.ends(now, 0, "finished", "COMPLETED")
            elif self.seconds >= self.limit_seconds:
                save(self.run, self.step)
                self.ends(now, 143, "requeued", "PENDING", "Priority")

    def trains(self, now: float) -> None:
        self.run.path.mkdir(exist_ok=True)
        self.run.recipe_json.write_text("{}")
        is_first = self.seconds == IMPORT_SECONDS
        if is_first:  # the ranks cut the file back only when they have been imported
            checkpoint, _ = latest_checkpoint(self.run)
            self.step = checkpoint.step if checkpoint else 0
        metrics = MetricsFile(self.run, resume_step=self.step or None, enabled=True)
        end = min(self.step + STEPS_A_SECOND, self.max_steps)
        while self.step < end:
            self.step += 1
            metrics.write({"step": self.step, "time": now, "loss": 1.0})
            if self.step % drill.SAVE_STEPS == 0 or self.step == self.max_steps:
                save(self.run, self.step)
        metrics.close()


class Slurm:
    """A cluster with nodes for every job."""

    def __init__(self) -> None:
        self.now, self.called = 1000.0, list[str]()
        self.jobs: dict[str, Job] = {}
        self.on_cancel: Callable[[Job], object] = lambda _: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 3000, "nothing happens any more"
        for job in self.jobs.values():
            job.passes(self.now)

    def submitted(self, files: JobFiles, max_steps: int, limit_seconds: float = 36.0) -> Job:
        job = Job(str(len(self.jobs) + 1), files, max_steps, limit_seconds)
        self.jobs[job.id] = job
        return job

    def call(self, *command: str) -> str:
        self.called.append(" ".join(command))
        match command:
            case ("squeue", *options):
                ended = frozenset[str]() if "--states=all" in options else ENDED
                shown = [job for job in self.jobs.values() if job.state not in ended]
                return "".join(f"{job.id}|{job.state}|{job.reason}|{job.files.mark}\n" for job in shown)
            case ("sbatch", *_, script):
                folder, text = Path(script).parent, Path(script).read_text()
                patterns = (r"training\.max_steps=(\d+)", r"--time=(\S+)")
                steps, limit = (re.search(pattern, text) for pattern in patterns)
                assert steps is not None
                assert limit is not None
                files = JobFiles(folder.with_name(folder.name.removesuffix(".submit")))
                return f"{self.submitted(files, int(steps[1]), parse_time(limit[1]) / 10).id};cluster\n"
            case ("scontrol", "requeue", job):
                self.jobs[job].ends(self.now, 143, ENDED_BY_SLURM, "PENDING", "BeginTime")
            case ("scontrol", "update", job, "StartTime=now"):
                self.jobs[job.removeprefix("JobId=")].reason = "Priority"
            case ("scontrol", "show", "hostnames", nodes):
                assert nodes == "node[1-2]"
                return "node1\nnode2\n"
            case ("srun", job, *_):
                self.jobs[job.removeprefix("--jobid=")].turn("PENDING", "Priority")  # nothing is recorded
            case ("scancel", job):
                self.on_cancel(self.jobs[job])
                self.jobs[job].ends(self.now, 143, ENDED_BY_SLURM, "CANCELLED")
            case _:
                raise AssertionError(command)
        return ""


@dataclass(frozen=True)
class Submitted:
    """A submission whose script is not written."""

    slurm: Slurm
    files: JobFiles
    max_steps: int = 10_000_000
    block_file: Path | None = None

    def submit(self) -> SimpleNamespace:
        return SimpleNamespace(job=self.slurm.submitted(self.files, self.max_steps).id)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    for module in (slurm_queue, submit, drill):
        monkeypatch.setattr(module, "call_slurm", made.call)
    monkeypatch.setattr(drill, "time", made)
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def said() -> Said:
    return Said()


def watched(slurm: Slurm, said: Said, max_steps: int = 10_000_000) -> drill._Watched:
    submitted: Any = Submitted(slurm, JobFiles(Path("run").absolute()), max_steps)
    return drill._Watched(drill._Jobs(said), submitted, said)


def write_model(path: Path, *values: float) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tensors = {"a": np.zeros((0, 2), np.float32), "b": np.array([values], np.float32)}
    save_file(tensors, path / "model.safetensors")
    return path / "model.safetensors"


def test_drill_reports_the_cost_of_each_interruption_and_compares_the_models(
    slurm: Slurm, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop without a save loses the steps since the last one; the time limit saves. The time until a start
    trains again has the queue and the imports in it."""
    merges: list[MergeOptions] = []

    def merge_checkpoint(_: Path, options: MergeOptions, *, observer: Observer) -> SimpleNamespace:
        merges.append(options)
        assert options.output is not None
        write_model(options.output, 1.0, 2.0 + 3e-5 * len(merges))
        return SimpleNamespace(output=options.output)

    monkeypatch.setattr(drill, "merge_checkpoint", merge_checkpoint)
    monkeypatch.setattr(submit, "checkpoint_bytes", lambda _: 2_000_000)  # without a trace
    answer = drill.drill(SubmitOptions(nodes=2), SlurmOptions(), ["training.seed=7"], said)
    first, second = slurm.jobs.values()
    assert [
        (each.event, each.start, each.exit_code, each.then, each.lost_steps) for each in answer.events
    ] == [
        ("preemption", 0, 143, ENDED_BY_SLURM, 20),
        ("node loss", 1, None, None, 20),
        ("time limit", 2, 143, "requeued", 0),
    ]
    assert [each.step - each.resumed_at for each in answer.events] == [20, 20, 0]
    for each in answer.events:
        assert QUEUE_SECONDS + IMPORT_SECONDS <= each.seconds <= QUEUE_SECONDS + IMPORT_SECONDS + 10, each
    assert (answer.jobs, first.state, second.state) == (["1", "2"], "CANCELLED", "COMPLETED")
    assert second.step == answer.steps == second.max_steps
    assert answer.steps > answer.events[2].step
    assert (answer.equal, answer.passed) == (False, True)
    assert answer.largest_difference == pytest.approx(3e-5, rel=0.01)
    assert [options.overwrite for options in merges] == [True, True]
    assert "--nodelist=node2 bash -c scontrol listpids 1.0" in next(
        each for each in slurm.called if each.startswith("srun")
    )
    scripts = [job.files.script.read_text() for job in (first, second)]
    assert all("launch.num_processes=4" in text and "training.seed=7" in text for text in scripts)
    assert "#SBATCH --time=0-00:06:00" in scripts[0]
    assert "#SBATCH --time=0-00:06:00" not in scripts[1], "it trains in one start what took several"


@pytest.mark.parametrize(
    ("other", "equal", "difference", "passed"),
    [
        ((1.0, 2.0), True, 0.0, True),
        ((1.0, 2.00005), False, 5e-5, True),
        ((1.0, 1.0), False, 1.0, False),
        ((1.0, float("nan")), False, None, False),
    ],
)
def test_models_are_compared_by_their_largest_difference(
    tmp_path: Path, other: tuple[float, ...], equal: bool, difference: float | None, passed: bool
) -> None:
    found = drill._compare(write_model(tmp_path / "a", 1.0, 2.0), write_model(tmp_path / "b", *other))
    assert found[0] is equal
    assert difference is None or found[1] == pytest.approx(difference, rel=0.01)
    assert drill.DrillAnswer("", "", [], [], 1, *found).passed is passed


def test_job_that_ends_before_it_saves_fails_the_drill_with_its_state_and_log(
    slurm: Slurm, said: Said
) -> None:
    first = watched(slurm, said)
    slurm.jobs["1"].turn("FAILED", "NonZeroExitCode")
    with pytest.raises(FailedError) as caught:
        first.wait(first.has_saved, "it saves a checkpoint")
    (problem,) = caught.value.problems
    assert problem.message == (
        "job 1 was watched until it saves a checkpoint, which did not happen: job 1 is FAILED "
        "(NonZeroExitCode)"
    )
    assert str(first.files.log("1")) in str(problem.hint)


def test_limit_counts_the_time_that_a_job_runs_and_not_its_time_in_the_queue(
    slurm: Slurm, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "QUEUE_SECONDS", 50)
    first = watched(slurm, said)
    began = slurm.now
    with pytest.raises(FailedError, match=r"it never saves, which did not happen: job 1 is RUNNING"):
        first.wait(lambda: False, "it never saves", limit=20.0)
    assert 70 <= slurm.now - began <= 80


def test_start_trains_when_its_own_steps_are_logged(slurm: Slurm, said: Said) -> None:
    """Until the ranks cut metrics.jsonl back, it has the steps that were lost."""
    first = watched(slurm, said)
    first.wait(first.has_saved, "it saves")
    assert (first.saved_step, first.step) == (50, 60)
    event = first.interrupted("node loss", first.kill_last_node)
    assert event.seconds >= QUEUE_SECONDS + IMPORT_SECONDS
    assert (event.step, event.resumed_at, event.lost_steps) == (70, 50, 20)
    assert said.messages[-1].startswith("node loss: 20 steps lost, training again after ")


def test_requeued_job_does_not_wait_for_its_begin_time(
    slurm: Slurm, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill, "QUEUE_SECONDS", 0.0)
    first = watched(slurm, said)
    first.wait(lambda: "job 1 is RUNNING" in said.messages, "it starts")
    slurm.call("scontrol", "requeue", "1")
    first.wait(lambda: said.messages.count("job 1 is RUNNING") == 2, "it starts again")
    assert "scontrol update JobId=1 StartTime=now" in slurm.called
    assert [each for each in said.messages if each.startswith("job 1 is")] == [
        "job 1 is PENDING (Priority)",
        "job 1 is RUNNING",
        "job 1 is PENDING (BeginTime)",
        "job 1 is PENDING (Priority)",
        "job 1 is RUNNING",
    ]


def test_job_that_leaves_no_checkpoint_fails_the_drill(
    slurm: Slurm, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(job: Job) -> None:
        for manifest in job.run.path.glob("checkpoint-*/manifest.json"):
            manifest.unlink()

    slurm.on_cancel = lose
    monkeypatch.setattr(drill._Watched, "interrupted", lambda *_: None)
    submitted: Any = Submitted(slurm, JobFiles(Path("run").absolute()))
    with pytest.raises(FailedError, match="job 1 left no complete checkpoint"):
        drill._disturb(drill._Jobs(said), submitted, said)


def test_undisturbed_job_that_does_not_finish_fails_the_drill(
    slurm: Slurm, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cancelled by another person. What it has trained is not compared."""
    made = [Submitted(slurm, JobFiles(Path(name).absolute())) for name in ("second", "first")]
    monkeypatch.setattr(drill, "submission", lambda *_, **__: made.pop())
    played = drill._Disturbed([], 70, 60.0)

    def disturb(jobs: drill._Jobs, submitted: Any, observer: Observer) -> drill._Disturbed:
        drill._Watched(jobs, submitted, observer)
        return played

    monkeypatch.setattr(drill, "_disturb", disturb)
    wait = drill._Watched.wait

    def cancelled(self: drill._Watched, *words: Any, **more: Any) -> None:
        while not self.starts:
            slurm.sleep(1.0)
        slurm.call("scancel", self.job)
        wait(self, *words, **more)

    monkeypatch.setattr(drill._Watched, "wait", cancelled)
    with pytest.raises(FailedError, match="job 2 was watched until it trains undisturbed"):
        drill.drill(SubmitOptions(), SlurmOptions(), [], said)
    assert said.messages[-1] == "cancelling job 1", "the other has ended"
    assert [job.state for job in slurm.jobs.values()] == ["CANCELLED", "CANCELLED"]


def test_run_of_an_earlier_drill_is_moved_aside_unless_its_job_is_queued(slurm: Slurm, said: Said) -> None:
    first = watched(slurm, said)
    first.wait(first.has_saved, "it saves a checkpoint")
    with pytest.raises(FsdpTuneError, match="nothing is submitted: job 1 is RUNNING"):
        watched(slurm, said)
    assert first.saved_step == 50
    slurm.call("scancel", "1")
    second = watched(slurm, said)
    assert (second.job, second.saved_step, second.starts) == ("2", 0, [])
    assert len(list(Path().glob("run.old-*/checkpoint-50"))) == 1
    assert any(each.startswith("the run of an earlier drill is now ") for each in said.messages)


def test_jobs_that_are_left_are_cancelled_and_those_that_end_are_not(slurm: Slurm, said: Said) -> None:
    states = {"1": "RUNNING", "2": "COMPLETING", "3": "TIMEOUT", "4": "PENDING"}
    for number, state in states.items():
        slurm.submitted(JobFiles(Path(number)), 1).turn(state)
    with drill._Jobs(said) as jobs:
        jobs.ids += [*states, "5"]  # the controller has forgotten the last one
    assert [each for each in slurm.called if each.startswith("scancel")] == ["scancel 1", "scancel 4"]
    assert said.messages == ["cancelling job 1", "cancelling job 4"]


def test_job_is_not_over_until_slurm_has_answered(
    slurm: Slurm, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [failed_error("slurm-failed", "no answer"), QueuedJob("1", "PENDING", ""), None]

    def job_now(_: str) -> QueuedJob | None:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(drill, "job_now", job_now)
    monkeypatch.setattr(drill, "QUEUE_SECONDS", 0.0)
    first = watched(slurm, said)
    over = [first.is_over]
    for _ in range(3):
        first._look()
        over.append(first.is_over)
    assert over == [False, False, False, True]


def test_job_that_cannot_be_cancelled_is_named(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(_: str) -> None:
        raise failed_error("slurm-failed", "`squeue` failed: no answer")

    monkeypatch.setattr(drill, "job_now", no_answer)
    with drill._Jobs(said) as jobs:
        jobs.ids.append("7")
    assert said.messages == ["job 7 may still run: `squeue` failed: no answer; `scancel 7` cancels it"]
