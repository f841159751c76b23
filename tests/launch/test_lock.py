from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsdp_tune.errors import FsdpTuneError
from fsdp_tune.launch.lock import is_held, locked, read_owner
from fsdp_tune.run_dir import RunDir

HOLDER = """
import sys, time
from pathlib import Path
from fsdp_tune.launch.lock import locked
from fsdp_tune.run_dir import RunDir
with locked(RunDir(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def held(run: RunDir) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    yield holder
    holder.kill()
    holder.wait()
    holder.stdout.close()


def test_a_second_command_is_told_who_holds_the_directory(run: RunDir, held: subprocess.Popen[str]) -> None:
    with pytest.raises(FsdpTuneError, match=f"in use by pid {held.pid} on") as caught, locked(run):
        pass
    assert caught.value.exit_code == 2
    assert not any("remove" in way for way in caught.value.problems[0].ways_out)  # the kernel says that its owner lives
    assert is_held(run)


def test_the_lock_of_a_dead_owner_is_taken_over_with_a_notice(run: RunDir, held: subprocess.Popen[str]) -> None:
    held.kill()
    held.wait()
    assert not is_held(run)
    with locked(run) as notices:
        assert [notice.code for notice in notices] == ["stale-lock"]
        assert str(held.pid) in notices[0].message


def test_a_pid_that_was_reused_is_not_taken_for_the_owner(run: RunDir) -> None:
    run.lock.write_text(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "since": 1.0}))
    with locked(run) as notices:
        assert [notice.code for notice in notices] == ["stale-lock"]


def test_a_run_on_another_machine_counts_as_live_while_its_ranks_give_signs(run: RunDir) -> None:
    run.lock.write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": 1.0}))
    run.logs.mkdir()
    run.rank_heartbeat(0).write_text("{}")
    with pytest.raises(FsdpTuneError, match="pid 1 on elsewhere") as caught, locked(run):
        pass
    assert any("remove" in way for way in caught.value.problems[0].ways_out)
    os.utime(run.rank_heartbeat(0), (time.time() - 3600, time.time() - 3600))
    with locked(run) as notices:
        assert len(notices) == 1


def test_a_lock_that_was_given_back_leaves_no_owner(run: RunDir) -> None:
    with locked(run):
        assert read_owner(run) is not None
    assert read_owner(run) is None
    with locked(run) as notices:
        assert notices == []


def test_a_full_disk_is_told_with_the_name_of_the_lock(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"run\.lock"), locked(run):
        pass


def test_a_link_in_place_of_the_lock_is_refused(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    run.lock.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic link"), locked(run):
        pass
    assert (tmp_path / "precious").read_text() == "x"
