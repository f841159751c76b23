"""A supervisor whose looks at files and processes are refused: no healthy rank ends by that, and the exit
code is the true one."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason
from fsdp_tune.launch.supervise import hang_diagnosis, retried_io
from fsdp_tune.launch.supervise import supervisor as supervise
from fsdp_tune.launch.supervise.retried_io import Looks
from fsdp_tune.launch.supervise.supervisor import Supervisor
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Heartbeat, Outcome, Verdict
from tests.launch.fake_ranks import end_of, fake_plan, messages

pytestmark = pytest.mark.usefixtures("quick_supervisor")

RANKS = range(2)
NUMBERS = [
    "EACCES",
    "EPERM",
    "EIO",
    "ESTALE",
    "ELOOP",
    "EMFILE",
    "ENFILE",
    "ENOMEM",
    "EROFS",
    "ETIMEDOUT",
    "EKEYEXPIRED",
]
PERMISSIONS = ("EACCES", "EPERM")
"""Everybody may read what psutil reads in /proc, and it counts a process as another one if that is
refused."""
LAUNCHER = "trap ': > passed' TERM; RANK=0 sleep 60 & RANK=1 sleep 60 & wait; wait; wait; wait"
BEGINS, ENDS, SAVED = 4, 12, 14
"""Polls at which the refusals begin and end, and at which the ranks have saved and end."""


class Refusing:
    """Calls on files that are refused while there is an `error`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, writes_alone: bool = False) -> None:
        self._folder, self._writes_alone = str(folder), writes_alone
        self.error: Callable[[str], BaseException] | None = None
        self.count = 0
        calls = [
            (os, "open"),
            (os, "stat"),
            (os, "listdir"),
            (os, "scandir"),
            (os, "replace"),
            (builtins, "open"),
            (io, "open"),
        ]
        for owner, name in calls:
            monkeypatch.setattr(owner, name, partial(self._call, getattr(owner, name), name == "replace"))

    def _call(
        self, real: Callable[..., Any], is_write: bool, path: Any, *arguments: Any, **options: Any
    ) -> Any:
        named = "" if isinstance(path, int) else os.fsdecode(path)
        if self.error is not None and named.startswith(self._folder) and (is_write or not self._writes_alone):
            self.count += 1
            raise self.error(named)
        return real(path, *arguments, **options)


def error_of(name: str) -> Callable[[str], BaseException]:
    if name == "MemoryError":
        return lambda _: MemoryError()
    number: int = getattr(errno, name)
    return lambda path: OSError(number, os.strerror(number), path)


