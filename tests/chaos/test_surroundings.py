"""Surroundings that hurt: each situation by name, on a run that trains on two CPU ranks, and what must
hold."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitCode
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME
from tests.chaos.draw import AGENT, COMMAND, RANK
from tests.chaos.ends import BUSY_SECONDS
from tests.chaos.surroundings import HANG_SECONDS, SHORT, can_mount, small_disk, started, steps_of
from tests.launch.links import until

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.ranks]
needs_mount = pytest.mark.skipif(not can_mount(), reason="needs root, to mount a file system")
NOBODY = 65534
QUIET = {"training.logging_steps": 90_000}
"""No line of metrics that a disk could refuse: only heartbeats are written."""
ONE_SAVE = SHORT | {"training.save_steps": 12}
"""No older checkpoint whose removal would free space."""


@needs_mount
@pytest.mark.parametrize("what", ["blocks", "inodes", "writing"])
def test_disk_that_refuses_for_longer_than_the_hang_timeout_kills_no_healthy_run(
    what: str, tmp_path: Path
) -> None:
    with (
        small_disk(tmp_path / "disk", "size=24m,nr_inodes=400") as disk,
        started(disk, QUIET, name="../command") as run,
    ):
        run.until(lambda: "first step" in run.text)
        with read_only(disk) if what == "writing" else filled(disk, what):
            run.until(lambda: "no heartbeats" in run.text)
            time.sleep(3 * HANG_SECONDS)
            assert run.command.poll() is None, run.text
        run.until(lambda: "can be written again" in run.text)
        run.send(signal.SIGTERM)
        assert run.end() == ExitCode.PREEMPTED, run.text
        assert len(steps_of(run.run)) == 1
        assert run.seconds_to_save() < 20


@needs_mount
def test_disk_that_is_full_from_the_last_save_on_does_not_hide_how_the_run_ended(tmp_path: Path) -> None:
    """The last line of the metrics may still find room in a block that is there. If not, that is a failure,
    with everything saved."""
    with (
        small_disk(tmp_path / "disk", "size=24m,nr_inodes=400") as disk,
        started(disk, ONE_SAVE, name="../command") as run,
    ):
        run.until(lambda: run.steps)
        pids = [run.process(RANK, rank).pid for rank in range(2)]
        while not (run.run.checkpoint(12) / MANIFEST_NAME).exists():
            assert run.command.poll() is None, run.text
            time.sleep(0.001)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        fill(disk, "blocks")
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        code = run.end()
        if any(run.run.rank_outcome(rank).exists() for rank in range(2)):
            pytest.skip("the ranks were faster")
    assert code == (ExitCode.OK if "ended with exit code 0 (finished)" in run.text else ExitCode.FAILED), (
        run.text
    )
    assert re.search(
        r"rank \d .* before it could report: \S+/logs cannot be written \(No space left on "
        r"device\)|could leave no outcome",
        run.text,
    )
    assert "checkpoint-12 is complete" in run.text
    assert "Traceback" not in run.text


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """As after an error of the device: nothing can be opened for writing any more. What is open already stays
    so."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@contextlib.contextmanager
def filled(disk: Path, what: str) -> Iterator[None]:
    fillers = fill(disk, what)
    yield
    for each in fillers:
        each.unlink()


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


@pytest.mark.parametrize("descriptors", [24, 96])
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
    with started(
        tmp_path, SHORT | {"training.dataloader_num_workers": 1}, prefix=prefix, environment=variables
    ) as run:
        code = run.end()
    assert "Traceback" not in run.text
    assert code == ExitCode.OK or "/dev/shm" in run.text or "No space left" in run.text, run.text


def test_user_without_rights_whose_files_nobody_else_may_read(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The user may read everything, since root's interpreter may be closed to others, and write only what is
    their own."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become another user")
    folder = Path(tempfile.mkdtemp(prefix="home-"))  # directories of pytest are closed to others
    request.addfinalizer(lambda: shutil.rmtree(folder))
    os.chown(folder, NOBODY, NOBODY)
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *reads]
    variables = {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HOME": str(folder / "hub"),
        "TMPDIR": str(folder),
    }
    prefix = [*user, "sh", "-c", 'umask 077; exec "$@"', "sh"]
    with started(folder, SHORT, prefix=prefix, environment=variables, name=str(tmp_path / "command")) as run:
        assert run.end() == ExitCode.OK, run.text
    files = [path for path in folder.rglob("*") if not path.is_symlink()]
    assert {(path.stat().st_uid, path.stat().st_mode & 0o077) for path in files} == {(NOBODY, 0)}


@pytest.mark.parametrize("locale", ["C", "tr_TR.UTF-8"])
def test_locale_without_utf8_changes_nothing(locale: str, tmp_path: Path) -> None:
    variables = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = RunDir(tmp_path / "läufe-ığ")
    with started(
        tmp_path, SHORT | {"name": "lauf-ı", "merge.at_end": True}, run=folder, environment=variables
    ) as run:
        assert run.end() == ExitCode.OK, run.text
    assert (folder.merged / "model.safetensors").is_file()
    assert "läufe-ığ" in run.text


SAVES = {"training.save_steps": 20}


