"""Shares of a step's time are measured on logged steps only, and reported once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fsdp_tune.worker.observe.step_shares import StepShares
from fsdp_tune.worker.step_observer import LoggedStep
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.worker.short_runs import short_run


class Group:
    """Stands for FSDP2's parameter group: four calls, each of which takes a while."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def unshard(self, async_op: bool = False) -> str:
        time.sleep(0.002)
        self.calls.append(f"unshard {async_op}")
        return "gathered"

    def wait_for_unshard(self) -> None:
        self.calls.append("wait")

    def post_backward(self, *unused: Any) -> None:
        self.calls.append(f"reduce {len(unused)}")

    def finalize_backward(self) -> None:
        self.calls.append("end")


class Unit(nn.Identity):
    """Stands for a module that FSDP2 wrapped."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def _get_fsdp_state(self) -> Any:
        return SimpleNamespace(_fsdp_param_groups=[self._group])


def step(shares: StepShares, number: int, work: Any, *, is_first_logged: bool = False) -> None:
    args, control = SimpleNamespace(logging_steps=3, logging_first_step=is_first_logged), SimpleNamespace()
    shares.on_step_begin(args, SimpleNamespace(global_step=number - 1, max_steps=7), control)  # type: ignore[arg-type]
    work()
    state = SimpleNamespace(global_step=number, max_steps=7)
    shares.on_pre_optimizer_step(args, state, control)  # type: ignore[arg-type]
    time.sleep(0.001)
    shares.on_optimizer_step(args, state, control)  # type: ignore[arg-type]
    shares.on_step_end(args, state, control)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("is_first_logged", "timed"), [(False, [3, 6, 7]), (True, [1, 3, 6, 7])], ids=["each third", "the first"]
)
def test_only_logged_steps_are_timed(is_first_logged: bool, timed: list[int]) -> None:
    group = Group()
    with patch("fsdp_tune.model.shard.wrap.FSDPModule", Unit):
        # The norm and the head are one unit: two modules, one group.
        shares = StepShares(nn.Sequential(Unit(group), Unit(group)), torch.device("cpu"))
    told = {}
    for number in range(1, 8):
        answers: list[str] = []
        step(
            shares,
            number,
            lambda answers=answers: (answers.append(group.unshard(async_op=True)), group.post_backward(1, 2)),
            is_first_logged=is_first_logged,
        )
        assert answers == ["gathered"]
        group.unshard()  # an evaluation
        told[number] = shares.facts(LoggedStep(1))
    assert group.calls[:3] == ["unshard True", "reduce 2", "unshard False"]
    measured = [number for number, share in told.items() if share["optimizer_seconds"] is not None]
    assert measured == timed
    for number in measured:
        communication = told[number]["exposed_communication_seconds"]
        assert communication is not None
        assert communication >= 0.002
        assert told[number]["optimizer_seconds"] >= 0.001  # type: ignore[operator]
        assert told[number]["last_step_seconds"] >= communication + told[number]["optimizer_seconds"]  # type: ignore[operator]
    assert told[2] == {
        "last_step_seconds": None,
        "optimizer_seconds": None,
        "exposed_communication_seconds": None,
    }


@on_devices
@pytest.mark.ranks
def test_metrics_lines_have_the_time_not_spent_computing(bench: Bench) -> None:
    every = runs.lines(
        short_run(
            bench,
            Case(),
            {"training": {"max_steps": 6, "save_steps": 2, "logging_steps": 4, "logging_first_step": True}},
        )
    )
    lines = [line for line in every if "loss" in line]
    assert [line["step"] for line in lines] == [1, 4, 6]
    for line, steps in zip(lines, (1, 3, 2), strict=True):
        assert line["optimizer_seconds"] > 0
        assert line["exposed_communication_seconds"] > 0
        assert (
            line["optimizer_seconds"] + line["exposed_communication_seconds"]
            < line["last_step_seconds"]
            < line["step_seconds"] * steps  # `step_seconds` is a mean
        )
    events = [line for line in every if line.get("event") == "checkpoint_saved"]
    stalls = [line["checkpoint_stall_seconds"] for line in lines]
    assert 0 < sum(stalls) <= sum(event["stall_seconds"] for event in events)
    [first] = [line for line in every if line.get("event") == "first_step"]
    assert list(first["phase_seconds"])[:3] == ["launching", "starting Python", "starting"]
    assert {"importing", "loading the model", "forward", "backward", "optimizer step"} <= set(
        first["phase_seconds"]
    )


@on_devices
@pytest.mark.ranks
def test_waits_of_ddp_inside_autograd_are_not_estimated(bench: Bench) -> None:
    lines = [line for line in runs.lines(short_run(bench, Case(strategy="NO_SHARD"))) if "loss" in line]
    assert {line["exposed_communication_seconds"] for line in lines} == {None}
    assert all(line["optimizer_seconds"] > 0 for line in lines)
