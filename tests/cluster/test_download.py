"""Downloads into a run directory: what is used again, and what is not written through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.cluster.mirror.download import fetch_checkpoint, remove_stage
from fsdp_tune.cluster.mirror.remote_run import RemoteRun, read_identity, run_folder
from fsdp_tune.core.atomic import STAGE_MARK
from fsdp_tune.run.directory import Checkpoint, RunDir, inspect_checkpoint
from fsdp_tune.run.manifest import FileEntry
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import ContentError
from tests.cluster.mirrors import make_run, remote_checkpoint, save, send_all

pytestmark = pytest.mark.usefixtures("disk_without_waits")


@pytest.fixture
def run(tmp_path: Path, remote: RemoteRun) -> RunDir:
    """A run whose checkpoint of step 5 is in the mirror."""
    run = make_run(tmp_path / "run")
    save(run, 5)
    assert send_all(run, remote)
    return run


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are downloaded."""
    names, fetch = list[str](), RemoteDirectory.fetch

    def note(self: RemoteDirectory, name: str, *rest: Any) -> None:
        names.append(name)
        fetch(self, name, *rest)

    monkeypatch.setattr(RemoteDirectory, "fetch", note)
    return names


def download(remote: RemoteRun, run: RunDir, **options: Any) -> list[int]:
    """Download checkpoint-5. Returns the bytes that were counted."""
    counted = list[int]()
    fetch_checkpoint(remote, remote_checkpoint(remote, 5), run, counted.append, **options)
    assert isinstance(inspect_checkpoint(run.checkpoint(5), digests=True), Checkpoint)
    return counted


@pytest.mark.usefixtures("run")
def test_download_that_was_killed_before_its_last_rename_fetches_no_shard_again(
    tmp_path: Path, remote: RemoteRun, fetched: list[str]
) -> None:
    back = RunDir(tmp_path / "back" / "run")
    download(remote, back, identity="one")
    assert read_identity(back) == "one"
    built = back.path.parent / f".run{STAGE_MARK}mirror" / "run"
    built.mkdir(parents=True)
    back.checkpoint(5).rename(built / "checkpoint-5")
    for path in sorted(back.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    back.path.rmdir()
    fetched.clear()
    counted = download(remote, back)
    assert {name.partition("/")[0] for name in fetched} == {run_folder("checkpoint-5")}
    assert sum(counted) == remote_checkpoint(remote, 5).size_bytes, "what is there counts as done"
    assert [path.name for path in back.path.parent.iterdir()] == ["run"], "no stage is left"


def test_only_the_damaged_file_of_a_checkpoint_is_fetched(
    run: RunDir, remote: RemoteRun, fetched: list[str]
) -> None:
    shard = run.checkpoint(5) / "shards" / "__1_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    download(remote, run)
    assert fetched == ["checkpoint-5/shards/__1_0.distcp"]


def test_link_in_a_stage_is_not_written_through(tmp_path: Path, run: RunDir, remote: RemoteRun) -> None:
    """Another user may write in the directory above."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    stage = run.path / f".checkpoint-5{STAGE_MARK}mirror"
    stage.mkdir()
    (stage / "trainer_state.json").symlink_to(victim)
    (stage / "stranger").write_text("left by something else")
    download(remote, run)
    assert victim.read_text() == "mine"
    assert not (run.checkpoint(5) / "stranger").exists()


@pytest.mark.usefixtures("run")
def test_stage_that_is_a_link_is_refused(tmp_path: Path, remote: RemoteRun) -> None:
    back, elsewhere = RunDir(tmp_path / "back" / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    stage = back.path.parent / f".run{STAGE_MARK}mirror"
    stage.mkdir(parents=True)
    (stage / "checkpoint-5").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="is not a directory of this user"):
        download(remote, back)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize("failures", [1, 2])
@pytest.mark.usefixtures("run")
def test_file_that_arrives_damaged_is_fetched_once_more(
    tmp_path: Path, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    fetch, left = RemoteDirectory.fetch, [failures]

    def damaged(self: RemoteDirectory, name: str, target: Path, entry: FileEntry, *rest: Any) -> None:
        if name.endswith("trainer_state.json") and left[0]:
            left[0] -= 1
            raise ContentError(f"{name} differs")
        fetch(self, name, target, entry, *rest)

    monkeypatch.setattr(RemoteDirectory, "fetch", damaged)
    back = RunDir(tmp_path / "back" / "run")
    if failures == 1:
        download(remote, back)
        return
    with pytest.raises(ContentError, match=r"trainer_state\.json differs"):
        download(remote, back)
    assert not back.path.exists()
    remove_stage(back, 5)
    assert list(back.path.parent.iterdir()) == []


def test_download_that_lacks_a_file_is_not_published(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.checkpoint(5) / "trainer_state.json").unlink()
    monkeypatch.setattr(RemoteDirectory, "fetch", lambda *_: None)
    with pytest.raises(ContentError, match=r"trainer_state\.json"):
        download(remote, run)
    assert not (run.checkpoint(5) / "trainer_state.json").exists()
