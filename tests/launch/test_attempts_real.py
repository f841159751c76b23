"""Restarts with real `accelerate launch`, gloo ranks and sharded checkpoints; the result equals the
uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fsdp_tune.data.preparation import rows_of_step
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.launch.supervise.attempts import Attempts
from fsdp_tune.launch.supervise.launch_events import Event, Message
from fsdp_tune.run.directory import RunDir, latest_checkpoint
from fsdp_tune.run.rank_files import Verdict, read_heartbeat
from tests.conftest import REPOSITORY
from tests.cuda.devices import on_devices
from tests.cuda.environment import environment_on
from tests.launch.orphans import children, left_over
from tests.parity.runs import lines, loss_lines, saved_parameters

pytestmark = [pytest.mark.e2e, pytest.mark.ranks]

SECRET = "s3cretvalue7f3a"
SECRETS = {
    "HF_TOKEN": f"hf_{SECRET}{'x' * 20}",
    "WANDB_API_KEY": SECRET,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "https_proxy": f"http://user:{SECRET}@127.0.0.1:1",
}


def environment(device: str = "cpu") -> dict[str, str]:
    return environment_on(device, {**os.environ, **SECRETS, "PYTHONPATH": str(REPOSITORY)})


def written(folder: Path, name: str, *, steps: int, device: str = "cpu", **keys: Any) -> RunDir:
    """A run directory as `train --no-start` leaves it, of the embedded recipe with a line and a save after
    each step."""
    settings = {
        "output_dir": str(folder / name),
        "training.max_steps": steps,
        "training.save_steps": 1,
        "training.logging_steps": 1,
        "training.eval_strategy": "no",
        "training.warmup_steps": 0,
        "training.report_to": [],
        "checkpoint.probe": False,
        "launch.device": device,
        "launch.max_restarts": 100,
        "launch.num_cpu_threads_per_process": 1,
    }
    words = [
        word for key, value in (settings | keys).items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *words, "--no-start"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=environment(device)
    )
    assert done.returncode == 0, done.stderr
    return RunDir(folder / name)


def launch(run: RunDir, *accidents: dict[str, Any]) -> tuple[Verdict, list[Event]]:
    (run.path / "accidents.json").write_text(json.dumps(accidents))
    recipe = read_resolved(run)
    plan = launch_plan(
        recipe, run, worker_module="tests.launch.mortal", inherited=environment(str(recipe.launch.device))
    )
    before = children()
    events = list(Attempts(plan, recipe, partial(rows_of_step, run.data_json, recipe)).events())
    assert isinstance(events[-1], Verdict)
    assert left_over(before) == []
    return events[-1], events


def numbers(run: RunDir) -> list[tuple[Any, ...]]:
    return [
        (line["step"], line["loss"], line["grad_norm"], line["learning_rate"], line["tokens"])
        for line in loss_lines(run)
    ]


def assert_same_end(run: RunDir, whole: RunDir, steps: int) -> None:
    """Every step once, with the same digits; the same parameters to the last bit."""
    assert [line[0] for line in numbers(run)] == list(range(1, steps + 1))
    assert numbers(run) == numbers(whole)
    one, other = saved_parameters(run, steps), saved_parameters(whole, steps)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in other)


def restarted(run: RunDir) -> list[dict[str, Any]]:
    return [line for line in lines(run) if line.get("event") == "restarted"]


@pytest.mark.slow
@on_devices
def test_restarts_after_kill_and_failure_equal_uninterrupted_run(tmp_path: Path, device: str) -> None:
    run = written(tmp_path, "run", steps=5, device=device, **{"checkpoint.async": False})
    shutil.copytree(run.path, tmp_path / "whole")
    whole = RunDir(tmp_path / "whole")
    assert launch(whole)[0].exit_code == 0
    ended, events = launch(
        run, {"rank": 1, "step": 2, "how": int(signal.SIGKILL)}, {"rank": 0, "step": 4, "how": "raise"}
    )
    assert (ended.exit_code, ended.problem, ended.step) == (0, None, 5)
    assert_same_end(run, whole, 5)
    assert [(event["restart"], event["code"]) for event in restarted(run)] == [
        (1, "rank-killed"),
        (2, "worker-failed"),
    ]
    said = [event.text for event in events if isinstance(event, Message) and "restarting" in event.text]
    assert (
        said[0]
        == "rank 1 was killed by SIGKILL at step 2: restarting from checkpoint-1 (restart 1 of 100); 1 "
        "step will be repeated"
    )
    assert [
        path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ] == []
    assert said[1].startswith("RuntimeError: a library failed (rank 0, step 4): restarting from checkpoint-3")


@pytest.mark.slow  # five minutes: each launch imports the stack
def test_twenty_kills_equal_uninterrupted_run(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    steps = 24
    run = written(tmp_path, "run", steps=steps)
    shutil.copytree(run.path, tmp_path / "whole")
    whole = RunDir(tmp_path / "whole")
    assert launch(whole)[0].exit_code == 0
    kills = [{"rank": number % 2, "step": number + 2, "how": int(signal.SIGKILL)} for number in range(20)]
    ended, _ = launch(run, *kills)
    assert (ended.exit_code, ended.problem, ended.step) == (0, None, steps)
    assert len(restarted(run)) == len(kills) == 20
    assert_same_end(run, whole, steps)
    # Not `record_property`, which pytest's report of the scoreboard's form refuses.
    request.node.user_properties.append(("rank_kills_in_a_row", len(kills)))


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(
    "how", [int(signal.SIGSTOP), "sleep", "hold"], ids=["stopped", "sleeps", "holds Python's lock"]
)
def test_hanging_rank_is_named_and_the_run_restarts(tmp_path: Path, how: int | str, device: str) -> None:
    run = written(tmp_path, "run", steps=4, device=device, **{"launch.hang_timeout": "20s"})
    ended, events = launch(run, {"rank": 1, "step": 2, "how": how})
    assert ended.exit_code == 0
    (said,) = [event.text for event in events if isinstance(event, Message) and "restarting" in event.text]
    assert "no progress for" in said
    assert "rank 1 (step 2, `training`" in said
    assert "is late; waiting for it: rank 0 in " in said
    report = run.hang_report.read_text()
    assert all(f"── stacks of rank {rank}" in report for rank in (0, 1))
    assert "mortal.py" in report
    assert (run.flight_recorder / "rank_0").stat().st_size > 0


@pytest.mark.slow
@on_devices
def test_three_failures_at_one_step_end_the_run_and_name_rows(tmp_path: Path, device: str) -> None:
    run = written(tmp_path, "run", steps=6, device=device)
    accident = {"rank": 1, "step": 3, "how": "raise"}
    ended, _ = launch(run, accident, accident, accident)
    assert ended.exit_code == 1
    assert ended.problem is not None
    assert ended.problem.code == "fails-each-time"
    assert "step 4 failed 3 times in a row; the rows of that step: " in ended.problem.message
    assert "(builtin:arithmetic:" in ended.problem.message
    checkpoint, rejected = latest_checkpoint(run, digests=True)
    assert checkpoint is not None
    assert rejected == []


@pytest.mark.slow
@on_devices
@pytest.mark.parametrize(("how", "code", "restarts"), [("oom", 3, 0), ("memory", 0, 1)])
def test_run_out_of_host_memory_restarts_and_out_of_device_memory_does_not(
    tmp_path: Path, how: str, code: int, restarts: int, device: str
) -> None:
    run = written(tmp_path, "run", steps=4, device=device)
    ended, _ = launch(run, {"rank": 1, "step": 2, "how": how})
    assert ended.exit_code == code
    assert len(restarted(run)) == restarts
    if ended.problem is not None:
        assert (
            "live: activations, gathered parameters and workspace 74.02 GiB, optimizer state"
            in ended.problem.message
        )
        assert ended.problem.message.endswith("(rank 1, step 2)")
        assert len(ended.problem.ways_out) == 3


@pytest.mark.slow
def test_run_under_nohup_survives_a_hangup(tmp_path: Path) -> None:
    """SIGHUP and SIGINT, which the caller ignores, to the command, the launcher and the ranks."""

    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    run = RunDir(tmp_path / "run")
    words = [
        "--set",
        f"output_dir={run.path}",
        "--set",
        "training.max_steps=30",
        "--set",
        "merge.at_end=false",
        "--json",
    ]
    command = [sys.executable, "-m", "fsdp_tune", "train", "--config", "gpt2_smoke", *words]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True, preexec_fn=ignore
    ) as process:
        deadline = time.monotonic() + 200
        while (beat := read_heartbeat(run, 1)) is None or beat.step < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            each.send_signal(signal.SIGHUP)
            each.send_signal(signal.SIGINT)
        outcome = json.loads(process.communicate(timeout=300)[0])
    assert (process.returncode, outcome["exit_reason"], outcome["steps"]) == (0, "finished", 30)
