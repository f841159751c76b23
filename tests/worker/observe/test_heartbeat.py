"""Heartbeats: progress in each phase, the rank that others wait for, and reports of a rank without progress."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.launch.run_status import RECENT_SECONDS
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.held_directory import HeldDirectory
from fsdp_tune.run.rank_files import clear
from fsdp_tune.worker.observe import heartbeat as heartbeats
from fsdp_tune.worker.observe.heartbeat import HeartbeatWriter


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


def content(run: RunDir) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.rank_heartbeat(0).read_text())
    return document


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def ticking(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatWriter]:
    """A heartbeat that writes its file twenty times a second."""
    monkeypatch.setattr(heartbeats, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(heartbeats, "PERIOD_SECONDS", 0.01)
    beat = HeartbeatWriter(run, 0)
    beat.start()
    yield beat
    beat.close()


def test_waiting_rank_is_alive_without_progress(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(heartbeats, "PERIOD_SECONDS", 0.01)
    beat = HeartbeatWriter(run, 0)
    beat.start()
    try:
        beat.beat("training", 3)
        before = content(run)
        until(lambda: content(run)["time"] > before["time"])
        changing = {"time": 0, "silent_seconds": 0, "document_digest": ""}
        assert content(run) | changing == before | changing
        beat.mark("forward")
        until(lambda: content(run)["phase"] == "forward")
        assert content(run)["progressed_at"] > before["progressed_at"]
    finally:
        beat.close()


def test_marks_inside_a_step_write_no_file(run: RunDir) -> None:
    beat = HeartbeatWriter(run, 0)
    beat.beat("training", 1)
    identity = run.rank_heartbeat(0).stat().st_ino
    for step in range(2, 50):
        beat.mark("forward")
        beat.mark("backward")
        beat.beat("training", step)
    assert run.rank_heartbeat(0).stat().st_ino == identity


def test_rank_detects_its_own_silence(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(heartbeats, "PERIOD_SECONDS", 0.01)
    told = threading.Event()
    beat = HeartbeatWriter(run, 0, silence_seconds=0.2, on_silence=told.set)
    beat.start()
    try:
        beat.beat("training", 1)
        assert told.wait(30)
    finally:
        beat.close()


def silent_seconds(run: RunDir) -> float:
    return float(content(run)["silent_seconds"])


def test_phases_of_a_step_are_those_of_its_parts() -> None:
    parts = {"reading back", "training", "forward", "backward", "optimizer step", "evaluating"}
    assert parts == heartbeats.STEP_PHASES


@pytest.mark.parametrize("phase", ["loading the model", "saving"])
def test_bytes_moved_outside_a_step_are_progress(phase: str, ticking: HeartbeatWriter, run: RunDir, tmp_path: Path) -> None:
    ticking.beat(phase, 1)
    until(lambda: silent_seconds(run) > 0.3)
    writer = threading.Thread(target=(tmp_path / "shard").write_bytes, args=(b"x" * (3 << 20),))
    writer.start()
    until(lambda: silent_seconds(run) < 0.2)
    writer.join()


@pytest.mark.parametrize("phase", ["training", "backward"])
def test_background_save_does_not_hide_a_hanging_step(phase: str, ticking: HeartbeatWriter, run: RunDir, tmp_path: Path) -> None:
    ticking.beat(phase, 1)
    threading.Thread(target=(tmp_path / "shard").write_bytes, args=(b"x" * (3 << 20),)).start()
    until(lambda: silent_seconds(run) > 0.3)


def test_bytes_of_the_heartbeat_are_not_progress(
    ticking: HeartbeatWriter, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write of the file takes a megabyte with it here, as many of them would in minutes."""
    write = HeartbeatWriter._write

    def large(self: HeartbeatWriter) -> None:
        if threading.get_ident() == self._thread.ident:  # type: ignore[union-attr]
            (tmp_path / "large").write_bytes(b"x" * (1 << 20))
        write(self)

    monkeypatch.setattr(HeartbeatWriter, "_write", large)
    ticking.beat("importing")
    until(lambda: silent_seconds(run) > 0.6)


def test_waiting_for_a_background_save_is_its_own_phase(run: RunDir) -> None:
    beat = HeartbeatWriter(run, 0)
    beat.beat("training", 4)
    with beat.during("saving"):
        assert (content(run)["phase"], content(run)["step"]) == ("saving", 4)
    assert beat.phase == "training"


