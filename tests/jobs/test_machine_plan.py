"""The plan of a run on its own machine: predicted where there is a known GPU, and never in the way of a
training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.devices import Device
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, usage_error
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.jobs import machine_plan
from fsdp_tune.jobs.machine_plan import (
    checkpoint_bytes,
    keep_prediction,
    plan_here,
    refuse_what_cannot_fit,
    trace_of,
)
from fsdp_tune.jobs.plan_session import PlanSession
from fsdp_tune.planner.predict.predict import plan
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.records import Prediction
from tests.cli.fake_tracing import FakeTracing, replaced_tracing  # noqa: F401  a fixture
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

A100 = Device("cuda", "NVIDIA A100-SXM4-40GB", memory_bytes=40 << 30)


@pytest.fixture
def recipe(tmp_path: Path, fake: type[FakeTracing]) -> Recipe:
    return resolved(data={"cache_dir": str(tmp_path)})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replace this machine's GPU."""

    def show(device: Device | None) -> None:
        monkeypatch.setattr(machine_plan, "visible_gpu", lambda _recipe: device)

    return show


def fail_with(monkeypatch: pytest.MonkeyPatch, fake: type[FakeTracing], error: Exception) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(fake, "trace", fails)


def test_run_on_a_gpu_of_the_table_is_predicted_once(
    recipe: Recipe, gpu: Any, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(A100)
    found = plan_here(recipe)
    assert found.prediction is not None
    assert (found.prediction.gpu, found.prediction.fits) == ("A100-40GB", "yes")
    assert found.prediction.decided.keys() == found.decided.reasons.keys()
    assert found.notices == []
    assert all(each.is_closed for each in fake.made)
    monkeypatch.setattr(PlanSession, "plan", lambda _: pytest.fail("the plan was not kept"))
    again = plan_here(recipe)
    assert again.prediction is not None
    assert again.prediction.peak_reserved_gib == found.prediction.peak_reserved_gib


@pytest.mark.parametrize(
    ("device", "name"),
    [(replace(A100, name="NVIDIA T1000"), "NVIDIA T1000"), (None, "this machine's GPU")],
)
def test_gpu_that_is_not_in_the_table_is_a_notice(
    recipe: Recipe, gpu: Any, device: Device | None, name: str
) -> None:
    gpu(device)
    found = plan_here(recipe)
    assert found.prediction is None
    assert [each.message for each in found.notices if each.code == "not-planned"] == [
        f"{name} is not in the table of GPUs, so nothing is predicted"
    ]


@pytest.mark.parametrize("code", ["no-model", ""])
def test_step_that_cannot_be_traced_stops_no_training(
    recipe: Recipe, gpu: Any, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    gpu(A100)
    fail_with(monkeypatch, fake, usage_error(code, "it is gone") if code else ValueError("it is gone"))
    found = plan_here(recipe)
    assert found.prediction is None
    what = "" if code else "the step could not be traced: "
    assert found.notices[-1].message == f"nothing is predicted: {what}it is gone"
    assert (trace_of(recipe), checkpoint_bytes(recipe)) == (None, None)


def test_nothing_is_predicted_on_the_cpu(tmp_path: Path, gpu: Any, fake: type[FakeTracing]) -> None:
    gpu(None)
    recipe = resolved(data={"cache_dir": str(tmp_path)}, launch={"device": "cpu", "num_processes": 2})
    found = plan_here(recipe)
    assert (found.prediction, [each.code for each in found.notices]) == (None, [])


def test_size_of_a_checkpoint_is_that_of_the_traced_state(
    recipe: Recipe, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    for state_gib in (8, 16):
        monkeypatch.setattr(fake, "state_gib", state_gib)
        size_bytes = checkpoint_bytes(recipe)
        assert size_bytes is not None
        sizes.append(size_bytes)
    assert 0 <= sizes[0] <= sizes[1]
    assert all(each.is_closed for each in fake.made)


@pytest.mark.parametrize("fits", ["yes", "tight", "no"])
def test_only_a_recipe_that_cannot_fit_is_refused(fits: Any) -> None:
    made = replace(
        plan(resolved(), find_hardware("A100-40GB"), Hand().op("mm", flops=1e12).trace()), fits=fits
    )
    if fits != "no":
        refuse_what_cannot_fit(made)
        refuse_what_cannot_fit(None)
        return
    with pytest.raises(FsdpTuneError, match="does not fit A100-40GB") as caught:
        refuse_what_cannot_fit(made)
    assert caught.value.exit_code == ExitCode.USAGE
    assert any("--ignore-plan" in way for way in caught.value.problems[0].ways_out)


def test_prediction_of_an_earlier_start_is_not_compared_with_this_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    made = plan(resolved(), find_hardware("A100-40GB"), Hand().op("mm", flops=1e12).trace())
    keep_prediction(run, made)
    kept = Prediction.read(run.plan_json)
    assert kept is not None
    assert kept.peak_reserved_gib == made.peak_reserved_gib
    keep_prediction(run, None)
    assert not run.plan_json.exists()
