"""`merge-checkpoint URL`: the weights of a mirrored checkpoint, merged, and nothing of the download left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_tune.cluster.mirror.remote_run import MirrorIdentity, RemoteRun
from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.jobs.results import merge_checkpoint
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import UrlError
from tests.cli.conftest import Done
from tests.cluster.test_remote_run import send_all
from tests.merge.checkpoints import finish_checkpoint, make_run, merged_tensors

STATES = {step: {"model.norm.weight": torch.full((64,), float(step))} for step in (10, 20)}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of a run whose mirror has checkpoint-10 and checkpoint-20, with an optimizer; the run itself is
    gone."""
    path = make_run(tmp_path / "gone" / "tiny", STATES)
    run = RunDir(path)
    run.logs.mkdir()
    run.model.mkdir()
    (run.model / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    MirrorIdentity("one").write(run.mirror_json)
    for step in STATES:
        (run.checkpoint(step) / "optimizer_0").mkdir()
        (run.checkpoint(step) / "optimizer_0" / "__0_0.distcp").write_bytes(b"m" * 4096)
        finish_checkpoint(run.checkpoint(step), step)
    remote = RemoteRun(f"file://{tmp_path}/mirror", "tiny")
    assert send_all(run, remote)
    path.parent.rename(tmp_path / "away")
    return remote.url


def options(output: Path, **more: Any) -> MergeOptions:
    return MergeOptions(output=output, verify="quick", **more)


def test_newest_checkpoint_of_a_mirrored_run_is_merged_without_its_optimizer(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched, fetch = list[str](), RemoteDirectory.fetch

    def remember(self: RemoteDirectory, name: str, *rest: Any) -> None:
        fetched.append(name)
        fetch(self, name, *rest)

    monkeypatch.setattr(RemoteDirectory, "fetch", remember)
    (tmp_path / "out").mkdir()
    result = merge_checkpoint(url, options(tmp_path / "out" / "merged"))
    assert (result.source, result.step) == (f"{url}/checkpoint-20", 20)
    assert torch.equal(
        merged_tensors(result.output)["model.norm.weight"].float(), STATES[20]["model.norm.weight"]
    )
    record = json.loads((result.output / "merge.json").read_text())
    assert record["source"] == [f"{url}/checkpoint-20"]
    assert record["companions"] == f"{url}/checkpoint-20.run/model"
    assert str(tmp_path / "out") not in json.dumps(record)
    assert not [name for name in fetched if "optimizer" in name]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["merged"], (
        "nothing of the download is left"
    )


def test_command_merges_the_checkpoint_that_a_url_names(
    url: str, tmp_path: Path, cli: Callable[..., Done]
) -> None:
    done = cli("merge-checkpoint", f"{url}/checkpoint-10", "--output", str(tmp_path / "merged"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == f"{url}/checkpoint-10"
    assert torch.equal(
        merged_tensors(tmp_path / "merged")["model.norm.weight"].float(), STATES[10]["model.norm.weight"]
    )


@pytest.mark.parametrize(
    ("end", "more", "code", "says"),
    [
        ("/checkpoint-15", {}, "merge-url-checkpoint", "has no complete checkpoint-15"),
        ("", {"step": 15}, "merge-url-checkpoint", "has no complete checkpoint-15"),
        ("/checkpoint-10", {"step": 20}, "merge-url", "`--step 20` is not checkpoint-10"),
        ("", {"best": True}, "merge-url", "on this disk"),
        ("x", {}, "merge-url-checkpoint", "has no complete checkpoint"),
    ],
)
def test_url_without_that_checkpoint_is_refused_with_those_that_are_there(
    url: str, tmp_path: Path, end: str, more: dict[str, Any], code: str, says: str
) -> None:
    with pytest.raises(FsdpTuneError, match=says) as caught:
        merge_checkpoint(f"{url}{end}", options(tmp_path / "out" / "merged", **more))
    (problem,) = caught.value.problems
    assert (problem.code, caught.value.exit_code) == (code, 2)
    if "15" in says:
        assert problem.hint == "complete there: checkpoint-20, checkpoint-10"
    assert not (tmp_path / "out").exists()


def test_url_of_another_protocol_and_a_missing_output_are_refused(url: str, tmp_path: Path) -> None:
    for source in ("https://host/run", "memory://run", "s3://key:s3cr3t@bucket/run"):
        with pytest.raises(FsdpTuneError, match="is not the URL of a mirrored run") as caught:
            merge_checkpoint(source, options(tmp_path / "merged"))
        assert "s3cr3t" not in str(caught.value)
    with pytest.raises(FsdpTuneError, match="`--output`"):
        merge_checkpoint(url, MergeOptions())


def test_damaged_copy_is_refused_and_leaves_nothing(url: str, tmp_path: Path) -> None:
    shard = next(Path(url.removeprefix("file://")).glob("checkpoint-20/*/*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))
    for shard in Path(url.removeprefix("file://")).glob("checkpoint-20/pytorch_model_fsdp_0/*.distcp"):
        shard.write_bytes(bytes(shard.stat().st_size))
    (tmp_path / "out").mkdir()
    with pytest.raises(FsdpTuneError, match="is not what its manifest lists") as caught:
        merge_checkpoint(url, options(tmp_path / "out" / "merged"))
    assert caught.value.exit_code == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_secret_in_a_url_is_not_printed(tmp_path: Path) -> None:
    with pytest.raises(FsdpTuneError, match="has no complete checkpoint") as caught:
        merge_checkpoint(f"file://{tmp_path}/hf_{'a' * 34}", options(tmp_path / "merged"))
    assert "a" * 34 not in str(caught.value)


def test_missing_file_of_a_copy_is_named(url: str, tmp_path: Path) -> None:
    shard = next(Path(url.removeprefix("file://")).glob("checkpoint-20/pytorch_model_fsdp_0/*.distcp"))
    shard.unlink()
    with pytest.raises(
        FsdpTuneError, match=f"the checkpoint is damaged: .*{shard.name} is missing"
    ) as caught:
        merge_checkpoint(url, options(tmp_path / "merged"))
    assert caught.value.problems[0].code == "merge-incomplete-checkpoint"
    assert "--step" in f"{caught.value.problems[0].hint}"


def test_interrupted_download_is_continued(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched, fetch = list[str](), RemoteDirectory.fetch

    def fail(self: RemoteDirectory, name: str, *rest: Any) -> None:
        if name.endswith("recipe.json"):
            raise UrlError("the connection was lost")
        fetch(self, name, *rest)

    def remember(self: RemoteDirectory, name: str, *rest: Any) -> None:
        fetched.append(name)
        fetch(self, name, *rest)

    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "fetch", fail)
        with pytest.raises(FsdpTuneError, match="the connection was lost") as caught:
            merge_checkpoint(url, options(tmp_path / "out" / "merged"))
    assert "checkpoint.mirror" not in f"{caught.value.problems[0]}"
    (left,) = (tmp_path / "out").iterdir()
    assert left.stat().st_mode & 0o777 == 0o700, "the recipe is in it"
    monkeypatch.setattr(RemoteDirectory, "fetch", remember)
    # no room but for the files that are missing
    run_files = (tmp_path / "mirror" / "tiny" / "checkpoint-20.run").rglob("*")
    free = [sum(file.stat().st_size for file in run_files if file.is_file())]
    usage = shutil.disk_usage

    def first_full(path: Path) -> Any:
        return SimpleNamespace(free=free.pop()) if free else usage(path)

    monkeypatch.setattr(shutil, "disk_usage", first_full)
    merge_checkpoint(url, options(tmp_path / "out" / "merged"))
    assert free == []
    assert not [name for name in fetched if name.endswith(".distcp")], (
        "files that had arrived are not downloaded again"
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["merged"]


def test_newest_checkpoint_with_a_readable_manifest_is_merged(
    url: str, tmp_path: Path, cli: Callable[..., Done]
) -> None:
    mirror = Path(url.removeprefix("file://"))
    (mirror / "checkpoint-20" / "manifest.json").write_text("{")
    done = cli("merge-checkpoint", url, "--output", str(tmp_path / "merged"), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["source"] == f"{url}/checkpoint-10"
    (notice,) = [notice for notice in answer["notices"] if notice["code"] == "checkpoint-rejected"]
    assert notice["message"].startswith("checkpoint-20 of the mirror is not used: ")
    (mirror / "checkpoint-10" / "manifest.json").write_text("{")
    with pytest.raises(
        FsdpTuneError, match=r"no checkpoint can be merged: checkpoint-20 .*; checkpoint-10 "
    ) as caught:
        merge_checkpoint(url, options(tmp_path / "other"))
    assert caught.value.exit_code == 1
