"""What a command prepares before the machines of a run have found each other, and what it says when it
ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from fsdp_tune.core.errors import FailedError, FsdpTuneError, Problem, failed_error
from fsdp_tune.jobs import connecting as jobs
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.resizing import OwnRun
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.run.directory import RunDir
from tests.launch.recipes import resolved

TWO_MACHINES = ("launch.num_machines=2", "launch.num_processes=2", "launch.main_process_ip=127.0.0.1")
OWN = (*TWO_MACHINES, "launch.shared_directory=false")


class Found:
    """Stands for the machines, which are not sought."""

    made: list[Found]

    def __init__(self, *words: Any, channel: object = None, directory: Any = None, **more: Any) -> None:
        self.words, self.channel, self.directory, self.more = words, channel, directory, more
        self.others, self.events = (words[2] - 1 if len(words) > 2 else 0), list[str]()
        Found.made.append(self)

    def __enter__(self) -> Self:
        self.events.append("connected")
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append("closed")

    def advance(self, n: int) -> None:
        self.events.append(f"counted {n}")


class Said(Observer):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


Connect = Callable[..., AbstractContextManager[Machines]]


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def connect(tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch) -> Connect:
    monkeypatch.setattr(Found, "made", [], raising=False)
    monkeypatch.setattr(jobs, "Machines", Found)
    monkeypatch.setattr(jobs, "open_channel", lambda *words: words)
    monkeypatch.setattr(OwnRun, "prepare", lambda _, advance: advance(7))

    def make(*overrides: str, rank: int = 0) -> AbstractContextManager[Machines]:
        recipe = resolved(tmp_path, *overrides)
        plan = launch_plan(recipe, RunDir(tmp_path / "run"), machine_rank=rank)
        extension = SimpleNamespace(kind="metrics", name="bleu", version="1.0")
        return jobs.connecting(cast(Any, None), recipe, plan, [cast(Any, extension)], TrainOptions(), said)

    return make


def test_single_machine_seeks_no_other(connect: Connect, said: Said) -> None:
    with connect() as found:
        assert len(cast(Any, found).words) == 1
    assert said.messages == []


def test_machines_that_share_a_directory_exchange_no_files(connect: Connect, said: Said) -> None:
    with connect(*TWO_MACHINES, rank=1) as found:
        made = cast(Any, found)
    assert (made.words[1:], made.directory) == ((1, 2), None)
    assert made.channel[:2] == (1, 2)
    assert made.channel[4] is None
    assert made.events == ["connected", "closed"]
    assert len(said.messages) == 1, "the network"


@pytest.mark.parametrize(("rank", "events"), [(0, []), (1, ["counted 7"])])
def test_other_machine_prepares_its_data_once_it_is_connected(
    connect: Connect, rank: int, events: list[str]
) -> None:
    """So that the first sees its progress, and what is wrong there."""
    with connect(*OWN, rank=rank) as found:
        made = cast(Any, found)
        folder = made.channel[4]
        assert folder.is_dir()
        assert made.events == ["connected", *events]
        assert made.directory is not None
    assert not folder.exists()


def test_error_of_one_machine_is_reported_before_the_others_are_told(
    connect: Connect, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FailedError), connect(*TWO_MACHINES):
        raise failed_error("test", "the disk is full")
    assert said.messages[-1].startswith("the disk is full; this machine tells the others before it ends")
    count = len(said.messages)
    with pytest.raises(KeyboardInterrupt), connect(*TWO_MACHINES):
        raise KeyboardInterrupt
    assert len(said.messages) == count + 1, "the network alone"

    def refuse(*_: object) -> None:
        raise FsdpTuneError(Problem("test", "no such row"))

    monkeypatch.setattr(OwnRun, "prepare", refuse)
    with pytest.raises(FsdpTuneError, match="no such row"), connect(*OWN, rank=1):
        pytest.fail("it is connected")
    assert said.messages[-1].startswith("no such row; ")
    assert Found.made[-1].events == ["connected", "closed"]
