"""One machine sends the folders of a run: what it refuses, what it waits for, and what it sends again."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.cluster.mirror import sender as folders
from fsdp_tune.cluster.mirror.remote_run import MISSING_NAME, PENDING_NAME, RemoteRun
from fsdp_tune.cluster.mirror.sender import PINS, Sender
from fsdp_tune.core.atomic import Disk
from fsdp_tune.run.directory import CHECKPOINT_KIND, MERGE_RECORD, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, read_manifest
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import ContentError, UrlError
from fsdp_tune.run.written_files import seal_record
from tests.cluster.mirrors import (
    Elsewhere,
    complete_and_verified,
    complete_steps,
    make_run,
    save,
    send_all,
    state_of,
)

pytestmark = pytest.mark.usefixtures("disk_without_waits")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def sender(run: RunDir, remote: RemoteRun) -> Iterator[Sender]:
    made = Sender(run, remote)
    yield made
    made.close()


def sent_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are sent from now on, but for those of the run itself."""
    names, send = list[str](), RemoteDirectory.send

    def note(self: RemoteDirectory, source: Path, name: str, *rest: Any) -> Any:
        names.append(name)
        return send(self, source, name, *rest)

    monkeypatch.setattr(RemoteDirectory, "send", note)
    return names


def test_mirror_of_a_live_command_is_refused_with_its_owner(remote: RemoteRun, sender: Sender) -> None:
    other = Elsewhere(remote.directory)
    other.claim()
    with pytest.raises(UrlError, match=r"is in use: pid \d+ on node7") as caught:
        sender.open(0)
    assert caught.value.refusal == "other"
    other.release()


