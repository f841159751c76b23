"""`train` and its plan: none on a CPU, an error for a recipe that cannot fit, and the comparison at the
end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_tune.cli.run_card import predicted_and_measured
from fsdp_tune.cli.train_view import predicted_line
from fsdp_tune.core.errors import ExitCode, FsdpTuneError
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.jobs.machine_plan import keep_prediction, plan_here, refuse_what_cannot_fit
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.planner.predict.predict import Plan, plan
from fsdp_tune.planner.search.auto_recomputation import Decided
from fsdp_tune.run.directory import RunDir
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved


def planned(size_gib: int) -> Plan:
    return plan(
        resolved(), find_hardware("A100-40GB"), Hand().hold(0, size_gib * GIB).op("mm", flops=1e12).trace()
    )


def test_cpu_run_is_not_planned_and_starts_no_child_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("a child was started"))
    recipe = resolved(launch={"device": "cpu"})
    assert plan_here(recipe) == (Decided(recipe, {}), None, [])


def test_unknown_gpu_is_a_notice() -> None:
    _, made, notices = plan_here(resolved())  # this machine's card, whatever it is, is not faked here
    assert made is None
    assert [notice.code for notice in notices] == ["not-planned"]


def test_recipe_that_cannot_fit_is_refused() -> None:
    with pytest.raises(FsdpTuneError) as caught:
        refuse_what_cannot_fit(planned(100))
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.problems[0].code == "does-not-fit"
    assert any("--ignore-plan" in way for way in caught.value.problems[0].ways_out)
    refuse_what_cannot_fit(planned(36))  # tight: reported only
    refuse_what_cannot_fit(None)


def test_predicted_line_has_memory_and_time() -> None:
    assert "10.0 GiB reserved of 39.4 (fits: yes)" in predicted_line(planned(10))
    assert "a step" not in predicted_line(replace(planned(10), step_seconds=None))


def test_plan_is_compared_with_the_last_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    steps = [
        {"step": 1, "loss": 2.0, "peak_allocated_gib": 10.0, "peak_reserved_gib": None, "step_seconds": 1.0}
    ]
    assert predicted_and_measured(run, steps) == []
    run.plan_json.write_text(
        json.dumps({"peak_allocated_gib": 11.0, "peak_reserved_gib": 12.0, "step_seconds": None})
    )
    assert predicted_and_measured(run, steps) == [
        "peak_allocated_gib: 11 GiB predicted, 10 measured (+10.0%)"
    ]


def test_unplanned_start_removes_stored_plan(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    keep_prediction(run, planned(10))
    written = json.loads(run.plan_json.read_text())
    assert written.pop("document_digest")
    assert written == {"version": 1} | json.loads(json.dumps(planned(10).as_dict()))
    keep_prediction(run, None)
    assert not run.plan_json.exists()
    keep_prediction(run, None)


@pytest.mark.parametrize(
    ("device", "inherited", "launch", "expected"),
    [
        ("cuda", {}, {}, "expandable_segments:True"),
        ("cpu", {}, {}, None),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, {}, None),
        ("cuda", {}, {"env": {"PYTORCH_ALLOC_CONF": "backend:native"}}, "backend:native"),
    ],
)
def test_cuda_ranks_use_expandable_segments_by_default(
    tmp_path: Path, device: str, inherited: dict[str, str], launch: dict[str, object], expected: str | None
) -> None:
    recipe = resolved(launch={"device": device, **launch})
    made = launch_plan(recipe, RunDir(tmp_path / "run"), inherited={"PATH": "/nowhere", **inherited})
    assert made.settings.get("PYTORCH_ALLOC_CONF") == expected
    assert made.env.get("PYTORCH_CUDA_ALLOC_CONF") == inherited.get("PYTORCH_CUDA_ALLOC_CONF")
