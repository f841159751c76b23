"""Calibration: learn a machine's speed from a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.planner.predict.calibration import (
    Measured,
    calibrated_efficiency,
    known_calibrations,
    learn,
    learn_memory,
    planned_reserved_bytes,
    read_run,
    setting_of,
)
from fsdp_tune.planner.predict.divided_step import step_time
from fsdp_tune.planner.predict.efficiency import efficiency_of
from fsdp_tune.planner.predict.predict import plan
from fsdp_tune.planner.trace_format import Trace
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

A100 = find_hardware("A100-40GB")


def a_run(
    path: Path, seconds: list[float], name: str = "NVIDIA A100-SXM4-40GB", *, full: float = 1.0, **launch: Any
) -> Path:
    """`full`: share of the 64 × 128 tokens of full rows that a step computes."""
    recipe = resolved(launch=launch) if launch else resolved()
    tokens = full * 64 * 128 / 8
    path.mkdir()
    (path / "recipe.json").write_text(recipe.model_dump_json(by_alias=True))
    (path / "environment.json").write_text(
        json.dumps({"devices": [{"kind": "cuda", "name": name}], "versions": {"torch": "2.12.0"}})
    )
    lines: list[dict[str, Any]] = [{"event": "train_started", "step": 0}]
    lines += [
        {"step": index, "loss": 1.0, "step_seconds": value, "tokens_per_second_per_device": tokens / value}
        for index, value in enumerate(seconds, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def a_trace(*, flops: float = 1e15, family: str = "llama") -> Trace:
    found = Hand().op("mm", flops=flops).collective("all_gather", 2**30).trace()
    return replace(found, facts=replace(found.facts, config={"model_type": family}))


def test_run_is_read_without_its_first_line(tmp_path: Path) -> None:
    measured = read_run(a_run(tmp_path / "run", [60.0, 2.0, 2.2, 2.1]), A100)
    assert (measured.step_seconds, measured.steps, measured.torch, measured.driver) == (
        2.1,
        4,
        "2.12.0",
        None,
    )


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


def test_run_of_short_rows_is_refused(tmp_path: Path) -> None:
    """Its steps take less time than those of a plan, which are of full rows, on a GPU of the same speed."""
    assert read_run(a_run(tmp_path / "full", [9.0, 2.0, 2.0, 2.0], full=0.95), A100).step_seconds == 2.0
    with pytest.raises(FsdpTuneError, match="computed 40% of the tokens of full rows"):
        read_run(a_run(tmp_path / "short", [9.0, 2.0, 2.0, 2.0], full=0.4), A100)


def test_directory_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match="cannot be used for calibration"):
        read_run(tmp_path, A100)


def test_calibration_is_learned_stored_and_used(tmp_path: Path) -> None:
    trace = a_trace()
    before = step_time(trace, A100, 1).step_seconds
    measured = Measured(resolved(), before * 1.5, 100, torch="2.12.0", driver="570.1")
    efficiency, factor = learn(tmp_path, A100, measured, trace)
    assert factor == pytest.approx(1.5)
    assert step_time(trace, A100, 1, efficiency).step_seconds == pytest.approx(before * 1.5, rel=1e-3)
    setting = setting_of(resolved(), trace, "2.12.0", "570.1")
    assert calibrated_efficiency(tmp_path, A100, setting) == efficiency
    assert calibrated_efficiency(tmp_path, find_hardware("H200"), setting) == efficiency_of(
        find_hardware("H200")
    )


def test_plan_names_the_calibration_that_it_uses(tmp_path: Path) -> None:
    trace = a_trace()
    efficiency, _ = learn(
        tmp_path,
        A100,
        Measured(resolved(), step_time(trace, A100, 1).step_seconds * 1.5, 7, torch="2.12.0"),
        trace,
    )
    found = [
        each
        for each in plan(resolved(), A100, trace, efficiency=efficiency).assumptions
        if "learned on this machine" in each
    ]
    assert found == [
        "computing takes 1.50 times as long as by the table: learned on this machine (llama in bf16, "
        "torch 2.12.0)"
    ]


@pytest.mark.parametrize(
    ("torch", "driver", "family", "precision"),
    [
        ("2.13.0", "570.1", "llama", "bf16"),
        ("2.12.0", "580.9", "llama", "bf16"),
        ("2.12.0", "570.1", "mixtral", "bf16"),
        ("2.12.0", "570.1", "llama", "fp8"),
    ],
)
def test_factor_of_another_setting_is_not_used_and_is_named(
    tmp_path: Path, torch: str, driver: str, family: str, precision: str
) -> None:
    trace = a_trace()
    learn(
        tmp_path,
        A100,
        Measured(resolved(), step_time(trace, A100, 1).step_seconds * 2, 7, torch="2.12.0", driver="570.1"),
        trace,
    )
    other = setting_of(
        resolved(precision={"mixed_precision": precision}), a_trace(family=family), torch, driver
    )
    found = calibrated_efficiency(tmp_path, A100, other)
    assert replace(found, calibration="") == efficiency_of(A100)
    assert found.calibration == (
        f"A100-40GB is not calibrated for {family} in {precision}, torch {torch}, driver {driver}, "
        "only for llama in bf16, torch 2.12.0, driver 570.1"
    )


def test_driver_that_is_not_known_is_not_compared_and_the_newest_factor_counts(tmp_path: Path) -> None:
    trace = a_trace()
    seconds = step_time(trace, A100, 1).step_seconds
    for driver, times in (("570.1", 1.5), ("580.9", 2.0), ("580.9", 3.0)):
        learn(tmp_path, A100, Measured(resolved(), seconds * times, 7, torch="2.12.0", driver=driver), trace)
    assert len(known_calibrations(tmp_path, A100)) == 2
    setting = setting_of(resolved(), trace, "2.12.0", None)
    assert "takes 3.0" in calibrated_efficiency(tmp_path, A100, setting).calibration


@pytest.mark.parametrize(
    ("flops", "times", "why"),
    [(1e9, 2.0, "a GPU computes in"), (1e15, 40.0, "not a question of computing")],
    ids=["the host decides", "no factor explains it"],
)
def test_step_that_says_nothing_about_the_gpu_calibrates_nothing(
    tmp_path: Path, flops: float, times: float, why: str
) -> None:
    trace = a_trace(flops=flops)
    measured = Measured(resolved(), step_time(trace, A100, 1).step_seconds * times, 7)
    with pytest.raises(FsdpTuneError, match=f"says nothing about the speed of the GPU: .*{why}"):
        learn(tmp_path, A100, measured, trace)
    assert known_calibrations(tmp_path, A100) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"A100-40GB": [{"factor": 1.0}]}', '{"A100-40GB": [1]}'])
def test_damaged_calibration_file_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "calibration.json").write_text(text)
    with pytest.raises(FsdpTuneError, match="damaged"):
        known_calibrations(tmp_path, A100)


def test_factor_of_an_earlier_version_has_no_setting_and_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "calibration.json").write_text('{"A100-40GB": {"factor": 3.0, "steps": 7}}')
    assert known_calibrations(tmp_path, A100) == []


def held(size_gib: float) -> Trace:
    found = Hand().hold(0, int(size_gib * GIB)).op("mm", flops=1e12).trace()
    return replace(found, facts=replace(found.facts, config={"model_type": "llama"}))


def run_that_reserved(times: float, trace: Trace, *, torch: str = "2.12.0") -> tuple[Measured, Trace]:
    """A run whose reserved memory is so many times that of its plan."""
    reserved = planned_reserved_bytes(trace, A100) * times
    return Measured(resolved(), 1.0, 7, torch=torch, reserved_bytes=reserved), trace


def test_largest_reserved_memory_is_learned_and_reported(tmp_path: Path) -> None:
    trace = held(20)
    runs = [run_that_reserved(1.01, trace), run_that_reserved(1.03, held(10))]
    assert learn_memory(tmp_path, A100, runs) == pytest.approx(1.03)
    found = calibrated_efficiency(tmp_path, A100, setting_of(resolved(), trace, "2.12.0", None))
    before, after = (plan(resolved(), A100, trace, efficiency=each) for each in (efficiency_of(A100), found))
    assert after.peak_reserved_gib == pytest.approx(1.03 * before.peak_reserved_gib)
    assert after.peak_allocated_gib == before.peak_allocated_gib
    assert after.step_seconds == before.step_seconds
    assert (
        "reserved memory × 1.03: learned on this machine (llama in bf16, torch 2.12.0)" in after.assumptions
    )


def test_time_and_memory_of_a_setting_are_kept_together(tmp_path: Path) -> None:
    trace = a_trace()
    seconds = step_time(trace, A100, 1).step_seconds
    learn_memory(tmp_path, A100, [run_that_reserved(1.05, held(20))])
    learn(tmp_path, A100, Measured(resolved(), 1.5 * seconds, 9, torch="2.12.0"), trace)
    (known,) = known_calibrations(tmp_path, A100)
    assert (known.factor, known.memory) == (pytest.approx(1.5, rel=1e-3), pytest.approx(1.05))
    learn_memory(tmp_path, A100, [run_that_reserved(0.9, held(20))])
    (known,) = known_calibrations(tmp_path, A100)
    assert (known.factor, known.memory) == (pytest.approx(1.5, rel=1e-3), pytest.approx(0.9))


def test_learned_memory_makes_no_plan_fit_and_refuses_none(tmp_path: Path) -> None:
    setting = setting_of(resolved(), held(20), "2.12.0", None)
    answers: dict[float, list[str]] = {}
    for times in (0.81, 1.0, 1.2):
        learn_memory(tmp_path, A100, [run_that_reserved(times, held(20))])
        efficiency = calibrated_efficiency(tmp_path, A100, setting)
        answers[times] = [
            plan(resolved(), A100, held(size), efficiency=efficiency).fits for size in (20, 33, 38, 42, 60)
        ]
    assert answers[0.81] == answers[1.0] == ["yes", "yes", "tight", "no", "no"]
    assert answers[1.2] == ["yes", "tight", "tight", "no", "no"]
    low = calibrated_efficiency(tmp_path, A100, setting)
    assert low.reserved_factor == pytest.approx(1.2)


def test_measured_memory_below_the_plan_is_reported_and_not_used(tmp_path: Path) -> None:
    learn_memory(tmp_path, A100, [run_that_reserved(0.9, held(20))])
    found = calibrated_efficiency(tmp_path, A100, setting_of(resolved(), held(20), "2.12.0", None))
    assert found.reserved_factor == 1.0
    assert found.memory_calibration.startswith("reserved memory × 0.90: learned on this machine")
    assert found.memory_calibration.endswith(", and is not lowered")


def test_memory_of_another_setting_is_not_used(tmp_path: Path) -> None:
    learn_memory(tmp_path, A100, [run_that_reserved(1.1, held(20))])
    other = setting_of(resolved(), held(20), "2.13.0", None)
    assert calibrated_efficiency(tmp_path, A100, other) == efficiency_of(A100)


def test_memory_that_the_allocator_does_not_explain_is_not_learned(tmp_path: Path) -> None:
    assert learn_memory(tmp_path, A100, []) is None
    assert learn_memory(tmp_path, A100, [(Measured(resolved(), 1.0, 7), held(20))]) is None
    for times in (0.6, 1.4):
        with pytest.raises(FsdpTuneError, match=f"reserved {times:.2f} times the planned memory"):
            learn_memory(tmp_path, A100, [run_that_reserved(times, held(20))])
    assert known_calibrations(tmp_path, A100) == []


def test_factor_without_memory_of_an_earlier_version_is_used(tmp_path: Path) -> None:
    learn(
        tmp_path,
        A100,
        Measured(resolved(), 1.5 * step_time(a_trace(), A100, 1).step_seconds, 9, torch="2.12.0"),
        a_trace(),
    )
    file = tmp_path / "calibration.json"
    document = json.loads(file.read_text())
    del document["A100-40GB"][0]["memory"]
    file.write_text(json.dumps(document))
    found = calibrated_efficiency(tmp_path, A100, setting_of(resolved(), a_trace(), "2.12.0", None))
    assert "takes 1.50 times" in found.calibration
    assert found.reserved_factor == 1.0
