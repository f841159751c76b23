"""A launcher that is started while the inputs are checked, with the real `accelerate launch` and ranks without torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fsdp_tune.core.ownership import is_alive
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.supervise.supervisor import EarlyLaunch, Logged, Supervisor, start_early
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.launch_files import Verdict
from tests.launch.orphans import children, left_over
from tests.launch.test_accelerate import resolved
from tests.launch.test_accelerate_real import FINISHED

pytestmark = [pytest.mark.e2e, pytest.mark.ranks]


@contextmanager
def early_launch(tmp_path: Path, run: RunDir, repository: Path) -> Iterator[tuple[EarlyLaunch, Supervisor]]:
    """A launch of two fake ranks for a run directory that does not exist, and the supervisor that takes it over."""
    recipe = resolved(tmp_path, "launch.num_processes=2")
    inherited = {**os.environ, "PYTHONPATH": str(repository)}
    plan = launch_plan(recipe, run, worker_module="tests.launch.fake_worker", inherited=inherited)
    with start_early(plan, recipe) as early:
        assert early is not None
        yield early, Supervisor(plan, hang_timeout_seconds=60, early=early)


def wait_for_ranks(early: EarlyLaunch) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(early.process.pid).children()) < 2:
        assert early.process.poll() is None, early.files.launcher_log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture
def absent(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_ranks_wait_for_the_run_directory_and_are_watched_like_others(tmp_path: Path, absent: RunDir, repository: Path) -> None:
    before = children()
    with early_launch(tmp_path, absent, repository) as (early, supervisor):
        ranks = wait_for_ranks(early)
        assert not absent.path.exists()
        absent.logs.mkdir(parents=True)
        absent.launcher_log.write_text("of an earlier launch: Traceback (most recent call last)\nValueError: old\n")
        parts = [["log", {"step": 1}], ["raise", "told by a rank"]]
        (absent.path / "fake.json").write_text(json.dumps({"0": [["log", {"step": 1}], ["outcome", FINISHED]], "1": parts}))
        assert all(map(is_alive, ranks))
        events = list(supervisor.events())
        folder = early.files.path
    ended = events[-1]
    assert isinstance(ended, Verdict)
    assert ended.problem is not None
    assert "told by a rank" in ended.problem.message, "the launcher's log has what the ranks wrote, after its old lines"
    assert "ValueError: old" in absent.launcher_log.read_text()
    assert absent.launcher_log.read_text().count("RuntimeError: told by a rank") == 1
    assert left_over(before) == []
    assert not folder.exists()


def test_leaving_before_the_start_kills_ranks_and_writes_no_run_directory(tmp_path: Path, absent: RunDir, repository: Path) -> None:
    before = children()
    with early_launch(tmp_path, absent, repository) as (early, _):
        ranks, folder = wait_for_ranks(early), early.files.path
    assert left_over(before) == []
    assert not any(map(is_alive, ranks))
    assert not folder.exists()
    assert not absent.path.exists()


def test_launcher_that_dies_early_answers_no_inspection_and_is_replaced(tmp_path: Path, absent: RunDir, repository: Path) -> None:
    before = children()
    with early_launch(tmp_path, absent, repository) as (early, supervisor):
        ranks = wait_for_ranks(early)
        early.process.kill()  # as soon as they exist: before they have asked the kernel to end with it
        assert early.inspection(60) == ""
        absent.logs.mkdir(parents=True)
        shutil.copy(early.files.accelerate_yaml, absent.accelerate_yaml)
        (absent.path / "fake.json").write_text(json.dumps({rank: [["outcome", FINISHED]] for rank in "01"}))
        *_, ended = supervisor.events()
    assert isinstance(ended, Verdict)
    assert ended.problem is None
    assert left_over(before) == []
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not any(map(is_alive, alive))


def test_run_outlives_its_temporary_directory(tmp_path: Path, absent: RunDir, repository: Path) -> None:
    with early_launch(tmp_path, absent, repository) as (early, supervisor):
        wait_for_ranks(early)
        absent.logs.mkdir(parents=True)
        parts = [["beat", "training", 1], ["log", {"step": 1}], ["sleep", 2], ["raise", "told by a rank"]]
        (absent.path / "fake.json").write_text(
            json.dumps({"0": parts, "1": [["beat", "training", 1], ["sleep", 2], ["outcome", FINISHED]]})
        )
        ended = None
        for event in supervisor.events():
            if not isinstance(event, Verdict):
                shutil.rmtree(early.files.path, ignore_errors=True)
            ended = event
    assert isinstance(ended, Verdict)
    assert ended.problem is not None
    assert "told by a rank" in ended.problem.message
    assert absent.launcher_log.read_text().count("RuntimeError: told by a rank") == 1


def test_started_ranks_leave_no_temporary_directory_if_the_command_is_killed(tmp_path: Path, absent: RunDir, repository: Path) -> None:
    with early_launch(tmp_path, absent, repository) as (early, supervisor):
        wait_for_ranks(early)
        absent.logs.mkdir(parents=True)
        parts = [["beat", "training", 1], ["sleep", 3], ["log", {"step": 1}], ["sleep", 1], ["outcome", FINISHED]]
        (absent.path / "fake.json").write_text(json.dumps(dict.fromkeys("01", parts)))
        events = supervisor.events()
        next(event for event in events if isinstance(event, Logged))
        assert not early.files.path.exists()
        events.close()


def test_full_temporary_directory_means_no_early_start(
    tmp_path: Path, absent: RunDir, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fsdp_tune.launch.supervise.supervisor.write_file", refuse)
    recipe = resolved(tmp_path, "launch.num_processes=2")
    before = set(tmp_path.iterdir())
    with start_early(launch_plan(recipe, absent, inherited={**os.environ, "PYTHONPATH": str(repository)}), recipe) as early:
        assert early is None
    assert set(tmp_path.iterdir()) == before
