"""What a command does with a mirror before it trains: nothing in it is lost by a start that did not see it."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.cluster.mirror import writer as writing
from fsdp_tune.cluster.mirror.remote_run import IDENTITY_NAME, RemoteRun, read_identity
from fsdp_tune.cluster.mirror.send import Sender, follow
from fsdp_tune.cluster.mirror.writer import MirrorInUseError, Writer
from fsdp_tune.core.errors import FsdpTuneError, Notice
from fsdp_tune.jobs import mirroring as jobs
from fsdp_tune.jobs.mirroring import Mirroring, given_back
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, RunDir, inspect_checkpoint
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from fsdp_tune.run.mirror_state import MirrorState
from fsdp_tune.run.remote_files import RemoteDirectory, UrlError
from tests.cluster.test_remote_run import make_run, save, send_all
from tests.cluster.test_writer import Elsewhere
from tests.launch.test_accelerate import resolved


def mirroring(run: RunDir, remote: RemoteRun, *overrides: str) -> Mirroring:
    return Mirroring(run, resolved(run.path.parent, *overrides), RemoteRun(*remote.url.rsplit("/", 1)), Observer())


def start(step: int, *, is_new: bool = False) -> Any:
    return SimpleNamespace(step=step, checkpoint=None if is_new else SimpleNamespace(step=step), is_new=is_new, is_finished=False)


@pytest.fixture(autouse=True)
def _given_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the claims of a test; `monkeypatch` is undone later."""
    claimed, claim = list[Writer](), Writer.claim

    def remember(self: Writer) -> object:
        claimed.append(self)
        return claim(self)

    monkeypatch.setattr(Writer, "claim", remember)
    yield
    for writer in claimed:
        writer.release()


@pytest.fixture
def mirrored(tmp_path: Path) -> tuple[RunDir, RemoteRun]:
    """A run with checkpoint-100 on its disk, and a mirror that has checkpoint-500 too."""
    (tmp_path / "mirror").mkdir()
    run, remote = make_run(tmp_path / "run"), RemoteRun(f"file://{tmp_path}/mirror", "run")
    run.recipe_json.write_text(resolved(tmp_path).model_dump_json(by_alias=True))
    for step in (100, 500):
        save(run, step)
    assert send_all(run, remote)
    run.checkpoint(500).rename(tmp_path / "gone")
    return run, remote


def test_start_that_did_not_see_the_mirror_takes_nothing_back(mirrored: tuple[RunDir, RemoteRun], monkeypatch: pytest.MonkeyPatch) -> None:
    run, remote = mirrored
    found, started_at = mirroring(run, remote), list[Any]()

    def fails(_: RemoteRun) -> None:
        raise UrlError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "probe", fails)
        assert not found.prepare(start(100), "auto")
    monkeypatch.setattr(Mirroring, "_start", lambda self: started_at.append(self._start_step))
    monkeypatch.setattr(Mirroring, "_finish", lambda _: None)
    with found.sending(100):
        Sender(run, remote, keep=1).open(started_at[0])
    assert remote.complete_steps(remote.directory.list()) == [500, 100]


def test_resume_of_an_older_checkpoint_is_refused_while_the_mirror_has_later_ones(mirrored: tuple[RunDir, RemoteRun]) -> None:
    run, remote = mirrored
    with pytest.raises(FsdpTuneError, match=r"after step 100 \(checkpoint-500\)"):
        mirroring(run, remote).prepare(start(100), str(run.checkpoint(100)))


