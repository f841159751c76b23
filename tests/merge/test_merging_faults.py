"""Kills, full disks and concurrent changes during a merge: the output is absent, old, or complete."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from fsdp_tune.core.atomic import Disk, stage_lock
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.ownership import announced, live_owner
from fsdp_tune.merge import manifest_check
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.merge.read.reader import SourceFiles
from tests.conftest import REPOSITORY
from tests.faults.checks import in_child
from tests.merge.checkpoints import SHARDS, contents, make_run, merged_tensors, same_bits, save_dcp

STATE = {f"layer.{index}.weight": torch.randn(50, 40) for index in range(3)}
MANY = {f"layer.{index}.weight": torch.randn(50, 40) for index in range(30)}
OPTIONS = MergeOptions(dtype="keep", max_shard_bytes=17_000)
LARGEST_FILE_BYTES = 4_096 + 2 * 8_000  # a page of header, two tensors
OPERATIONS = (
    "open",
    "open_direct",
    "write",
    "fsync",
    "mkdir",
    "rename",
    "replace",
    "unlink",
    "rmtree",
    "fsync_dir",
)
KILLED = 77


def break_operation(patch: pytest.MonkeyPatch, number: int, broken: Callable[[], object]) -> None:
    """Make the `number`-th operation of the disk call `broken` instead."""
    count = 0

    def broken_at_its_turn(original: Callable[..., object]) -> Callable[..., object]:
        def counted(self: Disk, *arguments: object, **options: object) -> object:
            nonlocal count
            count += 1
            if count == number:
                broken()
            return original(self, *arguments, **options)

        return counted

    for name in OPERATIONS:
        patch.setattr(Disk, name, broken_at_its_turn(getattr(Disk, name)))


def kill() -> None:
    os._exit(KILLED)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed_at_operation(number: int, run: Path, options: MergeOptions) -> bool:
    """Merge in a process that ends at its `number`-th operation. Returns False if it has fewer."""

    def merge_in_child() -> None:
        break_operation(pytest.MonkeyPatch(), number, kill)
        merge_checkpoint(run, options)

    code = in_child(merge_in_child)
    assert code in (0, KILLED)
    return code == KILLED


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", {1: STATE})


def whole(folder: Path) -> bool:
    """Whether the output is all that a merge writes."""
    return (folder / "merge.json").is_file() and merged_tensors(folder).keys() == STATE.keys()


EVERY = pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
"""Of how many operations one is the last."""


@EVERY
def test_after_any_last_operation_the_output_is_absent_or_complete(run, every):
    output = run / "merged"
    for number in itertools.count(1, every):
        shutil.rmtree(output, ignore_errors=True)
        was_killed = killed_at_operation(number, run, OPTIONS)
        assert not output.exists() or whole(output), number
        if not was_killed:
            break
    assert number > 15
    assert merge_checkpoint(run, MergeOptions(dtype="keep", overwrite=True)).output == output
    assert not list(run.glob(".merged*"))


def test_full_disk_at_any_operation_is_one_error_and_leaves_nothing_partial(run, monkeypatch):
    output = run / "merged"
    for number in itertools.count(1):
        shutil.rmtree(output, ignore_errors=True)
        with monkeypatch.context() as patch:
            break_operation(patch, number, disk_full)
            try:
                merge_checkpoint(run, OPTIONS)
            except FsdpTuneError:
                pass
            else:
                break
        assert not output.exists() or whole(output), number
        assert not list(run.glob(".merged*")), number
    assert number > 15


@EVERY
def test_killed_replacement_keeps_the_old_or_has_the_new(run, tmp_path, every):
    output = run / "merged"
    merge_checkpoint(run, MergeOptions(dtype="keep"))
    old = contents(output)
    shutil.copytree(output, tmp_path / "old")
    for number in itertools.count(1, every):
        if not killed_at_operation(number, run, MergeOptions(dtype="bf16", overwrite=True)):
            break
        if output.exists():
            assert contents(output) == old or {value.dtype for value in merged_tensors(output).values()} == {
                torch.bfloat16
            }, number
        else:  # between the two renames: the old one is beside it, complete, and the next merge restores it
            (aside,) = run.glob(".merged.old.stage-*")
            assert contents(aside) == old
        for path in (output, *run.glob(".merged*")):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.copytree(tmp_path / "old", output)
    assert number > 15


def test_output_interrupted_between_renames_is_restored(run):
    merge_checkpoint(run, MergeOptions(dtype="keep"))
    old = contents(run / "merged")
    (run / "merged").rename(run / ".merged.old.stage-4000000")
    with pytest.raises(FsdpTuneError, match="the output exists"):
        merge_checkpoint(run, MergeOptions(dtype="keep"))
    assert contents(run / "merged") == old


def leave_stage(run: Path, number: int, *, age_seconds: float = 0.0, **owner: object) -> Path:
    """Leave the stage of a merge of this process, except for what `owner` changes; its last sign of life is
    so long ago."""
    stage = run / f".merged.stage-{number}"
    stage.mkdir()
    (stage / "model.safetensors").write_bytes(b"half")
    lock = stage_lock(stage)
    with announced(lock):
        record = json.loads(lock.read_bytes())
    lock.write_text(json.dumps(record | owner))
    moment = time.time() - age_seconds
    os.utime(lock, (moment, moment))
    return stage


ELSEWHERE = {"host": "elsewhere", "kernel": "another"}


def test_stage_of_live_merge_is_kept(run):
    """On this machine by its process, on another one until 300 s after its last sign of life."""
    live = [leave_stage(run, 1), leave_stage(run, 2, age_seconds=200, **ELSEWHERE)]
    dead = [
        leave_stage(run, 3, started="1"),
        leave_stage(run, 4, age_seconds=400, **ELSEWHERE),
        run / ".merged.stage-5",
    ]
    dead[-1].mkdir()
    with stage_lock(live[0]).open():  # as a merge holds it
        result = merge_checkpoint(run, OPTIONS)
    assert [stage.exists() and stage_lock(stage).exists() for stage in live] == [True, True]
    assert not [stage for stage in dead if stage.exists() or stage_lock(stage).exists()]
    assert sum("unfinished output" in notice.message for notice in result.notices) == len(dead)


def test_old_output_of_live_merge_is_kept(run):
    merge_checkpoint(run, OPTIONS)
    stage = leave_stage(run, 1, **ELSEWHERE)
    aside = run / ".merged.old.stage-1"
    (run / "merged").rename(aside)
    merge_checkpoint(run, OPTIONS)
    assert aside.exists()
    assert stage.exists()


def test_merge_holds_its_lock_until_output_is_published(run, monkeypatch):
    seen: list[bool] = []
    rename = Disk.rename

    def look(self: Disk, source: Path, target: Path) -> None:
        seen.append(live_owner(stage_lock(source)) is not None)
        rename(self, source, target)

    monkeypatch.setattr(Disk, "rename", look)
    merge_checkpoint(run, OPTIONS)
    assert seen == [True]
    assert not list(run.glob(".merged*"))


def test_file_size_limit_ends_in_one_error_and_nothing_left(run):
    def limited(limit_bytes: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
        merge_checkpoint(run, OPTIONS)

    for limit_bytes in (1, 100, 4_096, 8_000, 13_000, LARGEST_FILE_BYTES - 1, LARGEST_FILE_BYTES):
        is_enough = limit_bytes == LARGEST_FILE_BYTES
        assert in_child(lambda limit_bytes=limit_bytes: limited(limit_bytes)) == (0 if is_enough else 1)
        assert (run / "merged").exists() == is_enough
        assert not list(run.glob(".merged*"))


@pytest.mark.parametrize(
    ("free_bytes", "free_files", "message"),
    [
        (10_000, 10**6, r"needs .*; 9\.77 KiB are free"),
        (10**12, 2, r"has \d+ files, and the disk has room for 2 more files"),
    ],
)
def test_too_little_space_is_refused_before_a_byte_is_written(
    run, monkeypatch, free_bytes, free_files, message
):
    disk = SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_favail=free_files, f_files=10**6)
    monkeypatch.setattr(os, "statvfs", lambda _: disk)
    monkeypatch.setattr(Disk, "mkdir", lambda *_: pytest.fail("something was written"))
    with pytest.raises(FsdpTuneError, match=message) as caught:
        merge_checkpoint(run, OPTIONS)
    assert caught.value.exit_code == 1


def test_a_small_model_needs_little_space(run, monkeypatch):
    """What is needed is computed from the sizes of the files, for an output of some hundred kilobytes too."""
    monkeypatch.setattr(
        os, "statvfs", lambda _: SimpleNamespace(f_bavail=4 << 20, f_frsize=1, f_favail=50, f_files=10**6)
    )
    assert merge_checkpoint(run, OPTIONS).files


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_read_only_destination_is_one_error(run, monkeypatch, number):
    def refuse(self: Disk, path: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Disk, "mkdir", refuse)
    with pytest.raises(FsdpTuneError, match="cannot be written") as caught:
        merge_checkpoint(run, OPTIONS)
    assert caught.value.exit_code == 1


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, as a container's volume."""
    path = tmp_path / "volume"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=100m,mode=755", "none", str(path)],
        capture_output=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"no file system may be mounted here: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_merge_into_a_mount_point_is_written_in_place_and_replaced(run, volume):
    (volume / "lost+found").mkdir()
    options = MergeOptions(output=volume, dtype="keep", max_shard_bytes=17_000)
    merge_checkpoint(run, options)
    assert merged_tensors(volume).keys() == STATE.keys()
    with pytest.raises(FsdpTuneError, match="the output exists"):
        merge_checkpoint(run, options)
    merge_checkpoint(run, dataclasses.replace(options, overwrite=True, max_shard_bytes=10**9))
    assert merged_tensors(volume).keys() == STATE.keys()
    assert not [path.name for path in volume.iterdir() if path.name.startswith(".") or "-of-" in path.name]


