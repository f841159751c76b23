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


def fsdp_tune(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fsdp_tune", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def train(folder: Path, gpus: int, steps: int, **options: Any) -> tuple[RunDir, list[dict[str, Any]]]:
    """Train on emulated GPUs. Returns the run, and what each of its ranks counted."""
    changes = {
        "launch.device": "cuda",
        "launch.num_processes": gpus,
        "output_dir": folder / "run",
        "training.max_steps": steps,
        "training.logging_steps": 1000,
        "training.eval_strategy": "no",
        "training.save_steps": 1000,
        "checkpoint.probe": "false",
    }
    arguments = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    done = fsdp_tune(
        "train",
        "--config",
        "gpt2_smoke",
        *arguments,
        environment=with_gpus(gpus, report=folder / "report", **options),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(path.read_text()) for path in (folder / "report").iterdir()]
    return RunDir(folder / "run"), [
        report for report in reports if report["rank"] is not None and report["operations"] > 1000
    ]


@pytest.mark.slow
@pytest.mark.e2e
def test_run_on_a_gpu_trains_and_merges(tmp_path: Path) -> None:
    require("cuda")
    run, reports = train(tmp_path, gpus=1, steps=4)
    assert len(reports) == 1, "the rank computed on its GPU"
    assert (run.merged / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.e2e
def test_run_on_two_gpus_has_no_races_and_waits_for_the_device_once_a_step(tmp_path: Path) -> None:
    """It waits for the norm of the step before, so that a gradient that is not finite stops the run."""
    require("cuda")
    steps = 24
    run, reports = train(tmp_path, gpus=2, steps=steps, races=True)
    assert (run.merged / "model.safetensors").exists()
    assert [report["races"] for report in reports] == [[], []]
    for report in reports:
        steady = [each for each in report["synchronisations"] if each["steps"] > steps // 2]
        places = [
            (each["kind"], each["times"] - each["steps"], each["site"].split(":")[0]) for each in steady
        ]
        assert places == [("event", 0, "fsdp_tune/worker/step_checks.py")]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("planted", "state", "words"),
    [
        ({}, "ok", "idle before, 1980 MHz or more under load"),
        ({"used_gib": "20"}, "warn", "was not idle: 20.00 GiB of its memory in use (and 1 more)"),
        ({"busy_percent": "90"}, "warn", "was not idle: 90 % busy"),
        ({"power_watts": "400"}, "warn", "is limited to 400 W of 700 W"),
        ({"slowed": "0x40"}, "warn", "lowers its clock (heat, by the hardware)"),
        ({"ecc_errors": "3"}, "fail", "has 3 uncorrected memory errors"),
    ],
)
def test_doctor_names_an_unfit_gpu(tmp_path: Path, planted: dict[str, str], state: str, words: str) -> None:
    require("cuda")
    changes = [
        "--set",
        "launch.device=cuda",
        "--set",
        "launch.num_processes=2",
        "--set",
        f"output_dir={tmp_path / 'run'}",
    ]
    done = fsdp_tune(
        "doctor", "--config", "gpt2_smoke", *changes, "--json", environment=with_gpus(2, **planted)
    )
    answer = json.loads(done.stdout)
    (found,) = [check for check in answer["checks"] if check["name"] == "GPUs"]
    assert found["state"] == state, done.stderr
    assert words in found["finding"]
    assert done.returncode == (1 if state == "fail" else 0)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_measured_plans_calibrate_the_memory_of_later_ones(tmp_path: Path) -> None:
    """Of a model that is large beside the steps of the allocator."""
    require("cuda")
    changes = {
        "launch.device": "cuda",
        "output_dir": tmp_path / "run",
        "data.cache_dir": tmp_path / "cache",
        "data.packing": "true",
        "model.from_config.n_embd": 512,
        "training.global_batch_size": 16,
        "training.per_device_train_batch_size": 8,
        "kernels.loss": "full",
    }
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    environment = with_gpus(2, "A100")
    plan = ("plan", "--config", "gpt2_smoke", *words, "--json")
    measured = fsdp_tune(*plan, "--measure", "1", "--measure-steps", "1", environment=environment)
    assert measured.returncode == 0, measured.stderr
    trials = json.loads(measured.stdout)["measured"]
    assert {each["outcome"] for each in trials} == {"measured"}
    assert all(each["peak_reserved_gib"] for each in trials)
    later = json.loads(fsdp_tune(*plan, "--no-search", environment=environment).stdout)
    assert any(each.startswith("reserved memory × ") for each in later["assumptions"]), measured.stderr
