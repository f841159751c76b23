from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.machines import channel as channels
from fsdp_tune.launch.machines import launches as machines
from fsdp_tune.launch.machines import machine, store
from fsdp_tune.run.directory import RunDir
from tests.conftest import REPOSITORY
from tests.launch.links import Play

Parts = dict[str, list[list[object]]]
PlanOf = Callable[[Parts], LaunchPlan]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


@pytest.fixture
def plan_of(run: RunDir) -> PlanOf:
    """A launch of fake ranks under the fake agent, from the part of each rank."""

    def make(parts: Parts) -> LaunchPlan:
        (run.path / "fake.json").write_text(json.dumps(parts))
        world_size = len(parts)
        agent = str(REPOSITORY / "tests" / "launch" / "fake_agent.py")
        return LaunchPlan(
            argv=(sys.executable, agent, str(world_size), str(run.path)),
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            settings={},
            removed=(),
            run=run,
            ranks=range(world_size),
            machine_rank=0,
            world_size=world_size,
        )

    return make


@pytest.fixture
def quick_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short periods and limits of machines that find each other."""
    monkeypatch.setattr(store, "PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(store, "SERVED_SECONDS", 2.0)
    monkeypatch.setattr(store, "PRESENT_SECONDS", 0.5)
    monkeypatch.setattr(channels, "RESPAWN_SECONDS", 0.05)
    monkeypatch.setattr(machines, "READ_SECONDS", 0.01)
    monkeypatch.setattr(machines, "WORK_SECONDS", 0.02)
    monkeypatch.setattr(machines, "SHARE_SECONDS", 20.0)
    monkeypatch.setattr(machines, "GATHER_SECONDS", 20.0)
    monkeypatch.setattr(machine, "VISIBLE_SECONDS", 0.5)
    monkeypatch.setattr(machine, "READ_SECONDS", 0.01)


@pytest.fixture
def play_of(run: RunDir) -> Iterator[Callable[[int], Play]]:
    played: list[Play] = []

    def make(count: int) -> Play:
        played.append(Play(run, count))
        return played[-1]

    yield make
    for each in played:
        each.network.close()