def test_new_step_is_written_at_once(ticking: HeartbeatWriter, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    ticking.beat("training", 1)
    until(lambda: content(run)["step"] == 1)
    monkeypatch.setattr(heartbeats, "INTERVAL_SECONDS", 20.0)
    ticking._step_written_at = 0.0
    ticking.beat("training", 2)
    until(lambda: content(run)["step"] == 2)


@pytest.mark.parametrize("in_place", [(), ("run",), ("run", "run/logs")])
def test_heartbeat_follows_a_run_directory_that_is_moved(in_place: tuple[str, ...], tmp_path: Path) -> None:
    path, moved = tmp_path.resolve() / "run", RunDir(tmp_path / "moved")
    (path / "logs").mkdir(parents=True)
    with HeldDirectory(path) as place:
        beat = HeartbeatWriter(RunDir(path, place), 0)
        beat.beat("training", 1)
        path.rename(moved.path)
        for name in in_place:
            (tmp_path / name).mkdir()
        beat.beat("saving", 2)
        beat.beat("training", 3)
    assert (content(moved)["phase"], content(moved)["step"]) == ("training", 3)
    assert [each for each in path.rglob("*") if each.is_file()] == []


def test_heartbeat_of_a_removed_run_directory_is_not_written_into_another(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "run"
    (path / "logs").mkdir(parents=True)
    with HeldDirectory(path) as place:
        beat = HeartbeatWriter(RunDir(path, place), 0)
        beat.beat("training", 1)
        shutil.rmtree(path)
        (path / "logs").mkdir(parents=True)
        with pytest.raises(FailedError, match=re.escape(f"{path} is gone: the run directory was removed")):
            beat.beat("saving", 2)
    assert list((path / "logs").iterdir()) == []


def test_deleted_run_directory_ends_the_rank(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    beat = HeartbeatWriter(run, 0)
    beat.beat("training", 1)
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(FailedError, match="is gone") as caught:
        beat.beat("saving", 2)
    assert caught.value.problems[0].code == "run-directory-gone"
    assert not run.path.exists(), "nothing is created in its place"


def test_run_directory_that_is_back_was_not_gone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    beat = HeartbeatWriter(run, 0)
    beat.beat("training", 1)
    run.path.rename(tmp_path / "elsewhere")
    beat._write()
    (tmp_path / "elsewhere").rename(run.path)
    beat._write()
    beat.beat("training", 2)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE, errno.ELOOP])
def test_heartbeat_that_cannot_be_compared_is_written_on(
    number: int, ticking: HeartbeatWriter, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that refuses a read ended the thread, and the rank counted as silent."""
    compared = list[int]()

    def refuse(*_: object) -> None:
        compared.append(number)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(heartbeats, "COMPARED_SECONDS", 0.0)
    monkeypatch.setattr(heartbeats, "read_heartbeat", refuse)
    until(lambda: len(compared) > 1)
    ticking.beat("training", 7)
    until(lambda: content(run)["step"] == 7)


def test_batches_of_an_evaluation_are_counted_until_the_phase_ends(ticking: HeartbeatWriter, run: RunDir) -> None:
    ticking.beat("training", 5)
    with ticking.during("evaluating", 5):
        ticking.count(3, 8)
        until(lambda: (content(run)["phase"], content(run)["done"], content(run)["planned"]) == ("evaluating", 3, 8))
    ticking.beat("training", 6)
    until(lambda: (content(run)["step"], content(run)["done"], content(run)["planned"]) == (6, 0, 0))


@pytest.mark.parametrize("world_size", [8, 256, 1024, 4096])
def test_many_ranks_write_a_bounded_number_of_files_a_second(world_size: int) -> None:
    seconds = [heartbeats.interval_seconds(rank, world_size) for rank in range(world_size)]
    assert seconds[0] == 1.0
    assert max(seconds) <= heartbeats.SLOWEST_SECONDS < RECENT_SECONDS / 2
    assert sum(1 / each for each in seconds) <= max(heartbeats.MOST_WRITES * 1.1, world_size / heartbeats.SLOWEST_SECONDS) + 1


def test_rank_of_an_earlier_launch_writes_nothing_once_it_has_seen_its_successor(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, same = (started_in(run, "life-1", monkeypatch) for _ in range(2))
    later = started_in(run, "life-2", monkeypatch)
    earlier.beat("training", 9)
    assert not same.is_superseded()
    assert not later.is_superseded(), "the earlier rank still writes, and does not take the place"
    later.beat("training", 3)
    assert earlier.is_superseded()
    earlier.beat("failed")
    assert (content(run)["launch"], content(run)["step"]) == ("life-2", 3)
    assert not later.is_superseded()


def test_successor_is_noticed_while_both_write(ticking: HeartbeatWriter, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "COMPARED_SECONDS", 0.2)
    later = started_in(run, "life-2", monkeypatch)
    until(lambda: later.beat("training", 3) or later.beat("saving", 3) or ticking.is_superseded())
    time.sleep(0.3)  # a write of the other that had begun
    later.beat("training", 4)
    time.sleep(0.5)
    assert (content(run)["launch"], content(run)["step"]) == ("life-2", 4)


def test_cleared_file_of_a_running_rank_is_not_a_lost_directory(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    beat, replace = HeartbeatWriter(run, 0), Path.replace

    def cleared(path: Path, target: Path) -> Path:
        clear(run, [0], with_verdict=False)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", cleared)
    beat.beat("training", 1)
    monkeypatch.setattr(Path, "replace", replace)
    beat.beat("saving", 2)
    assert content(run)["step"] == 2


def started_in(run: RunDir, launch: str, monkeypatch: pytest.MonkeyPatch) -> HeartbeatWriter:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
    beat = HeartbeatWriter(run, 0)
    time.sleep(0.01)
    return beat