def test_folder_that_is_replaced_while_it_is_sent_is_not_damaged(
    run: RunDir, remote: RemoteRun, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint of a step that is trained again, or one that was rotated."""
    save(run, 5)
    sender.open(0)

    def replace_then_fail(_: RemoteDirectory, source: Path, *__: Any) -> None:
        if source.name == "__0_0.distcp":  # the first of several that are sent side by side
            save(run, 5, seed=1)
        raise ContentError("its digest differs")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "send", replace_then_fail)
        sender.send("checkpoint-5")
    assert sender.refused() == {}
    assert sender.waiting() == ["checkpoint-5"]
    sender.send("checkpoint-5")
    assert complete_steps(remote) == [5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("torn", "Expecting value"),
        (Manifest("fsdp-tune model", {}, {"step": 5}).to_json(), "it is not a complete checkpoint"),
        (Manifest(CHECKPOINT_KIND, {}, {"step": 6}).to_json(), "it is not a complete checkpoint"),
    ],
    ids=["torn", "kind", "step"],
)
def test_checkpoint_whose_manifest_is_of_something_else_is_refused(
    run: RunDir, remote: RemoteRun, sender: Sender, text: str, reason: str
) -> None:
    (save(run, 5) / MANIFEST_NAME).write_text(text)
    sender.open(0)
    with pytest.raises(ContentError, match=reason):
        sender.send("checkpoint-5")
    assert sender.refused().keys() == {"checkpoint-5"}
    assert sender.waiting() == [], "it is not tried again"
    assert complete_steps(remote) == []


def test_checkpoint_that_lacks_a_file_is_refused_on_the_only_machine(
    run: RunDir, remote: RemoteRun, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "OTHERS_SECONDS", 0.0)
    (save(run, 5) / "shards" / "__1_0.distcp").unlink()
    sender.open(0)
    with pytest.raises(ContentError, match=r"shards/__1_0\.distcp is missing"):
        sender.send("checkpoint-5")
    assert complete_steps(remote) == []
    assert not [name for name in remote.directory.list() if name.endswith(".distcp")], "nothing is sent"


def test_only_the_files_of_the_run_are_sent_if_they_alone_are_missing(
    tmp_path: Path, run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 5)
    assert send_all(run, remote)
    shutil.rmtree(tmp_path / "mirror" / "run" / "checkpoint-5.run")
    assert complete_steps(remote) == []
    names = sent_names(monkeypatch)
    assert send_all(run, remote, start=5)
    assert names == []
    assert complete_and_verified(remote, tmp_path / "check") == [5]


@pytest.mark.parametrize("is_newest", [True, False])
def test_files_that_no_machine_sends_are_waited_for_longer_if_no_checkpoint_is_newer(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch, *, is_newest: bool
) -> None:
    (save(run, 5) / "shards" / "__1_0.distcp").unlink()
    if not is_newest:
        save(run, 10)
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda _: now.__setitem__(0, now[0] + 5.0), time=time.time
    )
    monkeypatch.setattr(folders, "time", clock)
    sender = Sender(run, remote, has_others=True)
    sender.open(0)
    with pytest.raises(UrlError, match=r"1 files of checkpoint-5 are on no machine .*__1_0\.distcp"):
        sender.send("checkpoint-5")
    limit = folders.OTHERS_SECONDS if is_newest else folders.NEWER_SECONDS
    assert limit < now[0] <= limit + 10
    assert json.loads(remote.directory.read(f"checkpoint-5/{MISSING_NAME}") or b"") == ["shards/__1_0.distcp"]
    sender.close()


@pytest.fixture
def waited_for(tmp_path: Path, run: RunDir, remote: RemoteRun) -> Sender:
    """The second machine, which has a shard of checkpoint-5 that the first one waits for."""
    manifest = read_manifest(save(run, 5))
    assert manifest is not None
    remote.begin("checkpoint-5", manifest, {})
    remote.directory.write(f"checkpoint-5/{MISSING_NAME}", b'["shards/__1_0.distcp", "../mirror.json"]')
    return Sender(run, RemoteRun(*remote.url.rsplit("/", 1)), machine=1, has_others=True)


def test_other_machine_sends_what_is_missing_once_and_nothing_else(
    remote: RemoteRun, waited_for: Sender
) -> None:
    assert waited_for.send_missing()
    assert not waited_for.send_missing(), "it is there"
    assert {name for name in remote.directory.list() if name.endswith(".distcp")} == {
        "checkpoint-5/shards/__1_0.distcp"
    }


def test_other_machine_ignores_a_list_without_its_manifest(remote: RemoteRun, waited_for: Sender) -> None:
    remote.directory.remove(f"checkpoint-5/{PENDING_NAME}")
    assert not waited_for.send_missing()


@pytest.mark.parametrize("raw", [b"", b"5", b"{}", b"[" * 100_000], ids=lambda raw: str(raw[:9]))
def test_damaged_list_of_missing_files_is_an_error_of_the_mirror(
    remote: RemoteRun, waited_for: Sender, raw: bytes
) -> None:
    """The process that sends reports such an error, and looks again."""
    remote.directory.write(f"checkpoint-5/{MISSING_NAME}", raw)
    with pytest.raises(UrlError, match=r"checkpoint-5/missing\.json is damaged"):
        waited_for.send_missing()


def test_file_that_the_first_machine_no_longer_waits_for_does_not_appear(
    remote: RemoteRun, waited_for: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends another checkpoint of that step by now."""
    send = RemoteDirectory.send

    def replaced(self: RemoteDirectory, *rest: Any) -> Any:
        remote.directory.write(
            f"checkpoint-5/{PENDING_NAME}", Manifest(CHECKPOINT_KIND, {}, {"step": 5}).to_json().encode()
        )
        return send(self, *rest)

    monkeypatch.setattr(RemoteDirectory, "send", replaced)
    with pytest.raises(UrlError, match="is not what the first machine sends any more") as caught:
        waited_for.send_missing()
    assert caught.value.refusal == "other"
    assert not [name for name in remote.directory.list() if name.endswith(".distcp")]


def test_other_machine_detects_whether_the_mirror_has_its_newest_checkpoint(
    run: RunDir, remote: RemoteRun, waited_for: Sender
) -> None:
    assert not waited_for.has_newest()
    assert send_all(run, remote)
    assert waited_for.has_newest()
    (run.checkpoint(5) / MANIFEST_NAME).write_text("torn")
    assert waited_for.has_newest(), "a damaged one is not waited for"
    shutil.rmtree(run.checkpoint(5))
    assert waited_for.has_newest(), "it has no part of any"


def test_file_system_without_links_is_sent_from_the_folder_itself(
    tmp_path: Path, run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links")

    monkeypatch.setattr(Disk, "link", refuse)
    save(run, 5)
    assert send_all(run, remote)
    assert not (run.path / PINS).exists()
    assert complete_and_verified(remote, tmp_path / "check") == [5]


def test_model_that_was_changed_after_its_merge_is_not_sent(run: RunDir, remote: RemoteRun) -> None:
    run.merged.mkdir()
    (run.merged / "config.json").write_text("{}")
    entry = {"size_bytes": 2, "digest": "0" * 32}
    record = seal_record({"contents": {"config.json": entry}, "tensors": {}, "headers": {}})
    (run.merged / MERGE_RECORD).write_text(json.dumps(record))
    assert not send_all(run, remote)
    assert (
        "merged is damaged on this disk and is not sent: merged/config.json: its contents"
        in (state_of(run).refused["merged"])
    )
    assert f"merged/{MANIFEST_NAME}" not in remote.directory.list()


def test_outage_is_one_event_and_each_damaged_folder_another(run: RunDir, sender: Sender) -> None:
    secret = "https://user:s3cr3t@host/x"
    for error in (
        UrlError(f"{secret} timed out"),
        UrlError("again"),
        ContentError("checkpoint-5 is damaged"),
    ):
        sender.failed(error)
    events = [line["message"] for line in read_metrics(run) if line.get("event") == "mirror_failed"]
    assert [message.rpartition(" ")[2] for message in events] == ["out", "damaged"]
    assert "s3cr3t" not in events[0]
    assert state_of(run).failed_since is not None
    sender.succeeded()
    assert (state_of(run).failed_since, state_of(run).error) == (None, None)
    sender.failed(UrlError("no rights", "credentials"))
    assert (state_of(run).error, state_of(run).is_refused) == ("no rights", True)
    assert len([line for line in read_metrics(run) if line.get("event") == "mirror_failed"]) == 3


def test_progress_leaves_out_what_the_mirror_had_at_the_start(run: RunDir, remote: RemoteRun) -> None:
    for step in (5, 10):
        save(run, step)
    assert send_all(run, remote)
    save(run, 15)
    sender = Sender(run, RemoteRun(*remote.url.rsplit("/", 1)))
    sender.open(None)
    assert sender.waiting() == ["checkpoint-15", "checkpoint-10", "checkpoint-5"], "all are compared again"
    sender.note_progress(sender.waiting())
    size_bytes = sum(path.stat().st_size for path in run.checkpoint(15).rglob("*") if path.is_file())
    assert (state_of(run).waiting, state_of(run).left_bytes) == (["checkpoint-15"], size_bytes)
    assert (state_of(run).newest_step, state_of(run).pid) == (10, os.getpid())
    sender.close()
