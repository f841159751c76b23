"""A command that is stopped ends and leaves nothing: while a child inspects the model, in training on any
screen, in a merge."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_tune.cli import app
from fsdp_tune.core.atomic import staged_directory
from fsdp_tune.core.errors import ExitCode
from fsdp_tune.core.signals import StoppedBySignal, stop_signals_raise
from fsdp_tune.jobs import inspection as checks
from fsdp_tune.merge import merging
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from tests.cli.conftest import Cli
from tests.cli.forked import Fork, command, ended
from tests.launch.links import until
from tests.recipe.loading import MINIMAL


class Finalised:
    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGUSR1, 143, marks=pytest.mark.slow)],
)
def test_signal_during_a_finaliser_is_not_lost(
    number: signal.Signals, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def app_of_minutes() -> None:
        with stop_signals_raise():
            Finalised(number)
            try:
                time.sleep(30)
            except KeyboardInterrupt:
                sys.exit(130)
            except StoppedBySignal as stopped:
                sys.exit(143 if stopped.number == number else 1)

    monkeypatch.setattr(app, "app", app_of_minutes)
    # on a busy machine the finaliser may take longer than 10 ms
    monkeypatch.setattr(app, "INTERRUPT_AGAIN_SECONDS", 0.3)
    done = ended(command())
    assert (done.code, done.err) == (exit_code, "")


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        (signal.SIGTERM, 143),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((signal.SIGINT, 130), (signal.SIGKILL, -9))
        ),
    ],
)
def test_signal_ends_the_inspection_of_the_model(
    number: signal.Signals, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, started = tmp_path / "recipe.yaml", tmp_path / "started"
    recipe.write_text(MINIMAL)
    for_minutes = f"import os, time; open({str(started)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(99)"
    monkeypatch.setattr(checks, "INSPECT", (sys.executable, "-c", for_minutes))
    validating = Fork(command("validate", recipe))
    child = psutil.Process(int(validating.wait_for(started, r"\d+\n")[0]))
    os.kill(validating.pid, number)  # to it alone, as a scheduler does: a terminal would tell the child too
    done = validating.end()
    assert (done.code, "Traceback" in done.err) == (exit_code, False), done.err
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_stopped_merge_removes_its_partial_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, output = tmp_path / "started", tmp_path / "merged"

    def merge_for_minutes(_source: Path, options: Any, *_: object, **__: object) -> None:
        with staged_directory(options.output):
            started.write_text("x")
            time.sleep(99)

    monkeypatch.setattr(merging, "merge_checkpoint", merge_for_minutes)
    merge = Fork(command("merge-checkpoint", "source", "-o", output, "--json"))
    merge.wait_for(started)
    os.kill(merge.pid, signal.SIGTERM)
    done = merge.end()
    assert (done.code, [error["code"] for error in json.loads(done.out)["errors"]]) == (143, ["stopped"])
    assert list(tmp_path.iterdir()) == [started]


def started_run(folder: Path, *settings: str, stdout: int) -> tuple[subprocess.Popen[str], RunDir]:
    """Start a run of many short steps, and wait until it has trained some."""
    run = RunDir(folder / "run")
    keys = (
        f"output_dir={run.path}",
        "training.max_steps=5000",
        "training.logging_steps=1",
        "training.save_steps=4000",
        *settings,
    )
    words = [word for key in keys for word in ("--set", key)]
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=stdout, stderr=subprocess.STDOUT, text=True)
    until(
        lambda: process.poll() is not None or sum("loss" in line for line in read_metrics(run)) > 40,
        seconds=200,
    )
    assert process.poll() is None
    return process, run


@pytest.mark.e2e
@pytest.mark.ranks
def test_signal_saves_while_nobody_reads_the_screen(tmp_path: Path) -> None:
    """`train | less`: the pipe is full after a few lines."""
    screen, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 4096)
    process, run = started_run(tmp_path, stdout=into)
    os.close(into)
    assert select.select([screen], [], [], 0)[0]
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    until(lambda: any(run.path.glob("checkpoint-*/manifest.json")), seconds=60)
    saved_seconds = time.monotonic() - began
    with open(screen, encoding="utf-8") as file:
        shown = file.read()
    assert process.wait(60) == ExitCode.PREEMPTED
    assert saved_seconds < 20, shown
    assert "SIGTERM: " in shown
    assert "SIGTERM: " in (run.logs / "train.log").read_text()


@pytest.mark.slow
@pytest.mark.ranks
def test_job_that_is_suspended_beyond_the_limit_goes_on(tmp_path: Path) -> None:
    """`scontrol suspend`, `docker pause`: every process of the job stands still, then continues."""
    process, run = started_run(tmp_path, "launch.hang_timeout=6s", stdout=subprocess.DEVNULL)
    tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in tree:
        each.suspend()
    time.sleep(20)
    for each in reversed(tree):
        each.resume()
    step = len(read_metrics(run))
    until(lambda: process.poll() is not None or len(read_metrics(run)) > step + 40, seconds=60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == ExitCode.PREEMPTED
    [line] = [line for line in read_metrics(run) if line.get("event") == "continued"]
    assert 18 < line["seconds"] < 25


@pytest.mark.slow
@pytest.mark.ranks
def test_start_slower_than_the_hang_timeout_is_no_hang(tmp_path: Path, cli: Cli) -> None:
    """Imports on a busy machine or a cold file system, here slept away before any import of the ranks."""
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, time\nif 'RANK' in os.environ:\n    time.sleep(75)\n", encoding="utf-8"
    )
    keys = (
        "launch.hang_timeout=15s",
        "training.max_steps=3",
        "merge.at_end=false",
        f"output_dir={tmp_path / 'run'}",
    )
    options = [word for key in keys for word in ("--set", key)]
    done = cli(
        "train",
        "--config",
        "gpt2_smoke",
        *options,
        PYTHONPATH=f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    )
    assert done.returncode == 0, done.stderr
