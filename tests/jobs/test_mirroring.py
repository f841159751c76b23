"""What a command does with a mirror before it trains: nothing in it is lost by a start that did not see it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs.mirroring import Mirroring
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.launch.mirror.remote_run import RemoteRun
from fsdp_tune.launch.mirror.send import Sender
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from fsdp_tune.run.remote_files import UrlError
from tests.launch.test_accelerate import resolved
from tests.launch.test_mirror import make_run, save, send_all


def mirroring(run: RunDir, remote: RemoteRun, *overrides: str) -> Mirroring:
    return Mirroring(run, resolved(run.path.parent, *overrides), RemoteRun(*remote.url.rsplit("/", 1)), Observer())


def start(step: int, *, is_new: bool = False) -> Any:
    return SimpleNamespace(step=step, checkpoint=None if is_new else SimpleNamespace(step=step), is_new=is_new, is_finished=False)


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
        with pytest.raises(KeyboardInterrupt):
            mirroring(run, remote).prepare(start(0, is_new=True), "auto")
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
