"""The breakdown of a profile counts the steps that were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fsdp_tune.core.command import ProfiledSteps
from fsdp_tune.run.directory import RunDir
from fsdp_tune.worker.observe.profile import Profile


def test_profile_of_a_run_that_resumes_between_its_steps_counts_the_later_ones(tmp_path: Path) -> None:
    events: list[Any] = []
    model = nn.Linear(2, 2)
    trainer: Any = SimpleNamespace(
        wrapped=model,
        training_step=lambda: model(torch.ones(1, 2)),
        parts=SimpleNamespace(metrics=SimpleNamespace(event=events.append)),
        lines=SimpleNamespace(leave_out=lambda _: None),
    )
    args: Any = SimpleNamespace(device=torch.device("cpu"))
    profile = Profile(RunDir(tmp_path), ProfiledSteps(10, 13), 0)
    profile.attach(trainer)
    state: Any = SimpleNamespace(global_step=11, max_steps=20)  # of the checkpoint
    control: Any = None
    profile.on_train_begin(args, state, control)
    for step in (12, 13):
        profile.on_step_begin(args, state, control)
        trainer.training_step()
        state.global_step = step
        profile.on_step_end(args, state, control)
    assert [event.steps for event in events] == [2]
    [written] = tmp_path.rglob("*.breakdown.json")
    assert json.loads(written.read_text())["steps"] == 2
