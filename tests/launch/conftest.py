from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.run.directory import RunDir
from tests.conftest import REPOSITORY

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
