"""What is made of runs: checkpoints of a mirror that are downloaded for a merge, merges of adapters, and
uploads."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FailedError, FsdpTuneError, Notice
from fsdp_tune.jobs import results
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.publish import HubTarget, Pushed
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import MERGE_RECORD, RunDir
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import UrlError
from tests.cluster.mirrors import RemoteRun, make_run, save, send_all
from tests.run.test_checkpoint_scores import write_recipe


class Said(Observer):
    def __init__(self) -> None:
        self.messages: list[str] = []
        self.codes: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)

    def notices(self, notices: Any) -> None:
        self.codes += [notice.code for notice in notices]


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a run whose mirror has checkpoint-100."""
    run = make_run(tmp_path / "here" / "tiny")
    save(run, 100)
    remote = RemoteRun(f"file://{tmp_path}/mirror", "tiny")
    assert send_all(run, remote)
    return remote.url


def download(url: str, output: Path, said: Observer) -> list[str]:
    """Download and return the names of the checkpoint's files, while they are there."""
    with results.downloaded(url, MergeOptions(output=output), said) as found:
        assert found.url == f"{url}/checkpoint-100"
        return sorted(path.name for path in found.path.rglob("*") if path.is_file())


def test_store_that_does_not_answer_is_an_error_of_the_url(
    url: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise UrlError("the connection was lost")

    monkeypatch.setattr(RemoteDirectory, "list", lost)
    with pytest.raises(FsdpTuneError, match="it cannot be read: the connection was lost") as caught:
        download(url, tmp_path / "merged", said)
    assert caught.value.problems[0].where.source == url


def test_disk_that_fills_up_while_a_checkpoint_is_downloaded_keeps_nothing_of_it(
    url: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = RemoteDirectory.fetch

    def full(self: RemoteDirectory, name: str, *rest: Any) -> None:
        if "trainer_state" in name:
            raise OSError(errno.ENOSPC, "No space left on device")
        fetch(self, name, *rest)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(RemoteDirectory, "fetch", full)
    with pytest.raises(FailedError, match="No space left on device") as caught:
        download(url, tmp_path / "out" / "merged", said)
    assert caught.value.problems[0].code == "merge-cannot-write"
    assert list((tmp_path / "out").iterdir()) == []


def test_download_that_has_no_room_is_refused_before_it_starts(
    url: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def disk_usage(folder: Path) -> SimpleNamespace:
        asked.append(folder)
        return SimpleNamespace(free=100)

    monkeypatch.setattr(RemoteDirectory, "fetch", lambda *_: pytest.fail("it is downloaded"))
    monkeypatch.setattr(results.shutil, "disk_usage", disk_usage)
    with pytest.raises(FailedError, match=r"the download needs .* and 100 B are free") as caught:
        download(url, tmp_path / "not" / "there" / "yet" / "merged", said)
    assert caught.value.problems[0].code == "merge-disk-full"
    assert asked == [tmp_path], "the next directory above that is there"


def test_complete_download_of_an_earlier_call_is_used_again(
    url: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That call was killed while it merged."""
    output, kept = tmp_path / "merged", tmp_path / "kept"
    with results.downloaded(url, MergeOptions(output=output), said) as found:
        folder = found.path.parents[1]
        shutil.copytree(folder, kept)
    assert len(said.messages) == 1
    assert not folder.exists()
    kept.rename(folder)
    monkeypatch.setattr(results, "fetch_checkpoint", lambda *_: pytest.fail("it is downloaded again"))
    assert "__0_0.distcp" in download(url, output, said)
    assert len(said.messages) == 1
    assert not folder.exists()


def run_with(tmp_path: Path, **sections: Any) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.model.mkdir(parents=True)
    write_recipe(run, Recipe.model_validate({"name": "mine"} | sections))
    if "lora" in sections:
        run.base_json.write_text("{}")
    return run


Outputs = list[tuple[bool | None, Path | None]]


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> Outputs:
    """Whether each merge writes an adapter, and into which directory it is to do so."""
    found: Outputs = []

    def merge_checkpoint(source: Path, options: MergeOptions, *_: Any, **__: Any) -> SimpleNamespace:
        found.append((options.adapter, options.output))
        run = RunDir(source)
        output = run.adapter if options.adapter else run.merged
        return SimpleNamespace(output=output, notices=(), to_quantise=None)

    monkeypatch.setattr(results.merging, "merge_checkpoint", merge_checkpoint)
    return found


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("both", MergeOptions(), [True, False]),
        ("adapter", MergeOptions(), [True]),
        ("merged", MergeOptions(), [False]),
        ("both", MergeOptions(adapter=True), [True]),
        ("adapter", MergeOptions(adapter=False), [False]),
        ("adapter", MergeOptions(output=Path("elsewhere")), [False]),
    ],
)
def test_run_with_an_adapter_writes_what_its_recipe_names_unless_an_option_does(
    tmp_path: Path, merges: Outputs, said: Said, kind: str, options: MergeOptions, expected: list[bool]
) -> None:
    run = run_with(tmp_path, lora={}, merge={"adapter": kind})
    result = results.merge_checkpoint(run.path, options, observer=said)
    assert [adapter for adapter, _ in merges] == expected
    assert result.output == (run.adapter if expected == [True] else run.merged)
    assert said.messages == ([f"the adapter is in {run.adapter}"] if len(expected) == 2 else [])


def test_run_without_an_adapter_is_merged_whatever_its_section_says(
    tmp_path: Path, merges: Outputs, said: Said
) -> None:
    results.merge_checkpoint(run_with(tmp_path, merge={"adapter": "both"}).path, observer=said)
    assert merges == [(False, None)]


def test_mirrored_checkpoint_is_merged_from_its_download(
    url: str, tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    fetched = tmp_path / "fetched"

    @contextmanager
    def downloaded(source: str, *_: object) -> Any:
        yield results.DownloadedCheckpoint(fetched, f"{source}/checkpoint-100")

    def merge(source: Path, *_: Any, origin: str) -> str:
        found.append((source, origin))
        return "merged"

    monkeypatch.setattr(results, "downloaded", downloaded)
    monkeypatch.setattr(results, "_merge", merge)
    assert results.merge_checkpoint(url, observer=said) == "merged"
    assert found == [(fetched, f"{url}/checkpoint-100")]


Uploads = list[tuple[Path, HubTarget, str]]


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    found: Uploads = []

    def upload(folder: Path, target: HubTarget, retry: str) -> Pushed:
        found.append((folder, target, retry))
        return Pushed("https://hub/commit", (Notice("pushed", ""),))

    monkeypatch.setattr(results, "upload", upload)
    return found


def merged_in(folder: Path) -> Path:
    folder.mkdir()
    (folder / MERGE_RECORD).write_text("{}")
    return folder


def test_run_is_pushed_where_its_recipe_says(tmp_path: Path, uploads: Uploads, said: Said) -> None:
    training = {"hub_model_id": "me/model", "hub_private_repo": False, "hub_revision": "v2"}
    run = run_with(tmp_path, training=training)
    folder = merged_in(run.merged)
    assert results.push(run.path, observer=said).url == "https://hub/commit"
    assert uploads == [
        (folder, HubTarget("me/model", is_public=True, revision="v2"), f"fsdp-tune push {run.path}")
    ]
    results.push(run.path, to="you/it", public=False, revision="v3", observer=said)
    again = f"fsdp-tune push {run.path} --to you/it --private --revision v3"
    assert uploads[1][1:] == (HubTarget("you/it", revision="v3"), again)
    assert said.codes == ["pushed", "pushed"]


def test_run_without_a_repository_is_pushed_under_its_name_and_private(
    tmp_path: Path, uploads: Uploads
) -> None:
    run = run_with(tmp_path, lora={})
    merged_in(run.merged)
    adapter = merged_in(run.adapter)
    results.push(run.path, adapter=True)
    assert uploads[0][:2] == (adapter, HubTarget("mine"))


def test_model_that_is_out_of_date_is_pushed_with_a_notice(
    tmp_path: Path, uploads: Uploads, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_with(tmp_path)
    merged_in(run.merged)
    monkeypatch.setattr(results, "newer_checkpoint", lambda *_: (Notice("merge-out-of-date", ""),))
    results.push(run.path, observer=said)
    assert said.codes == ["merge-out-of-date", "pushed"]
    assert len(uploads) == 1


def run_only(tmp_path: Path) -> Path:
    return run_with(tmp_path).path


def output_only(tmp_path: Path) -> Path:
    return merged_in(tmp_path / "model")


@pytest.mark.parametrize(
    ("make", "more", "code", "message", "hint"),
    [
        (
            run_only,
            {},
            "push-not-merged",
            "the run has no merged model yet",
            "`fsdp-tune merge-checkpoint {}`",
        ),
        (
            run_only,
            {"adapter": True},
            "push-not-merged",
            "the run has no exported adapter yet",
            "`fsdp-tune merge-checkpoint --adapter {}`",
        ),
        (output_only, {}, "push-name", "is not a run, so its repository must be named", "--to OWNER/NAME"),
        (
            output_only,
            {"adapter": True, "to": "me/x"},
            "usage",
            "`--adapter` chooses what a run has",
            "leave",
        ),
        (
            lambda folder: folder,
            {"to": "me/x"},
            "push-not-merged",
            "neither a run nor the output",
            "give a run",
        ),
        (lambda folder: folder / "x", {"to": "me/x"}, "push-not-merged", "it does not exist", "give a run"),
    ],
)
def test_what_cannot_be_pushed_is_refused_with_the_command_that_makes_it(
    tmp_path: Path,
    uploads: Uploads,
    make: Callable[[Path], Path],
    more: dict[str, Any],
    code: str,
    message: str,
    hint: str,
) -> None:
    path = make(tmp_path)
    with pytest.raises(FsdpTuneError) as caught:
        results.push(path, **more)
    (problem,) = caught.value.problems
    assert problem.code == code
    assert message in problem.message
    assert str(problem.hint).startswith(hint.format(path))
    assert uploads == []


def test_output_of_a_merge_is_pushed_as_it_is(tmp_path: Path, uploads: Uploads) -> None:
    folder = output_only(tmp_path)
    results.push(folder, to="me/x", public=True)
    assert uploads[0][:2] == (folder, HubTarget("me/x", is_public=True))
