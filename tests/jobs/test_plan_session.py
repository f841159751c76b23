"""Plans of one recipe: the memory of a rank, traces that fail, and what is learned from a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.devices import Device
from fsdp_tune.core.errors import FsdpTuneError, usage_error
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.jobs import plan_session
from fsdp_tune.jobs.plan_session import PlanSession, budget_of, decisions, one_trace, visible_gpu
from fsdp_tune.planner.predict.calibration import Measured
from fsdp_tune.planner.predict.efficiency import UnknownFigure
from fsdp_tune.planner.search.auto_recomputation import Decided
from fsdp_tune.planner.trace_format import Trace
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.cli.fake_tracing import FakeTracing, replaced_tracing  # noqa: F401  a fixture
from tests.planner.recipes import resolved

A100 = find_hardware("A100-40GB")
ON_CPU = {"launch": {"device": "cpu", "num_processes": 4}}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return resolved(data={"cache_dir": str(tmp_path)})


@pytest.fixture
def plans(recipe: Recipe, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanSession]:
    monkeypatch.setattr(plan_session, "nvidia_driver", lambda: None)
    with PlanSession(recipe, A100) as made:
        yield made
    assert all(each.is_closed for each in fake.made)


@pytest.mark.parametrize(
    ("device", "usable_bytes"),
    [
        (None, None),
        (Device("cuda", "NVIDIA A100-SXM4-40GB", memory_bytes=1), A100.usable_bytes),
        (Device("cuda", "NVIDIA T1000", memory_bytes=8 << 30), 8 << 30),
        (Device("cuda", "NVIDIA T1000"), None),
    ],
    ids=["none", "table", "driver", "unknown"],
)
def test_memory_of_a_rank_is_that_of_the_table_or_of_the_driver(
    recipe: Recipe, device: Device | None, usable_bytes: int | None
) -> None:
    budget = budget_of(recipe, device)
    assert (None if budget is None else budget.usable_bytes) == usable_bytes


@pytest.mark.parametrize(
    ("memory", "limit", "usable_bytes"),
    [(64 << 30, None, 16 << 30), (64 << 30, 8 << 30, 2 << 30), (None, 8 << 30, 2 << 30), (None, None, None)],
)
def test_ranks_on_the_cpu_share_the_memory_that_the_command_may_use(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, limit: int | None, usable_bytes: int | None
) -> None:
    monkeypatch.setattr(
        plan_session.host, "host", lambda: {"memory_bytes": memory, "memory_limit_bytes": limit}
    )
    budget = budget_of(resolved(**ON_CPU), None)
    assert (None if budget is None else budget.usable_bytes) == usable_bytes


def test_gpu_of_another_kind_is_not_the_recipes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [Device("cuda", "one"), Device("cuda", "two")]
    monkeypatch.setattr(plan_session.devices, "visible_devices", lambda _env: shown)
    assert visible_gpu(recipe) == shown[0]
    assert visible_gpu(resolved(**ON_CPU)) is None
    shown[0] = Device("mps", "Apple GPU")
    assert visible_gpu(recipe) is None
    shown.clear()
    assert visible_gpu(recipe) is None


def test_trace_that_failed_is_raised(recipe: Recipe) -> None:
    error = usage_error("no-model", "it is gone")
    tracing: Any = lambda _recipes: [error]  # noqa: E731
    with pytest.raises(FsdpTuneError) as caught:
        one_trace(tracing)(recipe)
    assert caught.value is error


def test_values_that_a_plan_decided_are_shown_as_in_a_recipe(recipe: Recipe) -> None:
    reasons = {"fsdp.reshard_after_forward": "it fits", "fsdp.activation_checkpointing": "it does not"}
    changed = recipe.model_copy(
        update={
            "fsdp": recipe.fsdp.model_copy(
                update={"reshard_after_forward": True, "activation_checkpointing": "full"}
            )
        }
    )
    assert decisions(Decided(changed, reasons)) == {
        "fsdp.reshard_after_forward": "true (it fits)",
        "fsdp.activation_checkpointing": "full (it does not)",
    }


def test_figure_that_experts_lack_is_named_and_the_plan_is_made(
    plans: PlanSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise UnknownFigure("nvlink_gb_s of A100-40GB")

    plans.decide()
    made = plans.plan()
    assert plans.with_experts(made).experts == (), "a dense model"
    monkeypatch.setattr(plan_session, "expert_rows", unknown)
    found = plans.with_experts(made)
    assert found == replace(made, unknown=[*made.unknown, "experts: nvlink_gb_s of A100-40GB"])


def test_speed_is_learned_from_the_trace_of_the_measured_recipe(
    plans: PlanSession, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run may have had another batch than the planned recipe."""
    plans.decide()
    own = plans.trace()
    measured = Measured(resolved(micro_batch=2, data={"cache_dir": str(tmp_path)}), 2.0, 9)
    learned = list[tuple[Path, Measured, Trace]]()

    def learn(cache: Path, hardware: object, run: Measured, trace: Trace) -> tuple[object, float]:
        assert hardware == A100
        learned.append((cache, run, trace))
        return None, 1.25

    monkeypatch.setattr(plan_session, "learn", learn)
    monkeypatch.setattr(plan_session, "read_run", lambda path, hardware: measured)
    assert plans.calibrate(Path("runs/a")) == (
        "A100-40GB took 1.25 of the predicted time in 9 steps of runs/a; kept for later plans"
    )
    ((cache, run, trace),) = learned
    assert (cache, run) == (tmp_path, measured)
    batches = [each.training.per_device_train_batch_size for made in fake.made for each in made.asked]
    assert (trace is own, batches) == (False, [1, 2])
    assert plans.recipe.training.per_device_train_batch_size == 1


def test_memory_is_learned_from_the_runs_that_have_a_figure(
    plans: PlanSession, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans.decide()
    runs = [Measured(plans.recipe, 1.0, 9, reserved_bytes=size) for size in (None, 4e9, 5e9)]
    learned = list[float | None]()

    def learn_memory(cache: Path, hardware: object, found: Sequence[tuple[Measured, Trace]]) -> float:
        learned.extend(run.reserved_bytes for run, _ in found)
        return 1.1

    monkeypatch.setattr(plan_session, "learn_memory", learn_memory)
    assert plans.learn_memory(runs) == 1.1
    assert learned == [4e9, 5e9]
    assert sum(len(each.asked) for each in fake.made) == 2, "a run without a figure is not traced"
