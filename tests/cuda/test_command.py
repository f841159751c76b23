"""The command on emulated GPUs, as on a machine that has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import require
from tests.cuda.environment import with_gpus

STEPS = 24


def fsdp_tune(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp_tune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.e2e
def test_env_lists_the_devices_and_the_driver() -> None:
    require("cuda")
    done = fsdp_tune("env", "--json", environment=with_gpus(2, "A100"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    text = json.dumps(found)
    assert text.count("NVIDIA A100-SXM4-80GB") >= 2
    assert "580.95.05" in text


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[dict[str, Any]]]:
    """A run of `STEPS` steps on two GPUs, and what each of its ranks counted."""
    require("cuda")
    folder = tmp_path_factory.mktemp("trained")
    changes = {
        "launch.device": "cuda",
        "launch.num_processes": 2,
        "output_dir": folder / "run",
        "training.max_steps": STEPS,
        "training.logging_steps": 1000,
        "training.eval_strategy": "no",
        "training.save_steps": 1000,
        "checkpoint.probe": "false",
    }
    arguments = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    environment = with_gpus(2, report=folder / "report", races=True)
    done = fsdp_tune("train", "--config", "gpt2_smoke", *arguments, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(path.read_text()) for path in (folder / "report").iterdir()]
    return RunDir(folder / "run"), [report for report in reports if report["rank"] is not None and report["operations"] > 1000]


@pytest.mark.e2e
def test_run_on_gpus_trains_and_merges(trained: tuple[RunDir, list[dict[str, Any]]]) -> None:
    run, reports = trained
    assert (run.merged / "model.safetensors").exists()
    assert len(reports) == 2


@pytest.mark.e2e
def test_steady_state_waits_for_the_device_once_a_step(trained: tuple[RunDir, list[dict[str, Any]]]) -> None:
    """For the norm of the step before, so that a gradient that is not finite stops the run; nothing else waits in each step."""
    for report in trained[1]:
        steady = [each for each in report["synchronisations"] if each["steps"] > STEPS // 2]
        places = [(each["kind"], each["times"] - each["steps"], each["site"].split(":")[0]) for each in steady]
        assert places == [("event", 0, "fsdp_tune/worker/step_checks.py")]


@pytest.mark.e2e
def test_streams_of_a_run_have_no_races(trained: tuple[RunDir, list[dict[str, Any]]]) -> None:
    assert [report["races"] for report in trained[1]] == [[], []]


@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("planted", "state", "words"),
    [
        pytest.param({}, "ok", "idle before, 1980 MHz or more under load", marks=pytest.mark.slow),
        pytest.param({"used_gib": "20"}, "warn", "was not idle: 20.00 GiB of its memory in use (and 1 more)", marks=pytest.mark.slow),
        pytest.param({"busy_percent": "90"}, "warn", "was not idle: 90 % busy", marks=pytest.mark.slow),
        pytest.param({"power_watts": "400"}, "warn", "is limited to 400 W of 700 W", marks=pytest.mark.slow),
        pytest.param({"slowed": "0x40"}, "warn", "lowers its clock (heat, by the hardware)", marks=pytest.mark.slow),
        pytest.param({"ecc_errors": "3"}, "fail", "has 3 uncorrected memory errors", marks=pytest.mark.slow),
    ],
)
def test_doctor_names_an_unfit_gpu(tmp_path: Path, planted: dict[str, str], state: str, words: str) -> None:
    require("cuda")
    changes = ["--set", "launch.device=cuda", "--set", "launch.num_processes=2", "--set", f"output_dir={tmp_path / 'run'}"]
    done = fsdp_tune("doctor", "--config", "gpt2_smoke", *changes, "--json", environment=with_gpus(2, **planted))
    answer = json.loads(done.stdout)
    (found,) = [check for check in answer["checks"] if check["name"] == "GPUs"]
    assert found["state"] == state, done.stderr
    assert words in found["finding"]
    assert done.returncode == (1 if state == "fail" else 0)
