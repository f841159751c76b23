"""Bugs that only a device has, planted into a run on emulated GPUs: each is found, and without it nothing
is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import require
from tests.parity import runs
from tests.parity.bench import Bench, shared_bench
from tests.parity.cases import SHORT, Case
from tests.parity.compare import deviation

BASE, DROPOUT = Case(training=(("witness", "off"),), steps=SHORT), Case("gpt2-dropout", steps=SHORT)


@pytest.fixture(scope="module")
def bench() -> Bench:
    require("cuda")
    return shared_bench("cuda")


@contextlib.contextmanager
def wait_in_each_step() -> Iterator[None]:
    from fsdp_tune.worker.step_checks import GradientGate

    original = GradientGate.pass_or_skip

    def pass_or_skip(self: Any, *arguments: Any) -> Any:
        norm = original(self, *arguments)
        float(norm)
        return norm

    with patch.object(GradientGate, "pass_or_skip", pass_or_skip):
        yield


@contextlib.contextmanager
def norm_that_is_not_waited_for() -> Iterator[None]:
    """The host reads the norm of a step before its copy has arrived."""
    from fsdp_tune.worker.step_checks import AsyncScalar

    with patch.object(AsyncScalar, "read", lambda self: float(self._view)):
        yield


@contextlib.contextmanager
def loss_on_the_cpu() -> Iterator[None]:
    """A factor of the loss is made without a device."""
    import torch

    from fsdp_tune.model import step

    original = step.micro_batch_loss

    def micro_batch_loss(*arguments: Any, **options: Any) -> Any:
        loss, auxiliary = original(*arguments, **options)
        return (loss * torch.ones(2)).mean(), auxiliary

    with patch.object(step, "micro_batch_loss", micro_batch_loss):
        yield


@contextlib.contextmanager
def gradients_on_another_stream() -> Iterator[None]:
    """The norm is computed on a side stream that nobody orders."""
    import torch

    from fsdp_tune.worker import step_checks

    original = step_checks.total_norm

    def total_norm(*arguments: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return original(*arguments)

    with patch.object(step_checks, "total_norm", total_norm):
        yield


@contextlib.contextmanager
def one_seed_for_all_gpus() -> Iterator[None]:
    """Generators of the GPUs start alike; those of the host do not."""
    import torch

    from fsdp_tune.worker.trainer import FsdpTrainer

    original = FsdpTrainer._prepare_for_training

    def prepare(self: Any, *arguments: Any) -> Any:
        prepared = original(self, *arguments)
        torch.cuda.manual_seed(self.parts.recipe.training.seed)
        return prepared

    with patch.object(FsdpTrainer, "_prepare_for_training", prepare):
        yield


@contextlib.contextmanager
def generator_of_gpu_0_saved_for_all() -> Iterator[None]:
    """Each rank's checkpoint holds a generator that draws nothing on its GPU, but for rank 0."""
    import torch

    original = torch.cuda.get_rng_state
    with patch.object(
        torch.cuda, "get_rng_state", lambda device="cuda": original(0 if device == "cuda" else device)
    ):
        yield


PLANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "wait": wait_in_each_step,
    "norm": norm_that_is_not_waited_for,
    "cpu": loss_on_the_cpu,
    "stream": gradients_on_another_stream,
    "seed": one_seed_for_all_gpus,
    "generator": generator_of_gpu_0_saved_for_all,
}


def run_watched(path: str, plant: str) -> dict[str, Any]:
    """Run the worker on a rank with one bug, and return its outcome with what the device counted."""
    import sys

    import emulated_cuda as native  # type: ignore[import-not-found]

    report = sys.modules["emulated_cuda_emulation"].Report(native)  # type: ignore[attr-defined]
    report.begin(races=True)
    try:
        with PLANTS[plant]():
            outcome = runs.run_worker(path)
    finally:
        counted = report.end()
    return outcome | counted


def watched(bench: Bench, plant: str, case: Case = BASE) -> tuple[RunDir, list[dict[str, Any]]]:
    run = bench.prepared_run(case)
    return run, bench.on_ranks.run(2, run_watched, str(run.path), plant)


def steady_files(counted: dict[str, Any]) -> list[str]:
    """Files that wait for the device in most steps, apart from the lines that each step of these runs
    logs."""
    steady = [each for each in counted["synchronisations"] if each["steps"] > SHORT // 2]
    return [
        each["site"].split(":")[0]
        for each in steady
        if "metrics.py" not in each["site"] and "_log" not in each["site"]
    ]


@pytest.mark.ranks
def test_run_without_a_bug_has_no_races_and_waits_in_each_step_for_its_log_alone(bench: Bench) -> None:
    """Its numbers are those of one device. What waits without a log line: test_command.py, with the slow
    tests."""
    run, counted = watched(bench, "none")
    for each in counted:
        assert each["exit_reason"] == "finished", each["traceback"]
        assert each["races"] == []
        assert steady_files(each) == []
    found = deviation(run, bench.reference_of(BASE))
    assert found.is_within_fp32, f"{found}; worst is {found.worst_name}"


@pytest.mark.ranks
@pytest.mark.slow
def test_wait_in_each_step_is_listed_with_its_place(bench: Bench) -> None:
    _, counted = watched(bench, "wait")
    assert [any("test_plants.py" in file for file in steady_files(each)) for each in counted] == [True, True]


@pytest.mark.ranks
def test_number_that_is_read_before_it_arrived_is_nan(bench: Bench) -> None:
    _, counted = watched(bench, "norm")
    assert [each["exit_reason"] for each in counted] == ["non_finite", "non_finite"]


@pytest.mark.ranks
def test_tensor_of_the_cpu_is_refused_as_cuda_does(bench: Bench) -> None:
    _, counted = watched(bench, "cpu")
    assert all("Expected all tensors to be on the same device" in each["traceback"] for each in counted)


@pytest.mark.slow
@pytest.mark.ranks
def test_work_on_a_stream_that_nobody_orders_is_a_race(bench: Bench) -> None:
    _, counted = watched(bench, "stream")
    assert all(
        any("total_norm" in race or "sum_of_squares" in race for race in each["races"]) for each in counted
    )


@pytest.mark.ranks
def test_one_seed_for_all_gpus_stops_the_run(bench: Bench) -> None:
    """Else all ranks would drop the same activations."""
    _, counted = watched(bench, "seed", DROPOUT)
    assert {each["exit_reason"] for each in counted} == {"failed"}
    assert counted[0]["problem"]["message"].startswith(
        "step 1: the cuda generators of ranks 0 and 1 are in the same state"
    )


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("plant", "is_equal"), [("none", True), ("generator", False)])
def test_resumed_run_shows_which_generator_was_saved(plant: str, is_equal: bool, bench: Bench) -> None:
    """Losses after a resume are those of the uninterrupted run only if each rank saved the generator of its
    own GPU."""
    whole, _ = watched(bench, plant, DROPOUT)
    resumed = bench.prepared_run(DROPOUT)
    runs.resume_from(resumed, whole, DROPOUT.saved_step)
    runs.train(bench.on_ranks, resumed, DROPOUT.ranks)
    expected, found = ([line["loss"] for line in runs.loss_lines(run)] for run in (whole, resumed))
    assert len(expected) == len(found) == SHORT
    assert (found == expected) is is_equal
