"""A real Slurm of two nodes on this machine: submit, follow, cancel, lose nodes, and the drill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.job_files import JobStart, read_attempts
from tests.cluster.slurm_cluster import Cluster, missing, running_cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.e2e,
    pytest.mark.ranks,
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm to test with: {missing()}"),
]

STEPS, SAVE_STEPS = 480, 5
"""Of 0.3 s and more: the controller needs 20 s to find a node lost, in which the job must not end."""
TWO_NODES = (
    "--nodes",
    "2",
    "--set",
    "launch.num_processes=4",
    "--set",
    "launch.num_cpu_threads_per_process=1",
)
HYBRID = (
    "fsdp.sharding_strategy=HYBRID_SHARD",
    "parallelism.dp_replicate_size=2",
    "parallelism.dp_shard_size=2",
)
TRAINING = (
    f"training.max_steps={STEPS}",
    f"training.save_steps={SAVE_STEPS}",
    "training.logging_steps=1",
    "training.global_batch_size=768",
    "training.save_total_limit=100",
    "data.eval=null",
    "data.max_length=16",
)
LIMIT_SECONDS = 600.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


class Shell:
    """Runs commands in a directory of the test, with this cluster's Slurm."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fsdp_tune", *words]
        environment = {**os.environ, **self.cluster.environment}
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=environment,
            start_new_session=True,
        )

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        text, _ = process.communicate(timeout=LIMIT_SECONDS * 3)
        return process.returncode, text

    def submit(self, name: str, *more: str) -> str:
        """Submit a run on both nodes and return the job's id."""
        code, text = self.run(
            "submit", "slurm", "gpt2_smoke", "--name", name, *settings(*TRAINING, *HYBRID), *TWO_NODES, *more
        )
        assert code == 0, text
        return text.split()[1]

    def path(self, name: str) -> Path:
        return self.folder / "runs" / name

    def starts(self, name: str) -> list[JobStart]:
        return read_attempts(self.path(name))

    def state(self, job: str) -> str:
        return (
            self.cluster.call("squeue", "-h", "--states=all", "-o", "%A|%T")
            .partition(f"{job}|")[2]
            .partition("\n")[0]
        )

    def start_now(self, job: str) -> None:
        """Slurm lets a requeued job wait for two minutes."""
        self.until(lambda: self.state(job) == "PENDING", f"job {job} is pending again")
        self.cluster.call("scontrol", "update", f"JobId={job}", "StartTime=now")

    def until(self, is_done: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not is_done():
            if time.monotonic() > deadline:
                logs = [
                    path.read_text(errors="replace")[-3000:]
                    for path in self.folder.glob("runs/*.submit/slurm-*.out")
                ]
                raise AssertionError("\n".join([f"{what}: not within {LIMIT_SECONDS:.0f} s", *logs]))
            time.sleep(0.3)

    def saved(self, name: str, step: int) -> None:
        self.until(
            lambda: (
                (found := latest_checkpoint(RunDir(self.path(name)))[0]) is not None and found.step >= step
            ),
            f"step {step} is saved",
        )

    def finished(self, name: str, job: str) -> bytes:
        """Wait for the end of a run and return its model."""
        self.until(
            lambda: self.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), f"job {job} ends"
        )
        assert self.state(job) == "COMPLETED", next(
            self.folder.glob(f"runs/{name}.submit/slurm-*.out")
        ).read_text()[-3000:]
        return (self.path(name) / "merged" / "model.safetensors").read_bytes()


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.fixture
def shell(cluster: Cluster, tmp_path: Path) -> Iterator[Shell]:
    yield Shell(cluster, tmp_path)
    cluster.cancel_all()


