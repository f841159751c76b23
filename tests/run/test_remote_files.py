"""Files at a URL: what counts as sent, what is compared, and what is refused."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from fsdp_tune.core.atomic import DISK, Disk
from fsdp_tune.run import remote_files, remote_requests
from fsdp_tune.run.manifest import DIGEST_CHUNK_BYTES, Digester, digest_data
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import ContentError, NoConditionalWritesError, UrlError
from tests.run.stores import Store

SIZE_BYTES = 6 * DIGEST_CHUNK_BYTES


@pytest.fixture
def failing_second_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second chunk that is written fails, once."""
    write, calls = DISK.write, []

    def fails(*args: object) -> object:
        calls.append(None)
        if len(calls) == 2:
            raise TimeoutError("slow")
        return write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(DISK, "write", fails)
    monkeypatch.setattr(remote_requests, "WAITS", (0.0,))


@pytest.mark.usefixtures("failing_second_write")
@pytest.mark.parametrize("is_sent", [True, False])
def test_progress_after_a_failed_attempt_is_that_of_the_bytes_that_count(
    tmp_path: Path, *, is_sent: bool
) -> None:
    data, digester, counted = bytes(SIZE_BYTES), Digester(), [0]
    digester.update(data)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a").write_bytes(data)
    directory = RemoteDirectory(f"file://{tmp_path}/{'new' if is_sent else 'there'}")

    def advance(size_bytes: int) -> None:
        counted.append(counted[-1] + size_bytes)

    if is_sent:
        directory.send(tmp_path / "there" / "a", "a", digester.entry(), advance)
    else:
        with pytest.raises(TimeoutError):
            directory.fetch("a", tmp_path / "b", digester.entry(), advance)
    assert min(counted) == 0
    assert max(counted) == (SIZE_BYTES if is_sent else 4 * DIGEST_CHUNK_BYTES)
    assert counted[-1] == (SIZE_BYTES if is_sent else 0)