def test_free_space_is_measured_at_the_destination(run, volume):
    subprocess.run(["mount", "-o", "remount,size=16k", str(volume)], check=True)
    with pytest.raises(FsdpTuneError, match=r"needs .* are free"):
        merge_checkpoint(run, MergeOptions(output=volume, dtype="keep"))
    assert list(volume.iterdir()) == []


def test_output_that_cannot_be_written_is_refused_before_anything_is_read(run, volume, monkeypatch):
    subprocess.run(["mount", "-o", "remount,ro", str(volume)], check=True)
    monkeypatch.setattr(
        "fsdp_tune.merge.merging.read_contents", lambda *_, **__: pytest.fail("the source was read")
    )
    for output in (volume, volume / "out"):
        with pytest.raises(FsdpTuneError, match="read-only") as caught:
            merge_checkpoint(run, MergeOptions(output=output, dtype="keep"))
        assert caught.value.exit_code == 1


def test_output_below_a_file_is_one_error(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FsdpTuneError, match="cannot be written"):
        merge_checkpoint(run, MergeOptions(output=tmp_path / "file" / "out"))


class Interrupting:
    """A bar that does something once the first bytes are through."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action

    def __call__(self, label: str, total: int | None, unit: str) -> Interrupting:
        return self

    def __enter__(self) -> Interrupting:
        return self

    def __exit__(self, *_: object) -> None: ...

    def advance(self, n: int = 1) -> None:
        action, self.action = self.action, lambda: None
        action()


def test_thread_error_ends_merge_cleanly(run):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_checkpoint(run, OPTIONS, Interrupting(interrupt))
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-1", "recipe.json", "recipe.yaml"]


def test_source_rotated_during_merge_is_merged_completely(tmp_path):
    """Every file is opened before the first byte is written, and what is open stays readable; most is read
    after that byte."""
    save_dcp({"model": MANY}, tmp_path / "source" / SHARDS, single_file_per_rank=False)
    options = MergeOptions(output=tmp_path / "out", max_shard_bytes=OPTIONS.max_shard_bytes)
    merge_checkpoint(tmp_path / "source", options, Interrupting(lambda: shutil.rmtree(tmp_path / "source")))
    merged = merged_tensors(tmp_path / "out")
    assert all(same_bits(merged[name], MANY[name]) for name in MANY)


def test_checkpoint_that_its_run_deletes_during_the_merge_is_reported_as_rotated(run, monkeypatch):
    """The digests read a few bytes at a time and open the file by its name again, so that no file of a
    thousand stays open."""
    monkeypatch.setattr(manifest_check, "_TURN_BYTES", 64)
    monkeypatch.setattr(manifest_check, "_READ_BYTES", 64)
    rotated = threading.Event()
    turn = manifest_check.ManifestCheck._turn

    def after_rotation(
        self: manifest_check.ManifestCheck, one: manifest_check._Running, buffer: memoryview
    ) -> bool:
        if one.position:
            rotated.wait(30)
        return turn(self, one, buffer)

    def rotate_away() -> None:
        shutil.rmtree(run / "checkpoint-1")
        rotated.set()

    monkeypatch.setattr(manifest_check.ManifestCheck, "_turn", after_rotation)
    with pytest.raises(FsdpTuneError, match="checkpoint-1 was deleted while it was being merged") as caught:
        merge_checkpoint(run, OPTIONS, Interrupting(rotate_away))
    assert [problem.code for problem in caught.value.problems] == ["merge-rotated-away"]
    assert caught.value.exit_code == 1
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_source_of_too_many_files_that_is_rotated_away_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setitem(SourceFiles.__init__.__kwdefaults__, "limit", 2)
    save_dcp({"model": MANY}, tmp_path / "source" / SHARDS, single_file_per_rank=False)
    with pytest.raises(FsdpTuneError) as caught:
        merge_checkpoint(
            tmp_path / "source",
            MergeOptions(output=tmp_path / "out"),
            Interrupting(lambda: shutil.rmtree(tmp_path / "source")),
        )
    assert caught.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_source_of_more_files_than_may_be_open_is_merged(tmp_path, monkeypatch):
    monkeypatch.setitem(SourceFiles.__init__.__kwdefaults__, "limit", 2)
    save_dcp({"model": STATE}, tmp_path / "source" / SHARDS, single_file_per_rank=False)
    merge_checkpoint(tmp_path / "source", MergeOptions(output=tmp_path / "out"))
    assert merged_tensors(tmp_path / "out").keys() == STATE.keys()


SLOW_MERGE = """
import os, sys, time
from pathlib import Path
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.merge.merge_options import MergeOptions
class SlowBar:
    def __call__(self, label, total, unit): return self
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def advance(self, count=1):
        os.write(1, b"w")
        time.sleep(0.2)
