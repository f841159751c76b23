"""Ownership of a run directory, with and without file locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core import ownership
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.ownership import HeldError, live_owner, owned, read_owner, temporary_directory
from fsdp_tune.run.directory import RunDir, locked
from tests.conftest import REPOSITORY

HOLDER = """
import fcntl, os, sys, time
from pathlib import Path
from fsdp_tune.run.directory import locked
from fsdp_tune.run.directory import RunDir
if len(sys.argv) > 2:
    def without_locks(*_):
        raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))
    fcntl.flock = without_locks
with locked(RunDir(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""
LOCKLESS = [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP]
WITHOUT_LOCKS = pytest.mark.parametrize("lockless", LOCKLESS, ids=[errno.errorcode[number] for number in LOCKLESS], indirect=True)
ONE_WITHOUT_LOCKS = pytest.mark.parametrize("lockless", [errno.ENOSYS], indirect=True)
FILE_SYSTEMS = pytest.mark.parametrize("lockless", [None, errno.ENOSYS], ids=["with locks", "without locks"], indirect=True)


@pytest.fixture
def lockless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """A file system on which flock fails with the error number of the parameter; None: one with locks."""
    number: int | None = request.param

    def fail(*_: object) -> None:
        assert number is not None
        raise OSError(number, os.strerror(number))

    if number is not None:
        monkeypatch.setattr(fcntl, "flock", fail)
    return number


def hold(run: RunDir, lockless: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, str(run.path), *([str(lockless)] if lockless else [])]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


@pytest.fixture
def held(run: RunDir) -> Iterator[subprocess.Popen[str]]:
    with hold(run) as holder:
        yield holder
        holder.kill()


def foreign(run: RunDir, *, age_seconds: float = 0.0, **values: Any) -> None:
    """Leave the record of an owner on another machine, refreshed so long ago."""
    record = {"host": "elsewhere", "pid": 1, "since": 1.0, "claim": "c", "kernel": "k", "namespace": "n", "started": "1"}
    run.lock.write_text(json.dumps(record | values))
    moment = time.time() - age_seconds
    os.utime(run.lock, (moment, moment))


def test_second_command_error_names_the_owner(run: RunDir, held: subprocess.Popen[str]) -> None:
    with pytest.raises(FsdpTuneError, match=f"in use by pid {held.pid} on") as caught, locked(run):
        pass
    assert caught.value.exit_code == 2
    assert not any("remove" in way for way in caught.value.problems[0].ways_out)  # the kernel vouches for its owner
    assert live_owner(run.lock) is not None


def test_lock_of_a_dead_owner_is_taken_over_with_a_notice(run: RunDir, held: subprocess.Popen[str]) -> None:
    held.kill()
    held.wait()
    assert live_owner(run.lock) is None
    with locked(run) as notices:
        assert [notice.code for notice in notices] == ["stale-lock"]
        assert str(held.pid) in notices[0].message


def test_copy_of_a_directory_in_use_is_free_for_another_command(run: RunDir, held: subprocess.Popen[str], tmp_path: Path) -> None:
    """`cp -r` of a run that trains: the record in the copy names a process that lives, and that has the original open."""
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    assert read_owner(copy.lock) == live_owner(run.lock)
    assert live_owner(copy.lock) is None
    with locked(copy):
        pass
    assert held.poll() is None


@FILE_SYSTEMS
def test_reused_pid_is_not_the_owner(run: RunDir, lockless: int | None) -> None:
    with locked(run):
        record = json.loads(run.lock.read_bytes())
    run.lock.write_text(json.dumps(record | {"started": "1"}))
    assert live_owner(run.lock) is None
    with locked(run) as notices:
        assert "stale-lock" in [notice.code for notice in notices]


@FILE_SYSTEMS
def test_owner_on_another_machine_is_live_until_300_seconds_after_its_last_sign(run: RunDir, lockless: int | None) -> None:
    foreign(run, age_seconds=200.0)
    assert live_owner(run.lock) is not None
    with pytest.raises(FsdpTuneError, match="pid 1 on elsewhere") as caught, locked(run):
        pass
    assert any(f"remove {run.lock}" in way for way in caught.value.problems[0].ways_out)
    foreign(run, age_seconds=400.0)
    assert live_owner(run.lock) is None
    with locked(run) as notices:
        assert "stale-lock" in [notice.code for notice in notices]


@FILE_SYSTEMS
def test_clock_skew_to_the_file_server_does_not_break_the_lock(run: RunDir, lockless: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign(run)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with pytest.raises(FsdpTuneError, match="pid 1 on elsewhere"), locked(run):
        pass


def test_containers_on_one_machine_share_kernel_locks(run: RunDir) -> None:
    """A container that was restarted has pids and a host name of its own; its machine's locks still tell that the owner is dead."""
    with locked(run):
        record = json.loads(run.lock.read_bytes())
    foreign(run, kernel=record["kernel"])
    with locked(run) as notices:
        assert [notice.code for notice in notices] == ["stale-lock"]


@FILE_SYSTEMS
def test_owner_refreshes_its_heartbeat(run: RunDir, lockless: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "REFRESH_SECONDS", 0.01)
    with locked(run):
        os.utime(run.lock, (1.0, 1.0))
        deadline = time.monotonic() + 10.0
        while run.lock.stat().st_mtime < 2.0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@FILE_SYSTEMS
def test_released_lock_has_no_owner(run: RunDir, lockless: int | None) -> None:
    with locked(run):
        assert live_owner(run.lock) is not None
    assert read_owner(run.lock) is None
    with locked(run) as notices:
        assert "stale-lock" not in [notice.code for notice in notices]


def test_no_two_claims_share_an_id(run: RunDir) -> None:
    with locked(run):
        first = read_owner(run.lock)
    with locked(run):
        second = read_owner(run.lock)
    assert first is not None
    assert second is not None
    assert first.claim != second.claim != ""


@pytest.mark.parametrize("host", ["this machine", "another machine"])
def test_lock_query_does_not_acquire(run: RunDir, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """A command that starts during a query is not refused: the query takes no lock, and writes and creates nothing."""
    foreign(run)
    if host == "this machine":
        run.lock.write_text(json.dumps(asdict(ownership.this_owner())))
    monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("the query takes a lock"))
    opened = run.lock.read_bytes(), run.lock.stat().st_mtime_ns, list(run.path.iterdir())

    with run.lock.open("rb"):  # as its owner has it
        assert live_owner(run.lock) is not None

    assert (run.lock.read_bytes(), run.lock.stat().st_mtime_ns, list(run.path.iterdir())) == opened


@WITHOUT_LOCKS
def test_without_file_locks_a_second_command_is_refused_too(run: RunDir, lockless: int | None) -> None:
    with hold(run, lockless) as holder:
        with pytest.raises(FsdpTuneError, match=f"in use by pid {holder.pid} on") as caught, locked(run):
            pass
        assert caught.value.exit_code == 2
        holder.kill()
    with locked(run) as notices:
        assert [notice.code for notice in notices] == ["no-file-locks", "stale-lock"]
    assert list(run.path.iterdir()) == []


@WITHOUT_LOCKS
def test_without_file_locks_a_file_that_is_about_to_be_written_is_respected(run: RunDir, lockless: int | None) -> None:
    run.lock.touch()
    with pytest.raises(FsdpTuneError, match="in use by another command"), locked(run):
        pass
    os.utime(run.lock, (time.time() - 60, time.time() - 60))
    with locked(run):
        pass


@ONE_WITHOUT_LOCKS
def test_without_file_locks_one_process_replaces_a_dead_owner(run: RunDir, lockless: int | None) -> None:
    for _ in range(10):
        foreign(run, age_seconds=400.0)
        together, winners = threading.Barrier(8), list[str]()
        with ExitStack() as stack:

            def claim(stack: ExitStack = stack, together: threading.Barrier = together, winners: list[str] = winners) -> None:
                together.wait()
                with suppress(HeldError):
                    winners.append(stack.enter_context(owned(run.lock)).owner.claim)

            racers = [threading.Thread(target=claim) for _ in range(8)]
            for racer in racers:
                racer.start()
            for racer in racers:
                racer.join()
            owner = read_owner(run.lock)
            assert [owner.claim if owner else None] == winners
        assert list(run.path.iterdir()) == []


@ONE_WITHOUT_LOCKS
def test_interrupted_takeover_is_completed(run: RunDir, lockless: int | None) -> None:
    foreign(run, age_seconds=400.0)
    guard = run.path / ".run.lock.taking"
    guard.touch()
    with pytest.raises(FsdpTuneError, match="in use"), locked(run):
        pass
    os.utime(guard, (time.time() - 400, time.time() - 400))
    with locked(run):
        assert not guard.exists()


@FILE_SYSTEMS
def test_full_disk_error_names_the_lock_file(run: RunDir, lockless: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match=r"run\.lock"), locked(run):
            pass
    with locked(run):
        pass


@FILE_SYSTEMS
def test_link_instead_of_the_lock_is_refused(run: RunDir, tmp_path: Path, lockless: int | None) -> None:
    (tmp_path / "precious").write_text("x")
    run.lock.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"), locked(run):
        pass
    assert (tmp_path / "precious").read_text() == "x"


def test_temporary_directory_of_a_killed_process_is_removed_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hold = "import time\nfrom fsdp_tune.core.ownership import temporary_directory\n"
    hold += "with temporary_directory('x-') as path:\n print(path, flush=True)\n time.sleep(60)"
    holders: list[subprocess.Popen[str]] = []
    for _ in range(2):
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        holders.append(subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY))
    paths = [Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout is not None]
    try:
        (paths[0] / "model").mkdir()
        holders[0].kill()
        holders[0].wait()
        own = tmp_path / "fsdp-tune-of-a-user"  # a name of the same form, without a record
        own.mkdir()
        elsewhere = tmp_path / "elsewhere"
        paths[0].rename(elsewhere)
        paths[0].symlink_to(elsewhere)
        with temporary_directory("x-") as path:
            assert set(tmp_path.iterdir()) == {path, paths[0], paths[1], own, elsewhere}, "a link is not followed"
        paths[0].unlink()
        elsewhere.rename(paths[0])
        with temporary_directory("x-") as path:
            assert set(tmp_path.iterdir()) == {path, paths[1], own}, "the live owner's directory is kept"
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


@pytest.mark.parametrize("is_kept", [False, True])
def test_temporary_directory_is_kept_on_demand_and_then_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with suppress(ZeroDivisionError), temporary_directory("rehearsal-", keep=lambda: is_kept) as path:
        raise ZeroDivisionError
    with temporary_directory():
        assert path.exists() is is_kept


def test_copy_by_hard_links_shares_no_file_that_is_appended_to(tmp_path: Path) -> None:
    """`cp -al` makes a copy that takes no space, and `train --resume` in it appends events and lines."""
    run, copy = RunDir(tmp_path / "run"), RunDir(tmp_path / "copy")
    run.logs.mkdir(parents=True)
    names = ["metrics.jsonl", "logs/launcher.log", "bad_rows-0.jsonl", "recipe.json"]
    for name in names:
        (run.path / name).write_text(name)
    (run.path / "logs" / "train.log").symlink_to("launcher.log")
    run.rank_log(0).write_text("x")
    run.rank_log(0).chmod(0o600)
    shutil.copytree(run.path, copy.path, copy_function=os.link, symlinks=True)
    with locked(copy):
        for name in (*names[:3], "logs/rank-0000.log"):
            with open(copy.path / name, "a") as file:
                file.write(" of the copy")
    assert [(run.path / name).read_text() for name in names] == names
    assert (copy.metrics_jsonl.read_text(), run.rank_log(0).read_text()) == ("metrics.jsonl of the copy", "x")
    assert copy.rank_log(0).stat().st_mode & 0o777 == 0o600
    assert (copy.path / "recipe.json").samefile(run.path / "recipe.json"), "replaced when it is written"
    assert sorted(path.name for path in copy.logs.iterdir()) == ["launcher.log", "rank-0000.log", "train.log"]
