"""Devices that fail, or that a recipe does not suit: the user reads what happened, and the exit code is the
documented one."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.devices import require
from tests.cuda.environment import with_gpus
from tests.cuda.test_command import fsdp_tune

pytestmark = pytest.mark.e2e
slow = pytest.mark.slow
CHANGES = {
    "launch.device": "cuda",
    "launch.num_processes": 2,
    "launch.hang_timeout": "20s",
    "training.max_steps": 6,
    "training.eval_strategy": "no",
    "training.save_steps": 2,
    "checkpoint.async": "false",
    "checkpoint.probe": "false",
}
STEPS_OF_THE_START = 1
"""Before training, the state of the optimizer is created by a step without gradients: a fault counts it."""


@pytest.fixture(autouse=True)
def _device() -> None:
    require("cuda")


@dataclass(frozen=True)
class Ended:
    code: int
    printed: str
    run: Path

    @property
    def verdict(self) -> dict[str, Any]:
        return json.loads((self.run / "logs" / "outcome.json").read_text())

    @property
    def problem(self) -> dict[str, Any]:
        return self.verdict["problem"]


def train(
    folder: Path,
    *options: str,
    gpu: str = "H100",
    base: dict[str, str] | None = None,
    changes: Any = (),
    **emulated: str,
) -> Ended:
    every = CHANGES | {"output_dir": folder / "run"} | dict(changes)
    arguments = [word for key, value in every.items() for word in ("--set", f"{key}={value}")]
    environment = with_gpus(2, gpu, base=None if base is None else os.environ | base, **emulated)
    done = fsdp_tune("train", "--config", "gpt2_smoke", *arguments, *options, environment=environment)
    return Ended(done.returncode, done.stdout + done.stderr, folder / "run")


def after(step: int, how: str) -> str:
    """A fault of the second device after a step of training."""
    return f"1:{STEPS_OF_THE_START + step}:{how}"


@pytest.mark.slow
def test_gpu_that_falls_off_the_bus_is_named_and_missed_by_the_resume(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    ended = train(tmp_path, fault=after(3, "719"), lost=str(lost))
    assert ended.code == 1, ended.printed
    assert ended.problem["code"] == "device-failed"
    assert ended.problem["message"].startswith("cuda:1 (in `")
    assert ended.problem["message"].endswith(
        "failed: unspecified launch failure; the driver reports GPU 1 (GPU is lost) (rank 1, step 3)"
    )
    assert "`dmesg` names the cause" in ended.problem["hint"]
    assert "continues from checkpoint-2" in ended.printed
    again = train(tmp_path, "--resume", "auto", lost=str(lost))
    assert again.code == 2
    assert (
        "2 ranks on this machine need 2 cuda devices, and 1 are visible (GPU 1 (GPU is lost) does "
        "not respond)" in again.printed
    )


@slow
def test_restart_without_the_lost_gpu_ends_with_what_is_missing(tmp_path: Path) -> None:
    ended = train(
        tmp_path, fault=after(3, "719"), lost=str(tmp_path / "lost"), changes={"launch.max_restarts": 2}
    )
    assert (
        "GPU 1 (GPU is lost) (rank 1, step 3): restarting from checkpoint-2 (restart 1 of 2)" in ended.printed
    )
    assert (ended.code, ended.problem["code"]) == (2, "device-missing")
    assert (
        ended.problem["message"]
        == "rank 1 needs cuda:1, and torch sees 1 of them; the driver reports GPU 1 (GPU is lost)"
    )


@slow
def test_fault_of_a_kernel_restarts_the_run(tmp_path: Path) -> None:
    ended = train(tmp_path, fault=after(3, "710"), changes={"launch.max_restarts": 1})
    assert ended.code == 1
    assert (
        "failed: device-side assert triggered (rank 1, step 3): restarting from checkpoint-2" in ended.printed
    )
    assert "CUDA_LAUNCH_BLOCKING=1" in ended.problem["hint"]


@slow
def test_memory_of_a_gpu_that_has_an_error_ends_the_run_and_the_next_start_continues(tmp_path: Path) -> None:
    ended = train(tmp_path, fault=after(3, "214"))
    assert (ended.code, ended.problem["code"]) == (1, "device-failed"), ended.printed
    assert "failed: uncorrectable ECC error encountered" in ended.problem["message"]
    assert "(rank 1, step 3)" in ended.problem["message"]
    assert "a reset of the GPU or a reboot may recover it" in ended.problem["hint"]
    again = train(tmp_path, "--resume", "auto")
    assert again.code == 0, again.printed
    assert "checkpoint-2" in again.printed


@slow
def test_gpu_that_hangs_is_named_with_the_collective_that_others_wait_in(tmp_path: Path) -> None:
    ended = train(tmp_path, fault=after(3, "hangs"))
    assert (ended.code, ended.problem["code"]) == (5, "hang")
    assert "rank 1 (step 3, `" in ended.problem["message"]
    where = (
        "is late; waiting for it: rank 0 in ",
        "the ranks wait in different collectives: rank 0 (step 3, `",
    )
    assert any(each in ended.problem["message"] for each in where), (
        "the device hangs behind what its host has already issued"
    )
    assert (ended.run / "logs" / "hang.txt").stat().st_size > 1000


@slow
def test_rank_that_the_watchdog_of_nccl_ends_has_its_message(tmp_path: Path) -> None:
    ended = train(tmp_path, fault=after(3, "hangs"), nccl_seconds="5", changes={"launch.hang_timeout": "60s"})
    assert (ended.code, ended.problem["code"]) == (5, "rank-killed")
    assert (
        "rank 0 was killed by SIGABRT at step 3: Watchdog caught collective operation timeout: WorkNCCL("
        in ended.problem["message"]
    )
    assert "Timeout(ms)=5000" in ended.problem["message"]


MANY_ROWS = {"training.per_device_train_batch_size": 256, "training.global_batch_size": 512}
"""So many that one layer's activations do not fit: with less, what else is still held decides whether the
forward or the backward fails."""


@slow
def test_device_without_memory_is_reported_with_the_module_and_what_was_live(tmp_path: Path) -> None:
    ended = train(tmp_path, "--ignore-plan", memory_gib="0.05", changes=MANY_ROWS)
    assert (ended.code, ended.problem["code"]) == (3, "device-out-of-memory")
    assert ended.problem["message"].startswith("out of device memory in `forward`, in `transformer.h.")
    assert "MiB requested on a device with 51.20 MiB; live: " in ended.problem["message"]
    assert "parameters " in ended.problem["message"]


@slow
def test_evaluation_without_memory_names_a_smaller_batch(tmp_path: Path) -> None:
    ended = train(tmp_path)
    assert ended.code == 0, ended.printed
    environment = with_gpus(1, memory_gib="0.002")
    done = fsdp_tune(
        "evaluate",
        str(ended.run),
        "--device",
        "cuda",
        "--batch-size",
        "64",
        "--json",
        environment=environment,
    )
    assert done.returncode == 3, done.stderr
    [error] = json.loads(done.stdout)["errors"]
    assert error["code"] == "device-out-of-memory"
    assert error["message"].startswith("the device is out of memory: CUDA out of memory. Tried to allocate ")
    assert error["hint"] == "`--batch-size 32`"


@slow
@pytest.mark.parametrize(
    ("changes", "phase", "way"),
    [
        ({"checkpoint.async": "true"}, "training", "checkpoint.async: false (now true)"),
        ({"fsdp.offload_params": "true"}, "loading the model", "fsdp.offload_params: false (now true)"),
    ],
    ids=["async save", "offload"],
)
def test_memory_that_cannot_be_pinned_is_the_hosts(
    changes: dict[str, str], phase: str, way: str, tmp_path: Path
) -> None:
    ended = train(tmp_path, pinned_gib="0", changes=changes)
    assert (ended.code, ended.problem["code"]) == (1, "host-out-of-memory")
    assert (
        f"out of host memory in `{phase}`: page-locked memory for copies to the device was refused"
        in ended.problem["message"]
    )
    assert way in ended.printed


def test_hidden_gpus_are_named_with_the_variable(tmp_path: Path) -> None:
    ended = train(tmp_path, base={"CUDA_VISIBLE_DEVICES": "7"})
    assert ended.code == 2
    assert "it shows no accelerator (`CUDA_VISIBLE_DEVICES=7` hides its GPUs)" in ended.printed
    assert not ended.run.exists()


@slow
def test_machine_with_fewer_gpus_is_refused_and_the_other_names_it_missing(tmp_path: Path) -> None:
    """Two commands stand for two machines that share a directory, one with two GPUs and the other with
    one."""
    keys = CHANGES | {
        "launch.num_processes": 4,
        "launch.num_machines": 2,
        "launch.main_process_ip": "127.0.0.1",
        "output_dir": "run",
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = [
        sys.executable,
        "-m",
        "fsdp_tune",
        "train",
        "--config",
        "gpt2_smoke",
        *words,
        "--json",
        "--machine-rank",
    ]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([*command, str(rank)], cwd=tmp_path, env=with_gpus(2 - rank), **pipes)
        for rank in (0, 1)
    ]
    first, second = (json.loads(each.communicate(timeout=300)[0])["errors"][0] for each in both)
    assert [each.returncode for each in both] == [1, 2]
    assert (second["code"], second["message"]) == (
        "too-few-devices",
        "2 ranks on this machine need 2 cuda devices, and 1 are visible",
    )
    assert first["code"] == "machines-missing"
    assert re.fullmatch(r"1 of 2 machines joined within 2\d\.\ds; missing: machine 1", first["message"])
    assert "with the same recipe and as many devices" in first["hint"]


UUID = "GPU-00000000-0000-0000-0000-00000000000"


@slow
def test_devices_are_counted_as_torch_does_whatever_is_visible() -> None:
    cases = {
        "0": 1,
        "1": 1,
        "0,1": 2,
        "1,0": 2,
        "": 0,
        "7": 0,
        "0,7": 1,
        "0,0": 0,
        f"{UUID}2": 1,
        "GPU-": 0,
        "GPU-zzz": 0,
        "-1": 0,
    }
    script = (
        "import json, os, torch; from fsdp_tune.core.devices import visible_devices; "
        "print(json.dumps([torch.cuda.device_count(), len(visible_devices(os.environ))]))"
    )
    for visible, expected in cases.items():
        environment = with_gpus(2, "A100", base=os.environ | {"CUDA_VISIBLE_DEVICES": visible})
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
        )
        assert json.loads(done.stdout) == [expected, expected], visible


def test_env_reports_devices_driver_lost_devices_and_slow_bf16(tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    lost.write_text("0")
    done = fsdp_tune("env", "--json", environment=with_gpus(3, "T4", lost=str(lost)))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["lost_devices"], len(found["devices"]), found["torch"]["device_count"]) == (
        ["GPU 0 (GPU is lost)"],
        2,
        2,
    )
    assert json.dumps(found["devices"]).count("Tesla T4") == 2
    assert "580.95.05" in done.stdout, "the driver"
    assert {"gpu-lost", "no-bf16"} <= {row["code"] for row in found["known_bad"]}


def validated(gpu: str, *changes: str) -> dict[str, Any]:
    options = [word for change in ("launch.device=cuda", *changes) for word in ("--set", change)]
    done = fsdp_tune("validate", "--config", "gpt2_smoke", *options, "--json", environment=with_gpus(2, gpu))
    return json.loads(done.stdout) | {"exit_code": done.returncode}


@slow
@pytest.mark.parametrize(
    ("gpu", "kernel", "codes"),
    [("T4", "sdpa", {"bf16-gpu-too-old"}), ("A100", "torch_varlen", set()), ("B200", "torch_varlen", set())],
)
def test_validate_reports_the_kernel_and_the_limits_of_the_gpu(
    gpu: str, kernel: str, codes: set[str]
) -> None:
    found = validated(gpu, "precision.mixed_precision=bf16")
    assert found["exit_code"] == 0
    assert found["model"]["kernels"]["model.attn_implementation"]["value"] == kernel
    assert {notice["code"] for notice in found.get("notices", [])} & {"bf16-gpu-too-old"} == codes


@slow
@pytest.mark.parametrize(("gpu", "kernel"), [("T4", "sdpa"), ("B200", "torch_varlen")])
def test_ranks_use_the_kernel_that_was_validated(gpu: str, kernel: str, tmp_path: Path) -> None:
    ended = train(tmp_path, gpu=gpu, changes={"precision.mixed_precision": "bf16"})
    assert ended.code == 0, ended.printed
    assert f"kernels: attention {kernel}" in ended.printed
    assert ("Tesla T4 (compute capability 7.5) has no tensor cores for bf16" in ended.printed) is (
        gpu == "T4"
    )
    live = json.loads((ended.run / "readback.json").read_text())
    assert (live["attention"], live["differences"]) == (kernel, [])
    losses = [
        line["loss"]
        for line in map(json.loads, (ended.run / "metrics.jsonl").read_text().splitlines())
        if "loss" in line
    ]
    assert all(map(math.isfinite, losses)), losses
    assert losses


def test_fp8_on_an_old_gpu_is_refused_before_ranks_start(tmp_path: Path) -> None:
    ended = train(tmp_path, gpu="A100", changes={"precision.mixed_precision": "fp8"})
    assert ended.code == 2
    assert (
        "needs compute capability 8.9 (Ada, Hopper, Blackwell); NVIDIA A100-SXM4-80GB has 8.0"
        in ended.printed
    )
    assert "hint: write `precision.mixed_precision: bf16`" in ended.printed
    assert not ended.run.exists()
