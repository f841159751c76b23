"""Machines wait for a first machine whose work counter advances, and give up otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdp_tune.core.errors import EXIT_CODE_OF_REASON, ExitReason, Problem
from fsdp_tune.launch import coordination
from fsdp_tune.launch import coordination as machines
from fsdp_tune.launch.coordination import CountedBar, Machines, WorkCounter, WorkWatch
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir, latest_checkpoint, locked
from fsdp_tune.run.launch_files import Verdict
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files

LIMIT_SECONDS = 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "READ_SECONDS", 0.02)
    monkeypatch.setattr(machines, "DECISION_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(machines, "JOIN_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(coordination, "PUBLISH_SECONDS", 0.05)


@contextmanager
def meanwhile(run: RunDir, seconds: float, *, works: bool) -> Iterator[None]:
    """The first machine is busy for `seconds` in the block, and counts its work or does not."""

    def act() -> None:
        with WorkCounter(run, 2 if works else 1) as counter:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                counter.advance(1000)
                time.sleep(0.02)

    thread = threading.Thread(target=act)
    thread.start()
    yield
    thread.join()


@pytest.mark.parametrize("works", [True, False])
def test_restart_wait_continues_while_first_machine_works(works: bool, run: RunDir) -> None:
    run.logs.mkdir()
    with locked(run):
        first, second = (Machines(run, machine, 2, timeout_seconds=20.0) for machine in (0, 1))
        launches: list[object] = []

        def follow() -> None:
            launches.extend([second.join(), second.next_launch()])
            ended = Verdict(EXIT_CODE_OF_REASON[ExitReason.LOST_RANK], ExitReason.LOST_RANK, 3, Problem("rank-killed", "killed"))
            second.end(ended)
            launches.append(second.next_launch())

        following = threading.Thread(target=follow)
        following.start()
        assert first.gather(0) is None
        with meanwhile(run, 3 * LIMIT_SECONDS, works=works):
            pass
        if works:
            assert first.gather(1) is None
        following.join()
        assert launches == [None, 0, 1 if works else None]


@pytest.mark.parametrize("works", [True, False])
def test_join_wait_continues_while_first_machine_works(works: bool, run: RunDir) -> None:
    run.logs.mkdir()
    problems: list[Problem | None] = []
    second = Machines(run, 1, 2, timeout_seconds=20.0)
    joining = threading.Thread(target=lambda: problems.append(second.join()))
    with meanwhile(run, 3 * LIMIT_SECONDS, works=works):
        joining.start()
        time.sleep(2 * LIMIT_SECONDS)
        assert joining.is_alive() is works
    joining.join()
    assert problems[0] is not None
    assert problems[0].code == "first-machine-missing"


def test_stale_work_counter_is_ignored(run: RunDir) -> None:
    counter = WorkCounter(run, 2)
    counter.advance(5)
    watch = WorkWatch(run)
    time.sleep(0.2)
    assert watch.silent_seconds() >= 0.2
    time.sleep(0.1)
    counter.advance(5)
    assert watch.silent_seconds() < 0.1


def test_work_counter_is_removed_when_done(run: RunDir) -> None:
    """A new run has no directory yet, and one must not be made for it."""
    run.path.rmdir()
    with WorkCounter(run, 2) as counter:
        counter.advance()
        assert [path.name for path in run.path.parent.iterdir()] == [f".{run.name}.work.json"]
    assert list(run.path.parent.iterdir()) == []
    with WorkCounter(run, 1) as alone:
        alone.advance()
        assert list(run.path.parent.iterdir()) == []


def test_hashed_bytes_and_tokenised_rows_are_counted(run: RunDir, tmp_path: Path) -> None:
    folder = run.checkpoint(3)
    folder.mkdir()
    (folder / "weights").write_bytes(b"x" * (5 << 20))
    entries = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, entries, {"step": 3}).to_json())
    counted: list[int] = []
    checkpoint, _ = latest_checkpoint(run, digests=True, progress=counted.append)
    assert checkpoint is not None
    assert (len(counted), sum(counted)) == (2, 5 << 20)
    with WorkCounter(run, 2) as counter, WorkCounter(RunDir(tmp_path / "shown"), 1) as bar:
        CountedBar(bar, counter).advance(7)
        assert (bar._count, counter._count) == (7, 7)
