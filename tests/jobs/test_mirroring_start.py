"""The mirror at the start of a command: what is reported, taken over, or refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.cluster.mirror import writer as writing
from fsdp_tune.cluster.mirror.remote_run import MirrorIdentity, RemoteRun, read_identity
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Notice
from fsdp_tune.jobs.mirroring import Mirroring, given_back
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import Refusal, UrlError
from tests.cluster.mirrors import Elsewhere, make_run, save, send_all, without_waits_for_the_disk
from tests.jobs.test_mirroring import start
from tests.launch.recipes import resolved


class Seen(Observer):
    def __init__(self) -> None:
        self.found: list[Notice] = []
        self.messages: list[str] = []

    def notices(self, notices: Any) -> None:
        self.found += notices

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    without_waits_for_the_disk(monkeypatch)


@pytest.fixture
def remote(tmp_path: Path) -> RemoteRun:
    (tmp_path / "mirror").mkdir()
    return RemoteRun(f"file://{tmp_path}/mirror", "run")


@pytest.fixture
def run(tmp_path: Path, remote: RemoteRun) -> RunDir:
    """A run whose checkpoints of steps 10 and 20 are in the mirror; on its disk is that of step 10."""
    run = make_run(tmp_path / "run")
    run.recipe_json.write_text(resolved(tmp_path).model_dump_json(by_alias=True))
    for step in (10, 20):
        save(run, step)
    assert send_all(run, remote)
    run.checkpoint(20).rename(tmp_path / "gone")
    return run


@pytest.fixture
def found(run: RunDir, remote: RemoteRun) -> Iterator[Mirroring]:
    made = mirroring(run, remote)
    with closing(made):
        yield made


def mirroring(run: RunDir, remote: RemoteRun) -> Mirroring:
    return Mirroring(run, resolved(run.path.parent), RemoteRun(*remote.url.rsplit("/", 1)), Seen())


def seen(found: Mirroring) -> Seen:
    assert isinstance(found.observer, Seen)
    return found.observer


def fail(error: Exception) -> Any:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("resume", "step", "is_finished", "is_new", "newer"),
    [
        ("auto", 10, False, False, 20),
        ("auto", 0, False, True, 20),
        ("auto", 20, False, False, None),
        ("auto", 30, False, False, None),
        ("auto", 10, True, False, None),
        (None, 10, False, False, None),
        ("/run/checkpoint-10", 10, False, False, None),
    ],
)
def test_preview_names_a_checkpoint_that_is_newer_than_this_disks(
    found: Mirroring, resume: str | None, step: int, is_finished: bool, is_new: bool, newer: int | None
) -> None:
    at = start(step, is_new=is_new)
    at.is_finished = is_finished
    notices = found.preview(at, resume)
    assert [notice.code for notice in notices] == ["mirror-newer"] * (newer is not None)
    assert all(f"checkpoint-{newer} of {found.remote.url}" in notice.message for notice in notices)


def test_preview_of_a_mirror_that_is_empty_or_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = mirroring(RunDir(tmp_path / "run"), RemoteRun(f"file://{tmp_path}/mirror", "run"))
    assert empty.preview(start(0, is_new=True), "auto") == []
    monkeypatch.setattr(RemoteDirectory, "list", fail(UrlError("timed out")))
    (notice,) = empty.preview(start(0, is_new=True), "auto")
    assert (notice.code, notice.message.endswith("cannot be read: timed out")) == ("mirror-unreachable", True)


def test_recipe_names_a_mirror_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    assert Mirroring.of(run, resolved(tmp_path), Observer()) is None
    recipe = resolved(tmp_path, "checkpoint.mirror=s3://bucket/runs")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url, **_: (SimpleNamespace(), url))
    made = Mirroring.of(run, recipe, Observer())
    assert made is not None
    assert made.remote.url == "s3://bucket/runs/run"
    monkeypatch.setattr("fsspec.core.url_to_fs", fail(ImportError("Install s3fs to access S3")))
    with pytest.raises(FsdpTuneError, match="Install s3fs") as caught:
        Mirroring.of(run, recipe, Observer())
    assert caught.value.problems[0].code == "mirror-package"


def test_silent_owner_is_waited_for_and_taken_over_with_a_notice(
    found: Mirroring, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(writing, "POLL_SECONDS", 0.05)
    other = Elsewhere(remote.directory)
    other.claim()
    other.dies()
    assert not found.prepare(start(20), "auto")
    (message,) = seen(found).messages
    assert re.search(
        r"waiting up to 60 s to see whether pid \d+ on node7 .* still writes to file://", message
    )
    (notice,) = seen(found).found
    assert notice.code == "mirror-taken-over"
    assert "was claimed by pid" in notice.message


def test_claim_is_given_back_if_another_run_was_sent_before_it(
    found: Mirroring, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FsdpTuneError, match="has the checkpoints of another run") as caught:
        found.prepare(start(0), None, overwrite=True)
    assert caught.value.problems[0].code == "mirror-used"
    assert len(caught.value.problems[0].ways_out) == 2, "--resume auto does not go with --overwrite"
    with pytest.raises(FsdpTuneError) as caught:
        mirroring(RunDir(found.run.path.parent / "fresh" / "run"), remote).prepare(
            start(0, is_new=True), None
        )
    assert "--resume auto continues from it" in caught.value.problems[0].ways_out[0]
    other = Elsewhere(remote.directory)
    assert other.claim() is None
    other.release()


@pytest.mark.parametrize(
    ("refusal", "has_checkpoint", "code"),
    [
        (None, True, None),
        ("full", True, None),
        (None, False, "mirror-unreachable"),
        ("full", False, "mirror-full"),
        ("credentials", True, "mirror-refused"),
    ],
)
def test_only_a_run_with_a_checkpoint_starts_without_its_mirror(
    found: Mirroring,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal | None,
    has_checkpoint: bool,
    code: str | None,
) -> None:
    """Missing rights do not pass by themselves."""
    monkeypatch.setattr(RemoteRun, "probe", fail(UrlError("why", refusal)))
    at = start(10, is_new=not has_checkpoint)
    if code is None:
        assert not found.prepare(at, "auto")
        assert [notice.code for notice in seen(found).found] == ["mirror-unreachable"]
        return
    with pytest.raises(FsdpTuneError) as caught:
        found.prepare(at, "auto")
    assert (caught.value.problems[0].code, caught.value.exit_code) == (code, ExitCode.USAGE)


def test_new_run_with_an_empty_mirror_starts_at_step_0_with_a_notice(
    tmp_path: Path, remote: RemoteRun
) -> None:
    made = mirroring(RunDir(tmp_path / "fresh" / "run"), remote)
    with given_back(made):
        assert not made.prepare(start(0, is_new=True), "auto")
    assert [notice.code for notice in seen(made).found] == ["mirror-empty"]
    with given_back(None):
        pass


def test_restart_takes_nothing_from_the_mirror_of_another_run(found: Mirroring, run: RunDir) -> None:
    MirrorIdentity("two").write(run.mirror_json)
    assert found.newer_copy(10, lambda _: None) is None
    MirrorIdentity("one").write(run.mirror_json)
    assert found.newer_copy(10, lambda _: None) == run.checkpoint(20)


@pytest.mark.parametrize("harm", ["missing", "other"])
def test_recipe_of_a_copy_is_the_one_that_its_manifest_lists(
    tmp_path: Path, run: RunDir, remote: RemoteRun, harm: str
) -> None:
    """It decides whether the run may continue, so it is compared before it is read."""
    (tmp_path / "train.jsonl").write_text("")
    file = tmp_path / "mirror" / "run" / "checkpoint-20.run" / "recipe.json"
    if harm == "missing":
        file.unlink()
    else:
        file.write_text(file.read_text().replace('"seed":42', '"seed":43'))
    made = mirroring(RunDir(tmp_path / "fresh" / "run"), remote)
    made.recipe = resolved(tmp_path)
    made.run.path.parent.mkdir()
    with closing(made):
        assert made.prepare(start(0, is_new=True), "auto")
    (notice,) = seen(made).found
    assert notice.code == "checkpoint-rejected"
    words = "is missing" if harm == "missing" else "is not what its manifest lists"
    assert f"{remote.url}/checkpoint-20.run/recipe.json {words}" in notice.message
    assert made.run.checkpoint(10).is_dir()


@pytest.mark.parametrize("harm", ["none", "manifest", "shard", "outage"])
def test_best_checkpoint_is_downloaded_too_and_is_missing_with_a_notice(
    tmp_path: Path, run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """A merge may be made from it."""
    folder = save(run, 30)
    (folder / "trainer_state.json").write_text('{"global_step": 30, "best_global_step": 10}')
    (folder / MANIFEST_NAME).unlink()
    entries = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, entries, {"step": 30}).to_json())
    assert send_all(run, remote, keep=None)
    best = tmp_path / "mirror" / "run" / "checkpoint-10"
    if harm == "manifest":
        (best / MANIFEST_NAME).write_text("{}")
    if harm == "shard":
        (best / "shards" / "__0_0.distcp").unlink()
    back = RunDir(tmp_path / "fresh" / "run")
    back.path.parent.mkdir()
    made, checkpoint = mirroring(back, remote), RemoteRun.checkpoint

    def away(self: RemoteRun, step: int) -> object:
        if step == 10 and harm == "outage":
            raise UrlError("timed out")
        return checkpoint(self, step)

    monkeypatch.setattr(RemoteRun, "checkpoint", away)
    made.recipe = resolved(tmp_path)
    with closing(made):
        assert made.prepare(start(0, is_new=True), "auto")
    assert back.checkpoint(30).is_dir()
    assert read_identity(back) == "one"
    assert back.checkpoint(10).is_dir() == (harm == "none")
    assert [notice.code for notice in seen(made).found] == ["checkpoint-rejected"] * (harm != "none")
    for notice in seen(made).found:
        assert "checkpoint-10, the best, is not on this disk: " in notice.message