def losses(run: Path) -> list[Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_two_nodes_train_the_model_of_one_also_when_nodes_are_lost(shell: Shell, cluster: Cluster) -> None:
    code, text = shell.run(
        "train", "gpt2_smoke", "--name", "alone", *settings(*TRAINING, *HYBRID, "launch.num_processes=4")
    )
    assert code == 0, text
    alone = (shell.path("alone") / "merged" / "model.safetensors").read_bytes()

    job = shell.submit("lossy", "--time", "30m")
    code, text = shell.run(
        "submit", "slurm", "gpt2_smoke", "--name", "lossy", *settings(*TRAINING, *HYBRID), *TWO_NODES
    )
    assert (code, f"job {job} is" in text) == (2, True), text
    shell.saved("lossy", SAVE_STEPS)
    cluster.call("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    shell.until(lambda: shell.state(job) != "RUNNING", "the job of a node that is down is stopped")
    shell.start_now(job)  # n2 returns by itself (ReturnToService)
    shell.until(lambda: len(shell.starts("lossy")) == 2, "the job starts again")
    resumed = shell.starts("lossy")[1].first_step
    assert resumed >= SAVE_STEPS

    shell.saved("lossy", resumed + SAVE_STEPS)
    cluster.kill_node("n2")
    shell.until(lambda: shell.state(job) != "RUNNING", "the job of a node without its daemon is stopped")
    assert shell.state(job) != "COMPLETED"
    cluster.start_node("n2")
    shell.start_now(job)
    assert shell.finished("lossy", job) == alone
    assert losses(shell.path("lossy")) == losses(shell.path("alone"))
    starts = shell.starts("lossy")
    assert [start.start for start in starts] == [0, 1, 2]
    assert (starts[-1].exit_code, starts[-1].then, starts[-1].last_step) == (0, "finished", STEPS)
    code, text = shell.run("status", str(shell.path("lossy")))
    assert f"{job}.2" in text
    code, text = shell.run(
        "submit", "slurm", "gpt2_smoke", "--name", "lossy", *settings(*TRAINING, *HYBRID), *TWO_NODES
    )
    assert (code, "has finished; nothing is submitted" in text) == (0, True), text


def test_cancelled_job_saves_stays_cancelled_and_continues_when_submitted_again(
    shell: Shell, cluster: Cluster
) -> None:
    follower = shell.start(
        "submit",
        "slurm",
        "gpt2_smoke",
        "--name",
        "stopped",
        *settings(*TRAINING, *HYBRID),
        *TWO_NODES,
        "--follow",
    )
    shell.until(lambda: shell.starts("stopped"), "the job starts")
    job = shell.starts("stopped")[0].job
    shell.saved("stopped", SAVE_STEPS)
    cluster.call("scancel", job)
    text, _ = follower.communicate(timeout=LIMIT_SECONDS)
    assert follower.returncode == 143, text
    assert f"job {job} ended: CANCELLED, exit code 143" in text
    (start,) = shell.starts("stopped")
    assert (start.exit_code, start.then) == (143, "ended by Slurm")
    assert start.last_step is not None
    assert start.last_step > SAVE_STEPS
    again = shell.submit("stopped")
    shell.finished("stopped", again)
    first, second = shell.starts("stopped")
    assert (second.job, second.first_step, second.then) == (again, first.last_step, "finished")


def test_step_with_other_nodes_than_the_recipe_is_refused_before_it_starts(
    shell: Shell, cluster: Cluster
) -> None:
    train = (
        sys.executable,
        "-m",
        "fsdp_tune",
        "train",
        "gpt2_smoke",
        "--set",
        f"output_dir={shell.path('wrong')}",
    )
    for size in (("--nodes=2", "--ntasks-per-node=1"), ("--nodes=1", "--ntasks=2")):
        done = subprocess.run(
            ["srun", "--time=2", *size, *train],
            capture_output=True,
            text=True,
            env={**os.environ, **cluster.environment},
            timeout=120,
        )
        assert done.returncode == 2, done.stderr
        assert "error: srun started" in done.stderr
    assert not shell.path("wrong").exists()


def test_drill_loses_what_was_not_saved_and_ends_with_the_same_model(shell: Shell) -> None:
    code, text = shell.run(
        "submit",
        "slurm",
        "--drill",
        "--nodes",
        "2",
        "--set",
        "launch.num_cpu_threads_per_process=1",
        "--json",
    )
    answer = json.loads(text[text.index("\n{") :])
    assert code == 0, text
    assert [
        (event["event"], event["exit_code"], event["lost_steps"])
        for event in answer["events"]
        if event["event"] != "node loss"
    ] == [
        ("preemption", 143, 0),
        ("time limit", 143, 0),
    ]
    assert answer["equal"]


def test_sweep_trains_its_runs_side_by_side(shell: Shell, cluster: Cluster) -> None:
    words = (
        "submit",
        "slurm",
        "gpt2_smoke",
        "--sweep",
        "training.learning_rate=1e-5,1e-2",
        *settings(
            "training.max_steps=5",
            "data.eval=null",
            "launch.num_cpu_threads_per_process=1",
            "output_dir=runs/rates",
        ),
    )
    code, text = shell.run(*words)
    assert code == 0, text
    shell.until(lambda: not cluster.call("squeue", "-h"), "the array ends")
    for name in ("learning_rate=1e-5", "learning_rate=1e-2"):
        (start,) = shell.starts(f"rates/{name}")
        assert (start.then, start.last_step) == ("finished", 5)
    code, text = shell.run(*words)
    assert (code, "nothing is submitted" in text) == (0, True), text
