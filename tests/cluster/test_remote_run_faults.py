"""A mirror whose files are not what this tool wrote, and the errors of a store at the start of a command."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fsdp_tune.cluster.mirror.remote_run import (
    IDENTITY_NAME,
    MISSING_NAME,
    PENDING_NAME,
    RemoteRun,
    for_each_file,
    mirror_error,
)
from fsdp_tune.core.errors import ExitCode, Where
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_data
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import Refusal, UrlError
from tests.cluster.mirrors import complete_steps, save, send_all

pytestmark = pytest.mark.usefixtures("disk_without_waits")


@pytest.mark.parametrize(
    ("url", "refusal", "code", "hint"),
    [
        (
            "gcs://bucket/runs",
            "package",
            "mirror-package",
            "pip install 'fsdp-tune[gs]'`, which brings gcsfs",
        ),
        ("s3://bucket/runs", "package", "mirror-package", "pip install 'fsdp-tune[s3]'`, which brings s3fs"),
        ("file:///mnt/a b/run", "absent", "mirror-missing", "`mkdir -p '/mnt/a b'`, mount it"),
        ("s3://bucket/runs", "absent", "mirror-missing", "create the bucket or container"),
        ("s3://bucket/runs", "clock", "mirror-clock", "timedatectl set-ntp true"),
        ("file:///mnt/a", "full", "mirror-full", "free space there, or correct `checkpoint.mirror`"),
        ("s3://bucket/runs", "credentials", "mirror-refused", "aws configure"),
        ("s3://bucket/runs", "other", "mirror-refused", "with the rights to list, read, write and delete"),
        ("s3://bucket/runs", None, "mirror-unreachable", "AWS_ENDPOINT_URL"),
    ],
)
def test_refusal_of_a_store_has_its_own_remedy(
    url: str, refusal: Refusal | None, code: str, hint: str
) -> None:
    error = mirror_error(url, UrlError("why", refusal))
    (problem,) = error.problems
    assert (problem.code, problem.message) == (code, f"the mirror {url} cannot be used: why")
    assert (problem.where.key, error.exit_code) == ("checkpoint.mirror", ExitCode.USAGE)
    assert hint in str(problem.hint)


def test_url_of_a_command_line_is_corrected_there() -> None:
    (problem,) = mirror_error("s3://b/run", UrlError("why", "full"), Where("s3://b/run")).problems
    assert (problem.message, problem.where) == ("it cannot be read: why", Where("s3://b/run"))
    assert str(problem.hint).endswith("correct the URL")


def test_store_that_does_not_return_what_was_written_is_refused_at_the_start(
    tmp_path: Path, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mirror").mkdir()
    remote.probe()
    assert remote.directory.list() == {}, "the probe is removed"
    monkeypatch.setattr(RemoteDirectory, "read", lambda *_: b"of a cache")
    with pytest.raises(UrlError, match="does not read back") as caught:
        remote.probe()
    assert caught.value.refusal == "other"


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"id": "one"}', b"\xff", b"[" * 100_000], ids=lambda raw: str(raw[:9])
)
def test_damaged_identity_is_not_that_of_a_new_mirror(remote: RemoteRun, raw: bytes) -> None:
    assert remote.identity() is None
    remote.claim("one")
    assert remote.identity() == "one"
    remote.directory.write(IDENTITY_NAME, raw)
    with pytest.raises(UrlError, match=r"mirror\.json is damaged") as caught:
        remote.identity()
    assert caught.value.refusal == "other"


def rewrite(remote: RemoteRun, folder: str, **changes: object) -> None:
    """Change the manifest of a folder; its own digest is right."""
    raw = remote.directory.read(f"{folder}/{MANIFEST_NAME}")
    assert raw is not None
    before = Manifest.from_json(raw)
    fields = {"kind": before.kind, "files": before.files, "facts": before.facts} | changes
    remote.directory.write(f"{folder}/{MANIFEST_NAME}", Manifest(**fields).to_json().encode())


@pytest.mark.usefixtures("sent")
@pytest.mark.parametrize(
    ("folder", "changes", "reason"),
    [
        ("checkpoint-5", {"kind": "fsdp-tune model"}, "its manifest is of `fsdp-tune model`"),
        ("checkpoint-5", {"facts": {"step": 6}}, "its manifest is of step `6`"),
        ("checkpoint-5", {"facts": {"step": "\x1b[31m"}}, "its manifest is of step `\\x1b[31m`"),
        ("checkpoint-5.run", {"facts": {}}, "its manifest is of step `5`"),
        ("checkpoint-5.run", {"kind": CHECKPOINT_KIND}, f"its manifest is of `{CHECKPOINT_KIND}`"),
    ],
)
def test_manifest_of_something_else_is_refused(
    remote: RemoteRun, folder: str, changes: dict[str, object], reason: str
) -> None:
    rewrite(remote, folder, **changes)
    assert remote.checkpoint(5) == reason
    assert remote.usable_steps(remote.directory.list()) == []


def started_checkpoint(remote: RemoteRun, **contents: bytes) -> Manifest:
    """A checkpoint of these files that is to be completed."""
    manifest = Manifest(
        CHECKPOINT_KIND, {name: digest_data(data) for name, data in contents.items()}, {"step": 7}
    )
    remote.begin("checkpoint-7", manifest, {})
    for name, data in contents.items():
        remote.directory.write(f"checkpoint-7/{name}", data)
    return manifest


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda there: there.remove("checkpoint-7/b"), "checkpoint-7/b was sent and is missing"),
        (
            lambda there: there.write("checkpoint-7/a", b"longer"),
            "checkpoint-7/a was sent and is 6 bytes instead of 3",
        ),
    ],
)
def test_folder_is_completed_only_if_its_files_are_there(
    remote: RemoteRun, change: object, reason: str
) -> None:
    manifest = started_checkpoint(remote, a=b"one", b=b"two")
    change(remote.directory)  # type: ignore[operator]
    with pytest.raises(UrlError, match=reason):
        remote.finish("checkpoint-7", manifest)
    assert f"checkpoint-7/{MANIFEST_NAME}" not in remote.directory.list()


def test_manifest_that_does_not_read_back_leaves_the_folder_pending(
    remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = started_checkpoint(remote, a=b"one")
    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "read", lambda *_: None)
        with pytest.raises(UrlError, match="was written and does not read back"):
            remote.finish("checkpoint-7", manifest)
    assert f"checkpoint-7/{PENDING_NAME}" in remote.directory.list()
    remote.directory.write(f"checkpoint-7/{MISSING_NAME}", b"[]")
    remote.finish("checkpoint-7", manifest)
    assert set(remote.directory.list()) == {"checkpoint-7/a", f"checkpoint-7/{MANIFEST_NAME}"}


def test_folder_with_an_unreadable_manifest_is_removed_by_what_is_pending_in_it(
    remote: RemoteRun, sent: RunDir
) -> None:
    """The files that this tool wrote are known; a file of someone else stays."""
    raw = remote.directory.read(f"checkpoint-5/{MANIFEST_NAME}")
    assert raw is not None
    remote.directory.write(f"checkpoint-5/{PENDING_NAME}", raw)
    remote.directory.write(f"checkpoint-5/{MANIFEST_NAME}", b"torn")
    remote.directory.write("checkpoint-5/note", b"mine")
    remote.take_back(5, remote.directory.list())
    assert remote.directory.read(f"checkpoint-5/{PENDING_NAME}") == raw, "also if the process is killed now"
    remote.directory.write(f"checkpoint-5/{MANIFEST_NAME}", b"torn")
    remote.remove(5, remote.directory.list())
    assert [name for name in remote.directory.list() if name.startswith("checkpoint-5")] == [
        "checkpoint-5/note"
    ]


def test_rotation_ends_what_a_process_that_was_killed_after_the_manifest_has_left(
    remote: RemoteRun, sent: RunDir
) -> None:
    for folder in ("checkpoint-5", "checkpoint-5.run"):
        remote.directory.write(f"{folder}/{PENDING_NAME}", b"{}")
    assert remote.rotate(1, kept=(), listing=remote.directory.list()) == []
    assert not [name for name in remote.directory.list() if name.endswith(PENDING_NAME)]
    assert complete_steps(remote) == [5]


@pytest.mark.parametrize(("keep", "kept", "left"), [(None, (), [3, 2, 1]), (0, (), [3]), (1, (1,), [3, 1])])
def test_rotation_never_removes_the_newest_and_what_is_kept(
    run: RunDir, remote: RemoteRun, keep: int | None, kept: tuple[int, ...], left: list[int]
) -> None:
    for step in (1, 2, 3):
        save(run, step)
    assert send_all(run, remote, keep=None)
    gone = remote.rotate(keep, kept=kept, listing=remote.directory.list())
    assert complete_steps(remote) == left
    assert sorted([*gone, *left]) == [1, 2, 3]


def test_incomplete_checkpoints_are_removed_except_the_one_that_is_sent(
    run: RunDir, remote: RemoteRun
) -> None:
    for step in (1, 2, 3):
        save(run, step)
    assert send_all(run, remote, keep=None)
    for step in (1, 2):
        remote.take_back(step, remote.directory.list())
    remote.remove_incomplete(remote.directory.list(), but=2)
    folders = {name.partition("/")[0] for name in remote.directory.list()}
    assert {"checkpoint-2", "checkpoint-3"} == {each for each in folders if each.count(".") == 0} - {
        "writers"
    }
    assert remote.pending_steps(remote.directory.list()) == [2]


def test_no_file_is_started_after_an_error() -> None:
    started = list[str]()

    def act(name: str) -> None:
        started.append(name)
        if name == "000":
            raise UrlError(name)
        time.sleep(0.02)

    names = [f"{number:03d}" for number in range(200)]
    with pytest.raises(UrlError, match="000"):
        for_each_file(act, reversed(names))
    assert len(started) < 50