def assert_continues(folder: Path, run: RunDir, name: str) -> None:
    """The next start trains on from the newest checkpoint, and a signal ends it with a save."""
    begun = steps_of(run)[-1]
    with started(folder, SAVES, "--resume", "auto", run=run, name=name) as again:
        # lines of the killed start are there before
        again.until(lambda: "first step" in again.text and again.steps[-1] > begun + 3)
        again.send(signal.SIGTERM)
        assert again.end() == ExitCode.PREEMPTED, again.text
        assert f"checkpoint-{begun}" in again.text
        assert steps_of(run)[-1] > begun


def test_sigterm_with_a_stopped_rank_ends_by_the_hang_timeout(tmp_path: Path) -> None:
    """The other rank waits for it, so that nothing can be saved; the next start continues from the last
    checkpoint."""
    with started(tmp_path, SAVES) as run:
        run.until(lambda: steps_of(run.run))
        stopped = run.process(RANK, 1)
        os.kill(stopped.pid, signal.SIGSTOP)
        run.send(signal.SIGTERM)
        code = run.end()
        assert code == ExitCode.LOST_RANK, run.text
        assert time.monotonic() - run.signalled_at < HANG_SECONDS + 15 + BUSY_SECONDS
        assert re.search(rf"no progress for .*: rank {stopped.rank} .*stopped \(SIGSTOP\)", run.text), (
            run.text
        )
    assert_continues(tmp_path, run.run, "again")


@pytest.mark.parametrize("victim", [COMMAND, AGENT])
def test_kill_with_a_stopped_rank_leaves_no_process(victim: str, tmp_path: Path) -> None:
    with started(tmp_path) as run:
        run.until_step(10)
        os.kill(run.process(RANK, 0).pid, signal.SIGSTOP)
        os.kill(run.process(victim).pid, signal.SIGKILL)
        code = run.end()
    assert code == (-signal.SIGKILL if victim == COMMAND else ExitCode.LOST_RANK), run.text


def test_rank_that_the_kernel_ends_for_its_memory_is_named(tmp_path: Path) -> None:
    """A memory cgroup, in which another process takes what is left, and the kernel prefers to end the
    rank."""
    group = Path("/sys/fs/cgroup/memory") / f"fsdp-tune-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("needs a memory cgroup (version 1) that can be written")
    hog = f"""
open('{group}/cgroup.procs', 'w').write('0')
taken = bytearray(512 << 20)
__import__('time').sleep(60)
"""
    try:
        with started(
            tmp_path, prefix=["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        ) as run:
            run.until_step(10)
            Path(f"/proc/{run.process(RANK, 1).pid}/oom_score_adj").write_text("1000")
            used = int((group / "memory.usage_in_bytes").read_text())
            (group / "memory.limit_in_bytes").write_text(str(used + (64 << 20)))
            with subprocess.Popen([sys.executable, "-c", hog]) as eater:
                code = run.end()
                eater.kill()
            assert code == ExitCode.LOST_RANK, run.text
            assert re.search(r"rank \d was killed by SIGKILL at step", run.text), run.text
            assert "out of host memory? The kernel then kills a process: see `dmesg`" in run.text
    finally:
        until(lambda: not (group / "cgroup.procs").read_text().strip(), seconds=30)
        group.rmdir()


def test_run_that_was_copied_while_it_trained_and_one_that_was_moved_continue(tmp_path: Path) -> None:
    run, copy, moved = (RunDir(tmp_path / name) for name in ("run", "copy", "moved"))
    with started(tmp_path, SAVES) as first:
        first.until(lambda: steps_of(run))
        shutil.copytree(run.path, copy.path, ignore=shutil.ignore_patterns(".*", "*.tmp"))
        assert_continues(tmp_path, copy, "copy")
        assert first.command.poll() is None, "the copy has a lock of its own"
        first.send(signal.SIGKILL)
        first.end()
    run.path.rename(moved.path)
    assert_continues(tmp_path, moved, "moved")
    assert not run.path.exists()


@pytest.mark.parametrize("in_place", ["nothing", "another directory"])
def test_run_directory_that_is_moved_while_it_trains_has_the_work(in_place: str, tmp_path: Path) -> None:
    run, moved = RunDir(tmp_path / "run"), RunDir(tmp_path / "moved")
    with started(tmp_path, SAVES) as first:
        first.until(lambda: steps_of(run))
        run.path.rename(moved.path)
        if in_place == "another directory":
            run.logs.mkdir(parents=True)
        code = first.end()
    assert code == ExitCode.FAILED, first.text
    assert (
        f"the run directory is now {moved.path}, and step {steps_of(moved)[-1]} is saved there" in first.text
    )
    assert f"`--set output_dir={moved.path}`" in first.text
    assert [path for path in run.path.rglob("*") if path.is_file()] == []
    shutil.rmtree(run.path, ignore_errors=True)
    assert_continues(tmp_path, moved, "again")


def test_two_commands_that_start_in_one_directory_at_once_are_one_run(tmp_path: Path) -> None:
    with started(tmp_path, SHORT, name="one") as one, started(tmp_path, SHORT, name="two") as two:
        codes = [one.end(), two.end()]
    texts = {code: each.text for code, each in zip(codes, (one, two), strict=True)}
    assert sorted(codes) == [ExitCode.OK, ExitCode.USAGE], texts
    assert str(tmp_path / "run") in texts[ExitCode.USAGE]
    assert one.steps == list(range(1, 13))
