"""Runs that are sent to a mirror, and a command elsewhere that claims it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from fsdp_tune.cluster.mirror import writer
from fsdp_tune.cluster.mirror.download import fetch_checkpoint
from fsdp_tune.cluster.mirror.remote_run import MirrorIdentity, RemoteCheckpoint, RemoteRun
from fsdp_tune.cluster.mirror.send import follow
from fsdp_tune.cluster.mirror.sender import Sender
from fsdp_tune.cluster.mirror.writer import Writer
from fsdp_tune.core.atomic import Disk
from fsdp_tune.core.ownership import this_owner
from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, RunDir, inspect_checkpoint
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from fsdp_tune.run.mirror_state import MirrorState, state_path
from fsdp_tune.run.remote_files import RemoteDirectory


class Crash(BaseException):
    """The process that sends is killed here. No claim of it is kept any longer, as this one would know of its
    own."""

    def __init__(self) -> None:
        writer._KEPT.clear()


def make_run(path: Path, identity: str = "one") -> RunDir:
    run = RunDir(path)
    run.logs.mkdir(parents=True)
    run.model.mkdir()
    (run.model / "config.json").write_text("{}")
    run.recipe_json.write_text('{"name": "r"}')
    run.metrics_jsonl.write_text('{"step": 1, "loss": 2.0}\n{"torn')
    MirrorIdentity(identity).write(run.mirror_json)
    return run


def save(run: RunDir, step: int, *, seed: int = 0, ranks: int = 2, size: int = 1) -> Path:
    """Write a complete checkpoint, whose contents depend on step, seed and rank."""
    folder = run.checkpoint(step)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "shards").mkdir(parents=True)
    for rank in range(ranks):
        (folder / "shards" / f"__{rank}_0.distcp").write_bytes(bytes([step % 256, seed, rank]) * 700 * size)
    (folder / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    entries = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, entries, {"step": step}).to_json())
    return folder


def send_all(run: RunDir, remote: RemoteRun, *, keep: int | None = 2, start: int | None = 0) -> bool:
    sender = Sender(run, RemoteRun(*remote.url.rsplit("/", 1)), keep=keep)
    try:
        return follow(sender, lambda: True, start, lambda _: None)
    finally:
        with suppress(Crash):
            sender.close()


def state_of(run: RunDir) -> MirrorState:
    """What the process that sends has reported last."""
    state = MirrorState.read(state_path(run, 0))
    assert state is not None
    return state


def remote_checkpoint(remote: RemoteRun, step: int) -> RemoteCheckpoint:
    found = remote.checkpoint(step)
    assert isinstance(found, RemoteCheckpoint), found
    return found


def complete_steps(remote: RemoteRun) -> list[int]:
    return remote.complete_steps(remote.directory.list())


def complete_and_verified(remote: RemoteRun, target: Path) -> list[int]:
    """Download each checkpoint that a reader sees as complete, and check every byte. Returns their steps."""
    steps = complete_steps(remote)
    for step in steps:
        path = fetch_checkpoint(
            remote, remote_checkpoint(remote, step), RunDir(target / f"{step}" / "run"), lambda _: None
        )
        assert isinstance(inspect_checkpoint(path, digests=True), Checkpoint)
    shutil.rmtree(target, ignore_errors=True)
    return steps


def without_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "fsync", lambda _, file: file.flush())
    monkeypatch.setattr(Disk, "fsync_dir", lambda *_: None)


class Elsewhere(Writer):
    """A command on another machine, whose processes are not visible here."""

    def __init__(self, directory: RemoteDirectory, host: str = "node7") -> None:
        super().__init__(directory, Path("/there/run"))
        self._record = replace(self._record, owner=replace(this_owner(), host=host))

    def dies(self) -> None:
        self._ended.set()
        if self._beats is not None:
            self._beats.join()
