"""Surroundings that hurt: each situation by name, on a run that trains on two CPU ranks, and what must hold."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitCode
from fsdp_tune.run.directory import RunDir
from tests.chaos.surroundings import HANG_SECONDS, SHORT, can_mount, small_disk, started, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.ranks]
needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root, to mount a file system")
NOBODY = 65534
QUIET = {"training.logging_steps": 90_000}
"""No line of metrics that a disk could refuse: only heartbeats are written."""


@needs_mount
@pytest.mark.parametrize("what", ["blocks", "inodes"])
def test_disk_full_for_longer_than_the_hang_timeout_kills_no_healthy_run(what: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "size=24m,nr_inodes=400") as disk, started(disk, QUIET, name="../command") as run:
        run.until(lambda: "first step" in run.text)
        fillers = fill(disk, what)
        run.until(lambda: "no heartbeats" in run.text)
        time.sleep(3 * HANG_SECONDS)
        assert run.command.poll() is None, run.text
        for each in fillers:
            each.unlink()
        run.until(lambda: "can be written again" in run.text)
        run.send(signal.SIGTERM)
        assert run.end() == ExitCode.PREEMPTED, run.text
        assert len(steps_of(run.run)) == 1
        assert run.seconds_to_save() < 20


def fill(disk: Path, what: str) -> list[Path]:
    made: list[Path] = []
    try:
        for number in range(10_000):
            path = disk / f"filler-{number}"
            made.append(path)
            with path.open("wb") as file:
                while what == "blocks":
                    file.write(bytes(4096))
                    file.flush()
    except OSError:
        return [path for path in made if path.exists()]
    raise AssertionError("the disk took everything")


# ------------------------------------------------------------------------------------------------ limits


@pytest.mark.parametrize("descriptors", [24, 48, 96, 256])
def test_few_open_files_are_enough_or_the_limit_is_named(descriptors: int, tmp_path: Path) -> None:
    prefix = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
    with started(tmp_path, SHORT | {"training.dataloader_num_workers": 1}, prefix=prefix) as run:
        code = run.end()
    assert "Traceback" not in run.text
    if code != ExitCode.OK:
        assert code == ExitCode.FAILED, run.text
        assert f"`ulimit -n`: {descriptors}" in run.text or "Too many open files" in run.text


@needs_mount
def test_tiny_temporary_directory_and_shared_memory(tmp_path: Path) -> None:
    mounts = f"mount -t tmpfs -o size=64k tmpfs /dev/shm; mount -t tmpfs -o size=16k tmpfs {tmp_path}/small"
    (tmp_path / "small").mkdir()
    prefix = ["unshare", "--mount", "sh", "-c", f'{mounts}; exec "$@"', "sh"]
    variables = {"TMPDIR": f"{tmp_path}/small", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with started(tmp_path, SHORT | {"training.dataloader_num_workers": 1}, prefix=prefix, environment=variables) as run:
        code = run.end()
    assert "Traceback" not in run.text
    assert code == ExitCode.OK or "/dev/shm" in run.text or "No space left" in run.text, run.text


def test_user_without_rights_whose_files_nobody_else_may_read(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become another user")
    folder = tmp_path / "home"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    for parent in tmp_path.parents[:2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "sh", "-c", 'umask 077; exec "$@"', "sh"]
    variables = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HOME": str(folder / "hub"), "TMPDIR": str(folder)}
    with (
        (tmp_path / "command.log").open("ab") as log,
        started(folder, SHORT, prefix=prefix, environment=variables, stdout=log, stderr=log) as run,
    ):
        assert run.end() == ExitCode.OK, (tmp_path / "command.log").read_text()
    files = [path for path in (folder / "run").rglob("*") if not path.is_symlink()]
    assert {(path.stat().st_uid, path.stat().st_mode & 0o077) for path in files} == {(NOBODY, 0)}


@pytest.mark.parametrize("locale", ["C", "POSIX", "tr_TR.UTF-8"])
def test_locale_without_utf8_changes_nothing(locale: str, tmp_path: Path) -> None:
    variables = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = RunDir(tmp_path / "läufe-ığ")
    with started(tmp_path, SHORT | {"name": "lauf-ı", "merge.at_end": True}, run=folder, environment=variables) as run:
        assert run.end() == ExitCode.OK, run.text
    assert (folder.merged / "model.safetensors").is_file()
    assert "läufe-ığ" in run.text
