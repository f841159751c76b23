from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fsdp_tune.launch.command.accelerate import LaunchPlan
from fsdp_tune.launch.machines import channel as channels
from fsdp_tune.launch.machines import directories, peers, store
from fsdp_tune.launch.machines import rendezvous as machines
from fsdp_tune.launch.supervise import hang_diagnosis, rank_watch, stop_signals, supervisor
from fsdp_tune.run.directory import RunDir
from tests.launch.fake_ranks import Parts, PlanOf, fake_plan, write_parts_of_ranks
from tests.launch.links import Play


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


@pytest.fixture
def plan_of(run: RunDir) -> PlanOf:
    """A launch of fake ranks under the fake agent, from the part of each rank."""

    def make(parts: Parts) -> LaunchPlan:
        write_parts_of_ranks(run, parts)
        return fake_plan(run, len(parts))

    return make


@pytest.fixture
def quick_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short periods and limits of a supervisor."""
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(supervisor, "METRICS_SECONDS", 0.02)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(supervisor, "HANG_MARGIN_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "LAST_READ_SECONDS", 0.3)
    monkeypatch.setattr(stop_signals, "ECHO_SECONDS", 0.15)
    monkeypatch.setattr(hang_diagnosis, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(rank_watch, "READS_PER_SECOND", 50.0)
    monkeypatch.setattr(rank_watch, "STARTUP_SECONDS", 0.0)


@pytest.fixture
def quick_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short periods and limits of machines that find each other."""
    monkeypatch.setattr(store, "PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(store, "SERVED_SECONDS", 2.0)
    monkeypatch.setattr(store, "PRESENT_SECONDS", 0.5)
    monkeypatch.setattr(store, "PRESENT_AT_STOP_SECONDS", 0.5)
    monkeypatch.setattr(channels, "RESPAWN_SECONDS", 0.05)
    monkeypatch.setattr(machines, "READ_SECONDS", 0.01)
    monkeypatch.setattr(peers, "READ_SECONDS", 0.01)
    monkeypatch.setattr(peers, "WORK_SECONDS", 0.02)
    monkeypatch.setattr(peers, "SHARE_SECONDS", 20.0)
    monkeypatch.setattr(machines, "GATHER_SECONDS", 20.0)
    monkeypatch.setattr(directories, "VISIBLE_SECONDS", 0.5)
    monkeypatch.setattr(directories, "READ_SECONDS", 0.01)


@pytest.fixture
def play_of(run: RunDir) -> Iterator[Callable[[int], Play]]:
    played: list[Play] = []

    def make(count: int) -> Play:
        played.append(Play(run, count))
        return played[-1]

    yield make
    for each in played:
        each.network.close()