class _Refused(Exception):
    """A response of botocore with this error code."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """What `fsspec` opens at any URL. Requests are repeated once, without a wait."""
    found = Store()
    monkeypatch.setattr("fsspec.core.url_to_fs", found.open_url)
    monkeypatch.setattr(remote_requests, "WAITS", (0.0,))
    return found


@pytest.fixture
def there(store: Store) -> RemoteDirectory:
    return RemoteDirectory("s3://bucket/run/")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"contents")
    return path


def sent(there: RemoteDirectory, source: Path, **options: Any) -> str:
    return there.send(source, "a/b", digest_data(b"contents"), lambda _: None, **options)


def refusal_of(call: Callable[[], object]) -> str | None:
    """The refusal of the UrlError that a call raises."""
    with pytest.raises(UrlError) as caught:
        call()
    return caught.value.refusal


def test_object_is_compared_by_the_checksum_of_the_store_and_not_read(
    store: Store, there: RemoteDirectory, source: Path
) -> None:
    store.fail("cat_file", AssertionError("it was read"))
    assert sent(there, source) == "the store's checksum"
    assert store.objects == {"bucket/run/a/b": b"contents"}


def test_object_without_a_known_checksum_is_read_back(
    store: Store, there: RemoteDirectory, source: Path
) -> None:
    store.has_checksums = False
    assert sent(there, source) == "reading back"


def test_object_whose_bytes_the_store_changes_is_removed(
    store: Store, there: RemoteDirectory, source: Path
) -> None:
    store.receive = lambda data: data[:-1] + b"?"
    with pytest.raises(UrlError, match=r"a/b was sent and reads back otherwise.*\(2 attempts\)"):
        sent(there, source)
    with pytest.raises(UrlError, match="a/b was sent and reads back otherwise"):
        there.write_verified("a/b", b"contents")
    assert store.objects == {}
    store.receive = lambda data: data
    there.write_verified("a/b", b"contents")
    assert there.read("a/b") == b"contents"


def test_upload_that_is_given_up_leaves_no_object(store: Store, there: RemoteDirectory, source: Path) -> None:
    """A file of fsspec completes its upload when it is collected."""

    def refuse() -> None:
        raise UrlError("another command has taken it over", "other")

    assert refusal_of(lambda: sent(there, source, check=refuse)) == "other"
    source.write_bytes(b"other")
    with pytest.raises(ContentError, match="source is not what the manifest lists"):
        sent(there, source)
    gc.collect()
    assert store.objects == {}


def test_request_is_repeated_after_an_error_that_may_pass_and_not_after_a_refusal(
    store: Store, there: RemoteDirectory
) -> None:
    store.objects["bucket/run/a"] = b"x"
    store.fail("cat_file", TimeoutError("slow"))
    assert there.read("a") == b"x"
    store.fail("cat_file", TimeoutError("slow"), TimeoutError("slow"))
    with pytest.raises(UrlError, match=r"slow \(2 attempts\)") as caught:
        there.read("a")
    assert caught.value.refusal is None
    store.fail("cat_file", PermissionError("denied"))
    assert refusal_of(lambda: there.read("a")) == "credentials"
    store.fail("info", PermissionError("denied"))
    assert refusal_of(lambda: there.entry("a")) == "credentials"


def test_names_are_listed_relative_to_the_directory_without_unusable_ones(
    store: Store, there: RemoteDirectory
) -> None:
    for name in ("run/a", "run/b/c", "run/d\\e", "runs/a"):
        store.objects[f"bucket/{name}"] = b"xy"
    assert {name: entry.size_bytes for name, entry in there.list().items()} == {"a": 2, "b/c": 2}
    assert set(there.list("b")) == {"b/c"}
    assert there.list("none") == {}, "some file systems raise for it"


def test_missing_file_is_none(store: Store, there: RemoteDirectory) -> None:
    assert (there.read("a"), there.entry("a"), there.modified("a")) == (None, None, None)
    there.remove("a")
    store.objects["bucket/run/a"] = b"x"
    assert (there.read("a"), there.modified("a")) == (b"x", 1e9)
    entry = there.entry("a")
    assert entry is not None
    assert (entry.size_bytes, entry.stamp) == (1, there.list()["a"].stamp)
    store.objects["bucket/run/a"] = b"y"
    assert there.entry("a") != entry, "the stamp changes with the contents"


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", ""])
def test_name_that_leads_out_of_the_directory_is_refused(
    store: Store, there: RemoteDirectory, name: str
) -> None:
    store.objects["bucket/a"] = b"x"
    for call in (there.read, there.remove, there.entry, lambda name: there.write(name, b"y")):
        assert refusal_of(lambda call=call: call(name)) == "other"
    assert store.objects == {"bucket/a": b"x"}


@pytest.mark.parametrize("is_local", [True, False])
def test_first_of_two_creators_has_the_file(
    tmp_path: Path, request: pytest.FixtureRequest, *, is_local: bool
) -> None:
    there = RemoteDirectory(f"file://{tmp_path}/new") if is_local else request.getfixturevalue("there")
    assert there.create("writers/1", b"one")
    assert not there.create("writers/1", b"two")
    assert there.read("writers/1") == b"one"


def test_refused_condition_is_a_file_that_is_there_and_an_unknown_one_is_another_error(
    store: Store, there: RemoteDirectory
) -> None:
    store.fail("pipe_file", _Refused("PreconditionFailed"))
    assert there.create("a", b"x") is False
    for unknown in (_Refused("NotImplemented"), OSError(errno.ENOSYS, "no conditions")):
        store.fail("pipe_file", unknown)
        with pytest.raises(NoConditionalWritesError, match="s3://bucket/run has no conditional writes"):
            there.create("a", b"x")
    store.fail("pipe_file", PermissionError("denied"))
    assert refusal_of(lambda: there.create("a", b"x")) == "credentials"
    assert store.objects == {}


def test_claim_that_the_disk_had_no_room_for_is_not_taken_for_another_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    there = RemoteDirectory(f"file://{tmp_path}/new")
    with monkeypatch.context() as patch:
        patch.setattr(DISK, "write", full)
        assert refusal_of(lambda: there.create("writers/1", b"one")) == "full"
    assert there.create("writers/1", b"one")


def fetched(there: RemoteDirectory, target: Path, data: bytes) -> None:
    there.fetch("a", target, digest_data(data), lambda _: None)


def test_download_names_what_is_wrong_with_the_file(
    store: Store, there: RemoteDirectory, tmp_path: Path
) -> None:
    with pytest.raises(ContentError, match="s3://bucket/run/a is missing"):
        fetched(there, tmp_path / "a", b"contents")
    store.objects["bucket/run/a"] = b"content"
    with pytest.raises(ContentError, match="run/a is shorter than its manifest lists"):
        fetched(there, tmp_path / "a", b"contents")
    store.fail("cat_file", _Refused("InvalidRange"))
    with pytest.raises(ContentError, match="run/a is shorter than its manifest lists"):
        fetched(there, tmp_path / "a", b"contents")
    store.objects["bucket/run/a"] = b"Contents"
    with pytest.raises(ContentError, match="run/a is not what its manifest lists"):
        fetched(there, tmp_path / "a", b"contents")
    store.fail("cat_file", PermissionError("denied"))
    assert refusal_of(lambda: fetched(there, tmp_path / "a", b"contents")) == "credentials"
    store.objects["bucket/run/a"] = b"contents"
    store.fail("cat_file", TimeoutError("slow"))
    fetched(there, tmp_path / "a", b"contents")
    assert (tmp_path / "a").read_bytes() == b"contents"


def test_requests_of_s3_are_not_repeated_by_a_third_layer(store: Store) -> None:
    RemoteDirectory("s3://bucket/run")
    assert store.options == {"config_kwargs": {"retries": {"max_attempts": 1}}}
    RemoteDirectory("gs://bucket/run")
    assert store.options == {}


@pytest.mark.parametrize(
    ("error", "refusal"), [(ImportError("Install s3fs to access S3"), "package"), (ValueError("no"), "other")]
)
def test_url_that_cannot_be_opened_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, error: Exception, refusal: str
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("fsspec.core.url_to_fs", fails)
    with pytest.raises(UrlError, match=str(error)) as caught:
        RemoteDirectory("s3://bucket/run")
    assert caught.value.refusal == refusal


def test_bytes_count_as_sent_when_they_are_on_the_disk(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = list[int](), Disk.fsync
    monkeypatch.setattr(remote_files, "PART_BYTES", 4)
    monkeypatch.setattr(remote_files, "DIGEST_CHUNK_BYTES", 3)

    def count(self: Disk, file: IO[bytes]) -> None:
        synced.append(file.tell())
        fsync(self, file)

    monkeypatch.setattr(Disk, "fsync", count)
    assert sent(RemoteDirectory(f"file://{tmp_path}/new"), source) == "reading back"
    assert synced == [6, 8], "after two pieces of three bytes, and at the end"


def test_folders_are_removed_unless_a_file_is_left(tmp_path: Path) -> None:
    folder, there = tmp_path / "new" / "a", RemoteDirectory(f"file://{tmp_path}/new")
    (folder / "b" / "c").mkdir(parents=True)
    (folder / "kept").mkdir()
    (folder / "kept" / "note").write_text("mine")
    there.remove_empty_folders("none")
    there.remove_empty_folders("a")
    assert [path.name for path in folder.iterdir()] == ["kept"]
    (folder / "kept" / "note").unlink()
    there.remove_empty_folders("a")
    assert not folder.exists()
    assert folder.parent.is_dir()