merge_checkpoint(Path(sys.argv[1]), MergeOptions(output=Path(sys.argv[2])), SlowBar())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signal_leaves_no_partial_model(tmp_path, number):
    source, output = save_dcp({"model": MANY}, tmp_path / "source" / SHARDS), tmp_path / "out"
    command = [sys.executable, "-c", SLOW_MERGE, str(source), str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout.read(1) == b"w"
        assert list(tmp_path.glob(".out.stage-*/model*"))
        child.send_signal(number)
    assert not output.exists() or merged_tensors(output).keys() == MANY.keys()
    merge_checkpoint(source, MergeOptions(output=output, overwrite=True))
    assert merged_tensors(output).keys() == MANY.keys()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


CHECKING = """
import sys, time
from pathlib import Path
from fsdp_tune.merge.load_check import Child
with Child("forward", Path(sys.argv[1])):
    print("started", flush=True)
    time.sleep(60)
"""
SLOW_CHILD = """
import sys, time
if "fsdp_tune.merge.loaded" in sys.orig_argv:
    time.sleep(60)
"""


def test_process_that_loads_the_output_ends_with_a_killed_merge(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SLOW_CHILD)
    env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{tmp_path}"}
    with subprocess.Popen(
        [sys.executable, "-c", CHECKING, str(tmp_path)], env=env, stdout=subprocess.PIPE, text=True
    ) as merge:
        assert merge.stdout.readline() == "started\n"
        (child,) = psutil.Process(merge.pid).children()
        while "-m" not in child.cmdline():
            time.sleep(0.01)
        merge.kill()
    assert psutil.wait_procs([child], timeout=10)[1] == []