def test_mirror_without_a_usable_checkpoint_does_not_start_over(mirrored: tuple[RunDir, RemoteRun], tmp_path: Path) -> None:
    _, remote = mirrored
    for manifest in (tmp_path / "mirror" / "run").glob("checkpoint-*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(FsdpTuneError, match="none that can be used"):
        mirroring(RunDir(tmp_path / "fresh" / "run"), remote).prepare(start(0, is_new=True), "auto")


def test_mirror_on_a_disk_that_is_not_mounted_is_not_created(tmp_path: Path) -> None:
    remote = RemoteRun(f"file://{tmp_path}/mnt/backup", "run")
    with pytest.raises(FsdpTuneError, match="is it mounted"):
        mirroring(RunDir(tmp_path / "run"), remote).prepare(start(0, is_new=True), "auto")
    assert not (tmp_path / "mnt").exists()


def test_downloaded_run_has_its_identity(mirrored: tuple[RunDir, RemoteRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop between the newest checkpoint and the best one leaves a run that continues."""
    _, remote = mirrored
    run = RunDir(tmp_path / "fresh" / "run")
    run.path.parent.mkdir()

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Mirroring, "_fetch_best", stopped)
        with closing(mirroring(run, remote)) as first, pytest.raises(KeyboardInterrupt):
            first.prepare(start(0, is_new=True), "auto")
    assert run.checkpoint(500).is_dir()
    assert not mirroring(run, remote).prepare(start(500), "auto")


def test_best_checkpoint_stays_in_the_mirror(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    run, remote = make_run(tmp_path / "run"), RemoteRun(f"file://{tmp_path}/mirror", "run")
    for step in (10, 20, 30):
        folder = save(run, step)
        (folder / "trainer_state.json").write_text(f'{{"global_step": {step}, "best_global_step": 10}}')
        (folder / MANIFEST_NAME).unlink()
        entries = {name: digest_file(folder / name) for name in list_files(folder)}
        (folder / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, entries, {"step": step}).to_json())
        assert send_all(run, remote, keep=1, start=step)
        folder.rename(tmp_path / f"old-{step}")
    assert remote.complete_steps(remote.directory.list()) == [30, 10]


def lasting(remote: RemoteRun) -> set[str]:
    """The names in the mirror, but for what its owner writes anew at each beat."""
    return {name for name in remote.directory.list() if ".stage-" not in name}


def test_mirror_of_a_live_command_is_refused_before_anything_is_read(
    mirrored: tuple[RunDir, RemoteRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, remote = mirrored
    monkeypatch.setattr(writing, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(writing, "POLL_SECONDS", 0.1)
    other = Elsewhere(remote.directory)
    other.claim()
    before = lasting(remote)
    with pytest.raises(FsdpTuneError, match=r"is in use by pid \d+ on node7") as caught:
        mirroring(run, remote).prepare(start(100), "auto")
    assert caught.value.problems[0].code == "mirror-in-use"
    assert caught.value.exit_code == 2
    assert lasting(remote) == before
    other.release()


@pytest.mark.parametrize("resume", [None, "auto"])
def test_run_that_another_command_sent_while_the_claim_was_waited_for_is_not_mixed_with_this_one(
    mirrored: tuple[RunDir, RemoteRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str | None
) -> None:
    _, remote = mirrored
    remote.directory.remove(IDENTITY_NAME)
    patient = Writer.claim_patiently

    def claim(self: Writer, waits_for: Any) -> object:
        remote.claim("theirs")
        return patient(self, waits_for)

    monkeypatch.setattr(Writer, "claim_patiently", claim)
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "train.jsonl").write_text("")
    found = mirroring(RunDir(tmp_path / "fresh" / "run"), remote)
    found.recipe = resolved(tmp_path)
    if resume is not None:
        assert found.prepare(start(0, is_new=True), resume)
        assert read_identity(found.run) == "theirs"
        return
    with pytest.raises(FsdpTuneError, match="has the checkpoints of another run"):
        found.prepare(start(0, is_new=True), resume)
    assert Elsewhere(remote.directory).claim() is None, "it was given back"


def test_mirror_is_free_again_when_a_command_has_ended(mirrored: tuple[RunDir, RemoteRun], monkeypatch: pytest.MonkeyPatch) -> None:
    run, remote = mirrored
    first = mirroring(run, remote)
    with given_back(first):
        first.prepare(start(500), "auto")
        with pytest.raises(MirrorInUseError):
            Elsewhere(remote.directory).claim()
    monkeypatch.setattr(Writer, "_require_dead", lambda *_: pytest.fail("the claim has not been given back"))
    Elsewhere(remote.directory).claim()


def test_start_lists_the_mirror_once(mirrored: tuple[RunDir, RemoteRun], monkeypatch: pytest.MonkeyPatch) -> None:
    run, remote = mirrored
    listed, list_ = list[str](), RemoteDirectory.list

    def count(self: RemoteDirectory, folder: str = "") -> object:
        listed.append(folder)
        return list_(self, folder)

    monkeypatch.setattr(RemoteDirectory, "list", count)
    found = mirroring(run, remote)
    assert found.prepare(start(100), "auto")
    assert listed.count("") == 1
    listed.clear()
    assert found._writer is not None
    sender = Sender(run, RemoteRun(*remote.url.rsplit("/", 1)), claim=found._writer.key)
    sender.open(500)
    assert listed.count("") == 1, "the process that sends, for what it takes back"


def test_recipe_that_must_not_continue_the_run_is_refused_before_the_download(
    mirrored: tuple[RunDir, RemoteRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, remote = mirrored
    monkeypatch.setattr(RemoteDirectory, "fetch", lambda *_: pytest.fail("a file was downloaded"))
    run = RunDir(tmp_path / "run-2" / "run")
    run.path.parent.mkdir()
    (run.path.parent / "train.jsonl").write_text("")
    with pytest.raises(FsdpTuneError, match=r"training\.seed") as caught:
        mirroring(run, remote, "training.seed=7").prepare(start(0, is_new=True), "auto")
    assert caught.value.problems[0].code == "resume-refused"


def damage(run: RunDir, step: int) -> None:
    shard = run.checkpoint(step) / "shards" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))


def test_restart_replaces_a_damaged_checkpoint_by_the_copy(mirrored: tuple[RunDir, RemoteRun], tmp_path: Path) -> None:
    run, remote = mirrored
    (tmp_path / "gone").rename(run.checkpoint(500))
    damage(run, 500)
    counted = list[int]()
    assert mirroring(run, remote).newer_copy(100, counted.append) == run.checkpoint(500)
    assert isinstance(inspect_checkpoint(run.checkpoint(500), digests=True), Checkpoint)
    assert sum(counted) > 0
    assert mirroring(run, remote).newer_copy(500, counted.append) is None


def remove(file: Path) -> None:
    file.unlink()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("checkpoint-500/shards/__0_0.distcp", remove),
        ("checkpoint-500/shards/__0_0.distcp", truncate),
        ("checkpoint-500.run/recipe.json", remove),
    ],
    ids=["shard missing", "shard short", "recipe missing"],
)
def test_start_uses_an_older_checkpoint_if_a_file_of_the_newest_is_missing_or_short(
    mirrored: tuple[RunDir, RemoteRun], tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    _, remote = mirrored
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "train.jsonl").write_text("")
    harm(tmp_path / "mirror" / "run" / name)
    found, notices = mirroring(RunDir(tmp_path / "fresh" / "run"), remote), list[Notice]()
    found.observer.notices = notices.extend  # type: ignore[method-assign]
    found.recipe = resolved(tmp_path)
    assert found.prepare(start(0, is_new=True), "auto")
    assert isinstance(inspect_checkpoint(found.run.checkpoint(100), digests=True), Checkpoint)
    assert not found.run.checkpoint(500).exists()
    (notice,) = notices
    assert notice.code == "checkpoint-rejected"
    assert f"{remote.url}/{name} is " in notice.message


def test_restart_uses_the_newest_copy_whose_files_are_there(mirrored: tuple[RunDir, RemoteRun], tmp_path: Path) -> None:
    run, remote = mirrored
    (tmp_path / "mirror" / "run" / "checkpoint-500" / "shards" / "__0_0.distcp").unlink()
    assert mirroring(run, remote).newer_copy(50, lambda _: None) == run.checkpoint(100)


def test_restart_continues_from_this_disk_if_the_mirror_cannot_be_read(
    mirrored: tuple[RunDir, RemoteRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, remote = mirrored
    found, messages = mirroring(run, remote), list[str]()
    found.observer = SimpleNamespace(message=messages.append)  # type: ignore[assignment]

    def fails(_: RemoteRun) -> None:
        raise UrlError("timed out")

    monkeypatch.setattr(RemoteRun, "identity", fails)
    assert found.newer_copy(100, lambda _: None) is None
    assert "timed out" in messages[0]


def test_sender_that_is_refused_is_reported_once_and_at_once(mirrored: tuple[RunDir, RemoteRun]) -> None:
    run, remote = mirrored
    found, notices = mirroring(run, remote), list[Notice]()
    found.observer.notices = notices.extend  # type: ignore[method-assign]
    found._child = SimpleNamespace(pid=os.getpid(), poll=lambda: None)  # type: ignore[assignment]
    remote.claim("another")
    sender = Sender(run, RemoteRun(*remote.url.rsplit("/", 1)))
    sender.failed(UrlError("timed out"))
    found.tend()
    assert not notices, "it may pass"
    follow(sender, lambda: True, 0, lambda _: None)
    found.tend()
    found.tend()
    assert [(notice.code, "has the checkpoints of another run" in notice.message) for notice in notices] == [("mirror-stopped", True)]
    sender.close()


@pytest.mark.parametrize(("machine", "exit_code", "starts"), [(0, None, 0), (0, 0, 1), (0, -9, 1), (1, None, 0), (1, 0, 0), (1, -9, 1)])
def test_sender_that_dies_is_started_again_on_every_machine(
    mirrored: tuple[RunDir, RemoteRun], monkeypatch: pytest.MonkeyPatch, machine: int, exit_code: int | None, starts: int
) -> None:
    """That of another machine ends with 0 on a disk that the first machine shares."""
    found, notices, started = mirroring(*mirrored), list[Notice](), list[None]()
    found.observer.notices = notices.extend  # type: ignore[method-assign]
    found.machine = machine
    found._child = SimpleNamespace(pid=-1, poll=lambda: exit_code)  # type: ignore[assignment]
    monkeypatch.setattr(Mirroring, "_start", lambda _: started.append(None))
    found.tend()
    assert (len(started), notices) == (starts, [])


@pytest.mark.parametrize("is_hashing", [True, False])
def test_end_waits_while_a_model_is_hashed(
    mirrored: tuple[RunDir, RemoteRun], monkeypatch: pytest.MonkeyPatch, *, is_hashing: bool
) -> None:
    monkeypatch.setattr(jobs, "STALL_SECONDS", 0.1)
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.02)
    found, count = mirroring(*mirrored), itertools.count()
    monkeypatch.setattr(Mirroring, "_state", lambda _: MirrorState("-", waiting=["merged"], hashed_bytes=next(count) if is_hashing else 0))
    child = subprocess.Popen(["sleep", "0.5"], text=True)
    found._wait(child)
    assert (child.poll() is not None) == is_hashing
    child.kill()
    child.wait()