class Launch:
    """A launch of two processes that sleep. Acts of a test happen at the polls of the supervisor, at the
    number of each."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.polls = run, 0
        self.acts: dict[int, Callable[[], object]] = {SAVED: self.save}
        self.seen: list[list[psutil.Process]] = []
        self._supervisor = Supervisor(fake_plan(run, len(RANKS)), hang_timeout_seconds=60.0)
        monkeypatch.setattr(self._supervisor, "_start", self._start)
        monkeypatch.setattr(supervise, "time", SimpleNamespace(sleep=self._poll, monotonic=time.monotonic))
        monkeypatch.setattr(supervise, "METRICS_SECONDS", 0.0)

    def _start(self) -> subprocess.Popen[bytes]:
        for rank in RANKS:
            beat = Heartbeat(rank, 1, 5, "training", time.time(), time.monotonic(), 0.0)
            beat.write(self.run.rank_heartbeat(rank))
        return subprocess.Popen(["sh", "-c", LAUNCHER], cwd=self.run.path, start_new_session=True)

    @property
    def ranks(self) -> list[psutil.Process]:
        assert self._supervisor._signals.relay is not None
        return psutil.Process(self._supervisor._signals.relay.launcher.pid).children()

    def _poll(self, _: float) -> None:
        self.polls += 1
        self.acts.get(self.polls, lambda: None)()
        time.sleep(0.002)
        assert self.polls < 1000

    def save(self) -> None:
        assert len(self.ranks) == len(RANKS), "no rank was ended"
        for rank in RANKS:
            Outcome(ExitCode.PREEMPTED, ExitReason.PREEMPTED, rank=rank, step=7).write(
                self.run.rank_outcome(rank)
            )
        for process in self.ranks:
            process.kill()

    def hang(self) -> None:
        self._supervisor._hang_seconds = 0.0

    def end(self) -> tuple[Verdict, list[str]]:
        ended, events = end_of(self._supervisor.events())
        return ended, messages(events)


@pytest.fixture
def launch(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Launch:
    return Launch(run, monkeypatch)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (where, name)
        for where in ("run", "proc")
        for name in (*NUMBERS, "MemoryError")
        if where == "run" or name not in PERMISSIONS
    ],
)
def test_refused_look_ends_no_rank_and_hinders_no_signal(
    where: str, name: str, launch: Launch, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retried_io, "SETTLED_SECONDS", 0.0)
    refusing = Refusing(run.path if where == "run" else Path("/proc"), monkeypatch)
    launch.acts |= {
        BEGINS: lambda: setattr(refusing, "error", error_of(name)),
        BEGINS + 2: lambda: os.kill(os.getpid(), signal.SIGTERM),
        ENDS: lambda: setattr(refusing, "error", None),
    }
    ended, texts = launch.end()
    assert refusing.count > 0
    assert (ended.exit_code, ended.problem, ended.step) == (ExitCode.PREEMPTED, None, 7)
    assert (run.path / "passed").exists(), "the launcher has the signal"
    assert sum(text.startswith("SIGTERM: ") for text in texts) == 1
    failing, working = (
        [text.partition(word)[0] for text in texts if word in text] for word in (" fails: ", " works again")
    )
    assert len(set(failing)) == len(failing), "each is said once"
    assert set(working) <= set(failing)
    assert where == "proc" or "reading metrics.jsonl" in working


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "MemoryError", *NUMBERS])
def test_verdict_that_cannot_be_written_is_said(
    name: str, launch: Launch, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = Refusing(run.path, monkeypatch, writes_alone=True)
    launch.acts[SAVED] = lambda: (launch.save(), setattr(refusing, "error", error_of(name)))
    ended, texts = launch.end()
    assert (ended.exit_code, ended.reason, ended.problem) == (ExitCode.PREEMPTED, ExitReason.PREEMPTED, None)
    why = "this command has no memory left" if name == "MemoryError" else os.strerror(getattr(errno, name))
    assert (
        texts[-1] == f"{run.outcome_json} cannot be written ({why}): the run ended with exit code 143, "
        "preempted, step 7"
    )


@pytest.mark.parametrize(
    ("error", "why"),
    [(None, "Is a directory"), (MemoryError(), "this command has no memory left")],
    ids=["a directory", "no memory"],
)
def test_hang_report_that_cannot_be_written_is_said(
    error: Exception | None, why: str, launch: Launch, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_diagnosis, "ANSWER_SECONDS", 0.0)
    launch.acts = {2: run.hang_report.mkdir, BEGINS: launch.hang}
    if error is not None:
        monkeypatch.setattr(supervise, "write_file", Mock(side_effect=error))
    ended, texts = launch.end()
    assert ended.exit_code == ExitCode.LOST_RANK
    assert ended.problem is not None
    assert ended.problem.code == "hang"
    assert ended.problem.hint is not None
    assert "above" in ended.problem.hint
    [text] = [text for text in texts if text.startswith(f"{run.hang_report} cannot be written ({why})")]
    assert "── stacks of rank 1" in text


def test_launch_is_where_its_directory_was_when_a_link_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to("a")
    launch = Launch(RunDir(link), monkeypatch)
    real = RunDir(tmp_path / "a")

    def retarget() -> None:
        link.unlink()
        link.symlink_to("b")
        launch.run = real  # the ranks have resolved the path, too

    launch.acts[BEGINS] = retarget
    ended, texts = launch.end()
    assert (ended.exit_code, texts) == (ExitCode.PREEMPTED, [])
    assert real.outcome_json.exists()
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("in_place", ["nothing", "an empty directory", "a directory with logs"])
def test_run_directory_that_is_no_longer_at_its_path_ends_the_run_within_seconds(
    in_place: str, launch: Launch, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = run.path.with_name("elsewhere")
    began: list[float] = []

    def move() -> None:
        began.append(time.monotonic())
        run.path.rename(elsewhere)
        if in_place != "nothing":
            run.path.mkdir()
        if in_place == "a directory with logs":
            run.logs.mkdir()

    def stop() -> None:
        assert len(launch.ranks) == len(RANKS), "they are told to save, and are not killed"
        for process in launch.ranks:
            process.kill()

    monkeypatch.setattr(supervise, "MOVED_SECONDS", 0.02)
    launch.acts = {BEGINS: move, BEGINS + 30: stop}
    ended, texts = launch.end()
    assert ended.problem is not None
    assert (ended.exit_code, ended.problem.code) == (ExitCode.FAILED, "run-directory-gone")
    assert (elsewhere / "passed").exists(), "the launcher has a signal"
    [stopped] = [text for text in texts if "the ranks are stopped" in text]
    assert (
        stopped
        == f"{run.path} is gone: the run directory is now {elsewhere}; the ranks are stopped after they "
        "have saved there"
    )
    assert (
        ended.problem.hint
        == f"move it back, or pass `--set output_dir={elsewhere}`; `--resume auto` then continues"
    )
    assert RunDir(elsewhere).outcome_json.exists(), "the verdict is where the run is"
    assert sum(1 for path in run.path.rglob("*") if path.is_file()) == 0, (
        "nothing is written into the other directory"
    )


def test_work_that_was_saved_in_a_moved_run_directory_is_reported(
    launch: Launch, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = run.path.with_name("elsewhere")

    def move() -> None:
        run.path.rename(elsewhere)
        run.path.mkdir()
        launch.run = RunDir(elsewhere)  # the ranks follow it, too

    monkeypatch.setattr(supervise, "MOVED_SECONDS", 0.0)
    launch.acts[BEGINS] = move
    ended, _ = launch.end()
    assert ended.problem is not None
    assert (
        ended.problem.message
        == f"{run.path} is gone: the run directory is now {elsewhere}, and step 7 is saved there"
    )
    assert (ended.exit_code, ended.step) == (ExitCode.FAILED, 7)
    assert list(run.path.iterdir()) == []


def test_run_directory_that_was_removed_and_replaced_is_written_to_by_nobody(
    launch: Launch, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace() -> None:
        shutil.rmtree(run.path)
        run.logs.mkdir(parents=True)

    def stop() -> None:
        for process in launch.ranks:
            process.kill()

    monkeypatch.setattr(supervise, "MOVED_SECONDS", 0.02)
    launch.acts = {BEGINS: replace, BEGINS + 30: stop}
    ended, texts = launch.end()
    assert ended.problem is not None
    assert (
        ended.problem.message
        == f"{run.path} is gone: the run directory was removed, or replaced by another one"
    )
    assert any(text.endswith("; the ranks are stopped") for text in texts)
    assert list(run.path.iterdir()) == [run.logs]
    assert list(run.logs.iterdir()) == []


def test_run_directory_that_is_soon_back_was_not_gone(launch: Launch, run: RunDir) -> None:
    elsewhere = run.path.with_name("elsewhere")
    launch.acts |= {
        BEGINS: lambda: run.path.rename(elsewhere),
        BEGINS + 4: lambda: elsewhere.rename(run.path),
    }
    ended, _ = launch.end()
    assert (ended.exit_code, ended.problem) == (ExitCode.PREEMPTED, None)


def test_look_that_fails_now_and_then_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(retried_io, "LIVED", SimpleNamespace(now=lambda: now[0]))
    found, texts = Looks(), list[str]()
    for second in range(60):
        now[0] += 1
        with found.at("reading"):
            if second % 3 == 0 and second < 30:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/run/file")
        texts += found.news()
    assert texts == [
        "reading fails: /run/file: Stale file handle; it is tried again, and the ranks continue",
        "reading works again",
    ]
    with pytest.raises(ValueError, match="a mistake"), found.at("reading"):
        raise ValueError("a mistake of the program is none of them")
