"""AMD GPUs, which torch calls `cuda`: their names and versions, and the wording of their failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cuda.devices import require
from tests.cuda.environment import with_gpus
from tests.cuda.test_command import fsdp_tune
from tests.cuda.test_failures import after, train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _device() -> None:
    require("cuda")


def test_env_reports_rocm_and_the_gpus_of_torch() -> None:
    done = fsdp_tune("env", environment=with_gpus(2, "MI300X"))
    assert done.returncode == 0, done.stderr
    assert "2 cuda, ROCm 7.1.25424" in done.stdout
    assert "NVIDIA" not in done.stdout.replace("no NVIDIA driver", "")


def test_run_trains_in_bf16_and_merges(tmp_path: Path) -> None:
    ended = train(tmp_path, gpu="MI300X", changes={"precision.mixed_precision": "bf16"})
    assert ended.code == 0, ended.printed
    assert json.loads((ended.run / "readback.json").read_text())["compute_dtype"] == "bfloat16"
    assert (ended.run / "merged" / "model.safetensors").exists()


def test_error_of_hip_is_a_failed_device(tmp_path: Path) -> None:
    ended = train(tmp_path, gpu="MI300X", fault=after(3, "719"))
    assert (ended.code, ended.problem["code"]) == (1, "device-failed")
    assert ended.problem["message"].endswith("failed: unspecified launch failure (rank 1, step 3)")
    assert "HIP_VISIBLE_DEVICES" in ended.problem["hint"]


def test_rank_that_the_runtime_aborts_has_its_message(tmp_path: Path) -> None:
    ended = train(tmp_path, gpu="MI300X", fault=after(3, "aborts"))
    assert (ended.code, ended.problem["code"]) == (1, "device-failed")
    assert ended.problem["message"].startswith(
        "the GPU of rank 1 failed: Memory access fault by GPU node-1 (Agent handle: "
    )


def test_memory_of_a_device_is_reported_as_on_other_gpus(tmp_path: Path) -> None:
    ended = train(tmp_path, "--ignore-plan", gpu="MI300X", memory_gib="0.008")
    assert (ended.code, ended.problem["code"]) == (3, "device-out-of-memory")
    assert "MiB requested on a device with 8.19 MiB; live: " in ended.problem["message"]
