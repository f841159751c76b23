"""A launcher that is started while the inputs are checked: fake ranks, and in one test the real
`accelerate launch`."""

from __future__ import annotations

import errno
import os
import subprocess
from io import FileIO
from pathlib import Path
from typing import cast

import psutil
import pytest

from fsdp_tune.core.ownership import is_alive
from fsdp_tune.launch.command.accelerate import launch_plan
from fsdp_tune.launch.supervise.early_launch import EarlyLaunch, start_early
from fsdp_tune.launch.supervise.launch_events import Event, Logged
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.early_start import EarlyStart
from tests.launch.fake_ranks import ENDS_WELL, end_of, fake_plan, write_parts_of_ranks
from tests.launch.links import until
from tests.launch.orphans import children, left_over
from tests.launch.recipes import resolved

pytestmark = pytest.mark.usefixtures("quick_supervisor")


@pytest.fixture
def absent(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def wait_for_ranks(early: EarlyLaunch) -> list[psutil.Process]:
    launcher = psutil.Process(early.process.pid)
    until(lambda: early.process.poll() is not None or len(launcher.children()) == 2, 60.0)
    assert early.process.poll() is None, early.files.launcher_log.read_text()
    return launcher.children()


@pytest.mark.e2e
@pytest.mark.ranks
def test_ranks_wait_for_the_run_directory_and_are_watched_like_others(
    tmp_path: Path, absent: RunDir, repository: Path
) -> None:
    """With accelerate and torchrun. Once the ranks have started, nothing needs the temporary directory."""
    recipe = resolved(tmp_path, "launch.num_processes=2")
    inherited = {**os.environ, "PYTHONPATH": str(repository)}
    plan = launch_plan(recipe, absent, worker_module="tests.launch.fake_worker", inherited=inherited)
    before = children()
    with start_early(plan, recipe) as early:
        assert early is not None
        ranks = wait_for_ranks(early)
        assert not absent.path.exists()
        absent.logs.mkdir(parents=True)
        absent.launcher_log.write_text(
            "of an earlier launch: Traceback (most recent call last)\nValueError: old\n"
        )
        parts = [["beat", "training", 1], ["log", {"step": 1}], ["sleep", 0.5], ["log", {"step": 2}]]
        write_parts_of_ranks(
            absent, {"0": [*parts, *ENDS_WELL], "1": [*parts, ["sleep", 0.2], ["raise", "told by a rank"]]}
        )
        assert all(map(is_alive, ranks))

        def on_event(event: Event) -> None:
            if isinstance(event, Logged) and event.line["step"] == 2:
                assert not early.files.path.exists(), "a killed command would leave it"

        ended, events = end_of(Supervisor(plan, hang_timeout_seconds=60, early=early).events(), on_event)
    assert sum(isinstance(event, Logged) for event in events) == 4
    assert ended.exit_code == 1
    assert ended.problem is not None
    assert (
        ended.problem.message
        == "rank 1 ended with exit code 1 before it could report: RuntimeError: told by a rank"
    )
    assert "ValueError: old" in absent.launcher_log.read_text()
    assert absent.launcher_log.read_text().count("RuntimeError: told by a rank") == 1
    assert left_over(before) == []


def test_leaving_before_the_start_kills_ranks_and_writes_no_run_directory(
    tmp_path: Path, absent: RunDir
) -> None:
    before = children()
    with start_early(fake_plan(absent, 2), resolved(tmp_path)) as early:
        assert early is not None
        ranks, folder = wait_for_ranks(early), early.files.path
        assert early.inspection(0.05) == "", "the limit is over"
    assert left_over(before) == []
    assert not any(map(is_alive, ranks))
    assert not folder.exists()
    assert not absent.path.exists()


def test_launcher_that_dies_early_answers_no_inspection_and_is_replaced(
    tmp_path: Path, absent: RunDir
) -> None:
    plan = fake_plan(absent, 2)
    with start_early(plan, resolved(tmp_path)) as early:
        assert early is not None
        ranks = wait_for_ranks(early)
        early.process.kill()  # as soon as they exist: before they have asked the kernel to end with it
        assert early.inspection(60) == ""
        absent.logs.mkdir(parents=True)
        write_parts_of_ranks(absent, {"0": ENDS_WELL, "1": ENDS_WELL})
        ended, _ = end_of(Supervisor(plan, hang_timeout_seconds=60, early=early).events())
    assert ended.problem is None
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not any(map(is_alive, alive))


def test_log_that_cannot_be_copied_is_copied_later_and_its_end_is_known(tmp_path: Path) -> None:
    (tmp_path / "early.log").write_text("first\n")
    log, process = tmp_path / "logs" / "launcher.log", cast(subprocess.Popen[str], None)
    with FileIO(str(tmp_path / "early.log")) as output:
        early = EarlyLaunch(EarlyStart(tmp_path), process, output)
        with pytest.raises(FileNotFoundError):
            early.copy_log(log)
        with open(tmp_path / "early.log", "a") as file:
            file.write("second\n")
        assert early.end_of_log() == "first\nsecond\n"
        log.parent.mkdir()
        early.copy_log(log)
        early.copy_log(log)
    assert log.read_text() == "first\nsecond\n"


def test_full_temporary_directory_means_no_early_start(
    tmp_path: Path, absent: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fsdp_tune.launch.supervise.early_launch.write_file", refuse)
    before = set(tmp_path.iterdir())
    with start_early(fake_plan(absent, 2), resolved(tmp_path)) as early:
        assert early is None
    assert set(tmp_path.iterdir()) == before
