"""A step that overflows in fp16 does not advance the schedule, as in transformers' Trainer, also across a resume."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from fsdp_tune.run.directory import RunDir
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case

STEPS, SAVED_STEP, WARMUP, RATE = 6, 3, 2, 3e-3
OVERFLOWS = (2, 3, 5)
"""Steps whose gradients are infinite; a checkpoint is saved after the second one."""


def train_with_overflows(path: str, steps: tuple[int, ...] = OVERFLOWS) -> dict[str, Any]:
    """On a rank: the worker, with a scale that does not overflow on its own."""
    import torch

    from fsdp_tune.model.step import LossScale
    from fsdp_tune.worker.step_checks import GradientGate

    pass_or_skip = GradientGate.pass_or_skip

    def before_update(self: Any, step: int, max_norm: Any, optimizer: Any, batches: Any) -> Any:
        if step in steps:
            local = max((p.grad for p in self._trained), key=lambda grad: grad.numel())
            (local.to_local() if hasattr(local, "to_local") else local).view(-1)[0] = torch.inf
        return pass_or_skip(self, step, max_norm, optimizer, batches)

    with patch.object(GradientGate, "pass_or_skip", before_update), patch.object(LossScale.__init__, "__defaults__", (64.0,)):
        return runs.run_worker(path)


def trainer_rates() -> dict[int, float]:
    """The rates of transformers' Trainer: the schedule is stepped unless `optimizer_step_was_skipped`."""
    import torch
    from transformers.optimization import get_scheduler

    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=RATE)
    schedule: Any = get_scheduler("linear", optimizer, WARMUP, STEPS)
    rates: dict[int, float] = {}
    for step in range(1, STEPS + 1):
        rates[step] = schedule.get_last_lr()[0]
        if step not in OVERFLOWS:
            optimizer.step()
            schedule.step()
    return rates


@pytest.mark.ranks
@pytest.mark.parametrize("max_grad_norm", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_overflowed_step_does_not_advance_the_schedule(max_grad_norm: float, bench: Bench) -> None:
    case = Case(precision="fp16", accumulation=2)
    training: dict[str, Any] = {"learning_rate": RATE, "lr_scheduler_type": "linear", "warmup_steps": WARMUP, "max_steps": STEPS}
    training |= {"max_grad_norm": max_grad_norm, "save_steps": SAVED_STEP, "eval_strategy": "no", "logging_steps": 1, "witness": "first"}
    recipe = runs.merged(case.recipe(str(bench.model("llama"))), {"training": training})
    full, resumed = bench.written_run(recipe), bench.written_run(recipe)
    runs.train(bench.on_ranks, full, case.ranks, train_with_overflows)
    runs.resume_from(resumed, full, SAVED_STEP)
    runs.train(bench.on_ranks, resumed, case.ranks, train_with_overflows)
    for run in (full, resumed):
        assert rates(run) == pytest.approx(trainer_rates()), "steps count attempts, rates count updates"
        assert runs.loss_lines(run)[-1]["skipped_steps"] == len(OVERFLOWS)


def rates(run: RunDir) -> dict[int, float]:
    return {line["step"]: line["learning_rate"] for line in runs.loss_lines(run)}


def train_with_first_overflow(path: str) -> dict[str, Any]:
    return train_with_overflows(path, (1,))


@pytest.mark.ranks
def test_adapters_whose_first_gradients_overflow_are_trained(bench: Bench) -> None:
    """The gradients of such a step are removed, which is no sign of a module that the model does not call."""
    case = Case(precision="fp16", ranks=1)
    training = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "logging_steps": 1, "witness": "first"}
    recipe = runs.merged(case.recipe(str(bench.model("llama"))), {"lora": {"r": 2}, "training": training})
    run = bench.written_run(recipe)
    runs.train(bench.on_ranks, run, case.ranks, train_with_first_overflow)
    assert runs.loss_lines(run)[-1]["skipped_steps"] == 1
