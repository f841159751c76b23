"""Calibration: learn a machine's speed from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.planner.predict.calibration import Measured, calibrated_efficiency, learn, read_run
from fsdp_tune.planner.predict.divided_step import step_time
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

A100 = find_hardware("A100-40GB")


def a_run(path: Path, seconds: list[float], name: str = "NVIDIA A100-SXM4-40GB", **launch: Any) -> Path:
    recipe = resolved(launch=launch) if launch else resolved()
    path.mkdir()
    (path / "recipe.json").write_text(recipe.model_dump_json(by_alias=True))
    (path / "environment.json").write_text(json.dumps({"devices": [{"kind": "cuda", "name": name}]}))
    lines: list[dict[str, Any]] = [{"event": "train_started", "step": 0}]
    lines += [{"step": index, "loss": 1.0, "step_seconds": value} for index, value in enumerate(seconds, 1)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_run_is_read_without_its_first_line(tmp_path: Path) -> None:
    measured = read_run(a_run(tmp_path / "run", [60.0, 2.0, 2.2, 2.1]), A100)
    assert (measured.step_seconds, measured.steps) == (2.1, 4)


@pytest.mark.parametrize(
    ("seconds", "device", "launch", "message"),
    [
        ([60.0, 2.0, 2.0], "NVIDIA A100-SXM4-40GB", {}, "at least 3 are needed"),
        ([60.0, 2.0, 2.0, 2.0], "NVIDIA H200", {}, "ran on NVIDIA H200"),
        ([60.0, 2.0, 2.0, 2.0], "NVIDIA A100-SXM4-40GB", {"device": "cpu"}, "ran on the CPU"),
    ],
)
def test_run_that_does_not_name_its_gpu_is_refused(
    tmp_path: Path, seconds: list[float], device: str, launch: dict[str, Any], message: str
) -> None:
    with pytest.raises(FsdpTuneError, match=message):
        read_run(a_run(tmp_path / "run", seconds, device, **launch), A100)


def test_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match="cannot be used for calibration"):
        read_run(tmp_path, A100)


def test_calibration_is_learned_stored_and_used(tmp_path: Path) -> None:
    trace = Hand().op("mm", flops=1e15).collective("all_gather", 2**30).trace()
    before = step_time(trace, A100, 1).step_seconds
    measured = Measured(resolved(), before * 1.5, 100)
    efficiency, factor = learn(tmp_path, A100, measured, trace)
    assert factor == pytest.approx(1.5)
    assert step_time(trace, A100, 1, efficiency).step_seconds == pytest.approx(before * 1.5, rel=1e-3)
    assert calibrated_efficiency(tmp_path, A100) == efficiency
    assert calibrated_efficiency(tmp_path, find_hardware("H200")) is None


def test_damaged_calibration_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text("{")
    with pytest.raises(FsdpTuneError, match="damaged"):
        calibrated_efficiency(tmp_path, A100)
