"""Copies of a run below a URL: complete or absent, verified, rotated, and downloaded again."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp_tune.cluster.mirror import send as sending
from fsdp_tune.cluster.mirror import sender as folders
from fsdp_tune.cluster.mirror.download import fetch_checkpoint
from fsdp_tune.cluster.mirror.remote_run import RemoteCheckpoint, RemoteRun, mirror_error
from fsdp_tune.cluster.mirror.send import follow
from fsdp_tune.cluster.mirror.sender import Sender
from fsdp_tune.core.atomic import STAGE_MARK, Disk
from fsdp_tune.run import remote_requests
from fsdp_tune.run.directory import CHECKPOINT_KIND, MERGE_RECORD, Checkpoint, RunDir, inspect_checkpoint
from fsdp_tune.run.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest
from fsdp_tune.run.metrics_file import read_metrics
from fsdp_tune.run.mirror_state import MirrorState, state_path
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import ContentError, UrlError
from tests.cluster.mirrors import (
    Crash,
    complete_and_verified,
    complete_steps,
    make_run,
    remote_checkpoint,
    save,
    send_all,
    state_of,
    without_waits_for_the_disk,
)


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_requests, "WAITS", (0.0,))
    without_waits_for_the_disk(monkeypatch)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


def test_mirror_has_the_checkpoints_of_the_run_and_downloads_into_a_run_directory(
    tmp_path: Path, run: RunDir, remote: RemoteRun
) -> None:
    save(run, 5)
    save(run, 10)
    assert send_all(run, remote)
    assert complete_and_verified(remote, tmp_path / "check") == [10, 5]
    found = remote_checkpoint(remote, 10)
    back = RunDir(tmp_path / "elsewhere" / "run")
    fetch_checkpoint(remote, found, back, lambda _: None)
    assert back.recipe_json.read_text() == run.recipe_json.read_text()
    assert back.metrics_jsonl.read_text() == '{"step": 1, "loss": 2.0}\n', (
        "the line that is being written is left out"
    )
    assert (back.model / "config.json").read_text() == "{}"
    assert sorted(path.name for path in back.path.iterdir()) == [
        "checkpoint-10",
        "logs",
        "metrics.jsonl",
        "model",
        "recipe.json",
    ]
    assert back.recipe_json.stat().st_mode & 0o077 == 0
    assert [line["folder"] for line in read_metrics(run) if line.get("event") == "mirrored"] == [
        "checkpoint-10",
        "checkpoint-5",
    ]


def test_second_command_sends_nothing_again(
    sent: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RemoteDirectory, "send", lambda *_: pytest.fail("a file was sent again"))
    assert send_all(sent, remote)
    remote.take_back(5, remote.directory.list())
    assert complete_steps(remote) == []
    assert send_all(sent, remote, start=5), "the files are still there, and only the manifest is written"
    assert complete_steps(remote) == [5]


def test_file_that_was_replaced_in_the_mirror_is_sent_again(
    tmp_path: Path, sent: RunDir, remote: RemoteRun
) -> None:
    shard = tmp_path / "mirror" / "run" / "checkpoint-5" / "shards" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    remote.take_back(5, remote.directory.list())
    assert send_all(sent, remote, start=5)
    assert complete_and_verified(remote, tmp_path / "check") == [5]


def test_rotation_keeps_the_newest_and_those_of_the_disk_and_foreign_files(
    tmp_path: Path, run: RunDir, remote: RemoteRun
) -> None:
    for step in (1, 2, 3):
        save(run, step)
        assert send_all(run, remote)
    assert complete_steps(remote) == [3, 2, 1], "all are on the disk"
    note = tmp_path / "mirror" / "run" / "checkpoint-1" / "note.txt"
    note.write_text("mine")
    shutil.rmtree(run.checkpoint(1))
    shutil.rmtree(run.checkpoint(2))
    save(run, 4)
    assert send_all(run, remote, start=3)
    assert complete_steps(remote) == [4, 3]
    assert [path.name for path in note.parent.iterdir()] == ["note.txt"], "what the tool did not write stays"
    assert not (tmp_path / "mirror" / "run" / "checkpoint-2").exists()
    assert not (tmp_path / "mirror" / "run" / "checkpoint-2.run").exists()


def test_checkpoints_after_the_start_are_taken_back_and_replaced(
    tmp_path: Path, run: RunDir, remote: RemoteRun
) -> None:
    for step in (5, 10, 15):
        save(run, step)
    assert send_all(run, remote)
    for step in (10, 15):
        shutil.rmtree(run.checkpoint(step))
    assert send_all(run, remote, start=5)
    assert complete_steps(remote) == [5], "the run trains the others again"
    save(run, 10, seed=1, ranks=1)
    assert send_all(run, remote, start=5)
    assert complete_and_verified(remote, tmp_path / "check") == [10, 5]
    assert not (tmp_path / "mirror" / "run" / "checkpoint-10" / "shards" / "__1_0.distcp").exists(), (
        "a file of the old one"
    )
    save(run, 20)
    assert send_all(run, remote, start=5)
    assert not (tmp_path / "mirror" / "run" / "checkpoint-15").exists(), "a newer one replaces it"


def test_halves_that_a_killed_process_left_are_removed(
    tmp_path: Path, run: RunDir, remote: RemoteRun, faulty: Callable[[dict[int, str]], Faults]
) -> None:
    for step, calls in ((5, 16), (10, 36)):
        faulty({calls: "crash"})
        save(run, step)
        with suppress(Crash):
            send_all(run, remote, start=step)
        shutil.rmtree(run.checkpoint(step))
    faulty({})
    left = {name.partition("/")[0] for name in remote.directory.list()}
    assert left >= {"checkpoint-5.run", "checkpoint-10.run", "checkpoint-10"}
    assert "checkpoint-5" not in left, "it was killed among the files of the run"
    assert complete_steps(remote) == []
    folder = tmp_path / "mirror" / "run" / "checkpoint-15" / "shards"
    folder.mkdir(parents=True)
    (folder / ".__0_0.distcp.stage-123").write_text("half")
    save(run, 15)
    assert send_all(run, remote, start=15)
    names = {name.partition("/")[0] for name in remote.directory.list()}
    assert names == {"mirror.json", "writers", "checkpoint-15", "checkpoint-15.run"}
    assert not [name for name in remote.directory.list() if ".stage-" in name]


def test_damaged_local_checkpoint_is_not_sent_and_others_are(
    tmp_path: Path, run: RunDir, remote: RemoteRun
) -> None:
    save(run, 5)
    shard = save(run, 10) / "shards" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    assert not send_all(run, remote), "the mirror does not have everything"
    assert complete_and_verified(remote, tmp_path / "check") == [5]
    state = state_of(run)
    assert "__0_0.distcp" in state.refused["checkpoint-10"]
    (event,) = [line for line in read_metrics(run) if line.get("event") == "mirror_failed"]
    assert "checkpoint-10 is damaged on this disk and is not sent" in event["message"]
    assert "__0_0.distcp" in event["message"]


@pytest.mark.parametrize("name", ["merged", "merged-quantised"])
def test_merged_model_is_mirrored_when_its_record_is_there(name: str, run: RunDir, remote: RemoteRun) -> None:
    folder = run.path / name
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    assert send_all(run, remote)
    assert f"{name}/manifest.json" not in remote.directory.list()
    (folder / MERGE_RECORD).write_text("{}")
    assert send_all(run, remote)
    assert {
        f"{name}/manifest.json",
        f"{name}/model.safetensors",
        f"{name}/merge.json",
    } <= remote.directory.list().keys()
    assert f"{name}/pending.json" not in remote.directory.list()


def test_mirror_of_another_run_is_left_alone(tmp_path: Path, remote: RemoteRun) -> None:
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other", identity="two")
    save(run, 5)
    assert send_all(run, remote)
    save(other, 6)
    assert not send_all(other, remote)
    assert complete_steps(remote) == [5]
    state = MirrorState.read(state_path(other, 0))
    assert state is not None
    assert "another run" in (state.error or "")
    assert state.waiting == []


def test_manifest_that_leaves_its_directory_is_refused(
    tmp_path: Path, sent: RunDir, remote: RemoteRun
) -> None:
    folder = tmp_path / "mirror" / "run"
    for name, kind, where in (
        ("../../evil", CHECKPOINT_KIND, "checkpoint-5"),
        ("run.lock", "fsdp-tune run files", "checkpoint-5.run"),
    ):
        before = (folder / where / MANIFEST_NAME).read_bytes()
        files = Manifest.from_json(before).files
        forged = Manifest(kind, {**files, name: next(iter(files.values()))}, {"step": 5})
        (folder / where / MANIFEST_NAME).write_text(forged.to_json())
        refused = remote.checkpoint(5)
        assert isinstance(refused, str)
        assert name in refused
        (folder / where / MANIFEST_NAME).write_bytes(before)
    assert isinstance(remote.checkpoint(5), RemoteCheckpoint)


@pytest.mark.parametrize(
    "files",
    [
        {".": 1},
        {"x/": 1},
        {"a//b": 1},
        {"trainer_state.json/x": 1},
        {"a\ud800b": 1},
        {"a" * 300: 1},
        {"y": -1},
    ],
    ids=["dot", "slash", "empty", "folder", "surrogate", "long", "negative"],
)
@pytest.mark.usefixtures("sent")
def test_manifest_with_names_that_no_file_has_is_refused(
    tmp_path: Path, remote: RemoteRun, files: dict[str, int]
) -> None:
    path = tmp_path / "mirror" / "run" / "checkpoint-5" / MANIFEST_NAME
    entries = {name: FileEntry(size_bytes, "0" * 32) for name, size_bytes in files.items()}
    path.write_text(
        Manifest(
            CHECKPOINT_KIND, {**Manifest.from_json(path.read_bytes()).files, **entries}, {"step": 5}
        ).to_json()
    )
    refused = remote.checkpoint(5)
    assert isinstance(refused, str)
    refused.encode()


@pytest.mark.parametrize("start", [None, 5])
def test_unreadable_manifest_does_not_count_as_the_newest(
    run: RunDir, remote: RemoteRun, start: int | None
) -> None:
    save(run, 5)
    for folder in ("checkpoint-99", "checkpoint-99.run"):
        remote.directory.write(f"{folder}/{MANIFEST_NAME}", b"x")
    assert send_all(run, remote, keep=1, start=start)
    state = state_of(run)
    assert state.newest_step == 5
    shutil.rmtree(run.checkpoint(5))
    save(run, 10)
    assert send_all(run, remote, keep=1, start=start)
    assert remote.usable_steps(remote.directory.list()) == [10]
    if start is not None:
        assert complete_steps(remote) == [10]


def test_request_that_botocore_does_not_send_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    class ParamValidationError(Exception):
        pass

    def request() -> None:
        raise ParamValidationError('Parameter validation failed:\nInvalid bucket name "my bucket"')

    monkeypatch.setattr(remote_requests.time, "sleep", lambda _: pytest.fail("it waited"))
    with pytest.raises(UrlError, match="Invalid bucket name") as caught:
        remote_requests.retried(request)
    assert caught.value.refusal == "other"


def test_foreign_names_are_not_listed_and_do_not_stop_the_sender(
    tmp_path: Path, run: RunDir, remote: RemoteRun
) -> None:
    save(run, 5)
    foreign = tmp_path / "mirror" / "run" / "x\\y"
    foreign.mkdir(parents=True)
    (foreign / f".f{STAGE_MARK}1").write_text("x")
    assert send_all(run, remote)
    assert not [name for name in remote.directory.list() if "\\" in name]


@pytest.mark.usefixtures("sent")
def test_damaged_download_is_refused_and_leaves_no_checkpoint(tmp_path: Path, remote: RemoteRun) -> None:
    shard = tmp_path / "mirror" / "run" / "checkpoint-5" / "shards" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    found = remote_checkpoint(remote, 5)
    back = RunDir(tmp_path / "back" / "run")
    with pytest.raises(ContentError, match="__0_0"):
        fetch_checkpoint(remote, found, back, lambda _: None)
    assert not back.path.exists()


def test_interrupted_download_continues_with_the_files_that_are_there(
    tmp_path: Path, run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 5, ranks=6)
    assert send_all(run, remote)
    found = remote_checkpoint(remote, 5)
    back, fetched = RunDir(tmp_path / "back" / "run"), list[str]()
    fetch = RemoteDirectory.fetch

    def fetch_or_fail(self: RemoteDirectory, name: str, *rest: Any) -> None:
        fetched.append(name)
        if name.endswith("__3_0.distcp") and fetched.count(name) == 1:
            raise UrlError("the connection was lost")
        fetch(self, name, *rest)

    monkeypatch.setattr(RemoteDirectory, "fetch", fetch_or_fail)
    with pytest.raises(UrlError):
        fetch_checkpoint(remote, found, back, lambda _: None)
    before = len(fetched)
    fetch_checkpoint(remote, found, back, lambda _: None)
    again = [name for name in fetched[before:] if name in fetched[:before] and "__3_0" not in name]
    assert len(again) < before - 1, "files that had arrived are not downloaded again"
    assert isinstance(inspect_checkpoint(back.checkpoint(5), digests=True), Checkpoint)
    assert [path.name for path in back.path.parent.iterdir()] == ["run"], "no stage is left"


def test_machines_without_a_shared_disk_send_their_own_files(
    tmp_path: Path, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sending, folders):
        monkeypatch.setattr(module, "POLL_SECONDS", 0.02)
    first, second = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    save(first, 5)
    shutil.copytree(first.checkpoint(5), second.checkpoint(5))
    (first.checkpoint(5) / "shards" / "__1_0.distcp").unlink()
    (second.checkpoint(5) / "shards" / "__0_0.distcp").unlink()
    (second.checkpoint(5) / MANIFEST_NAME).unlink()
    ended, wrong = threading.Event(), list[BaseException]()
    other = Sender(second, RemoteRun(remote.url.removesuffix("/run"), "run"), machine=1, has_others=True)

    def send_missing() -> None:
        try:
            sending.follow_first_machine(other, second, ended.is_set, lambda _: ended.wait(0.02))
        except BaseException as error:  # noqa: BLE001
            wrong.append(error)

    thread = threading.Thread(target=send_missing)
    thread.start()
    try:
        assert follow(Sender(first, remote, has_others=True), lambda: True, 0, lambda _: None)
    finally:
        ended.set()
        thread.join()
    assert not wrong
    assert complete_and_verified(remote, tmp_path / "check") == [5]
    assert "checkpoint-5/missing.json" not in remote.directory.list()


def test_mirror_that_cannot_be_read_does_not_have_the_newest_checkpoint(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older one that it has is not asked for instead."""
    save(run, 5)
    assert send_all(run, remote)
    save(run, 10)
    is_complete = RemoteRun.is_complete

    def fails_once(self: RemoteRun, name: str, manifest: Manifest) -> bool:
        if name == "checkpoint-10":
            raise UrlError("no answer")
        return is_complete(self, name, manifest)

    monkeypatch.setattr(RemoteRun, "is_complete", fails_once)
    sender = Sender(run, RemoteRun(*remote.url.rsplit("/", 1)), machine=1, has_others=True)
    with pytest.raises(UrlError):
        sender.has_newest()


def test_checkpoint_that_is_removed_while_its_size_is_read_is_no_failure_of_the_mirror(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rotated(self: Path, _pattern: str) -> Iterator[Path]:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))

    sender = Sender(run, RemoteRun(*remote.url.rsplit("/", 1)))
    monkeypatch.setattr(Path, "rglob", rotated)
    sender.note_progress(["checkpoint-5"])
    assert (state_of(run).waiting, state_of(run).left_bytes) == (["checkpoint-5"], 0)


def test_rotated_checkpoint_is_still_sent_from_its_links(
    tmp_path: Path, run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 5)
    send = RemoteDirectory.send

    def rotate_then_send(self: RemoteDirectory, *rest: Any) -> Any:
        shutil.rmtree(run.checkpoint(5), ignore_errors=True)
        return send(self, *rest)

    monkeypatch.setattr(RemoteDirectory, "send", rotate_then_send)
    assert send_all(run, remote)
    assert complete_and_verified(remote, tmp_path / "check") == [5]
    assert not (run.path / folders.PINS).exists()


def test_store_that_changes_bytes_never_has_a_complete_checkpoint(
    tmp_path: Path, run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 5)
    target = RemoteDirectory._target

    @contextmanager
    def flipping(
        self: RemoteDirectory, path: str, *, is_private: bool
    ) -> Iterator[Callable[[bytes], object]]:
        with target(self, path, is_private=is_private) as write:
            yield lambda data: write(bytes([data[0] ^ 1]) + data[1:])

    monkeypatch.setattr(RemoteDirectory, "_target", flipping)
    assert not send_all(run, remote)
    assert "reads back otherwise" in str(state_of(run).error)
    assert complete_steps(remote) == []
    monkeypatch.setattr(RemoteDirectory, "_target", target)
    assert send_all(run, remote)
    assert complete_and_verified(remote, tmp_path / "check") == [5]
    mirrored = [line for line in read_metrics(run) if line.get("event") == "mirrored"]
    assert [line["verified"] for line in mirrored] == ["reading back"]


def test_full_disk_keeps_the_complete_copy_and_makes_room_for_the_newest(
    tmp_path: Path, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, capacity = make_run(tmp_path / "run"), Disk.write, 40_000

    lock = threading.Lock()

    def limited(self: Disk, file: IO[bytes], data: bytes | memoryview) -> None:
        if "/mirror/" not in file.name or "distcp" not in file.name:
            write(self, file, data)
            return
        with lock:  # files are sent side by side
            used = sum(
                path.stat().st_size for path in (tmp_path / "mirror").rglob("*distcp*") if path.is_file()
            )
            if used + len(data) > capacity:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(self, file, data)
            file.flush()

    monkeypatch.setattr(Disk, "write", limited)
    save(run, 5, size=4)  # 16,800 bytes
    assert send_all(run, remote)
    save(run, 10, size=8)  # 33,600 bytes: one of two files fits
    assert not send_all(run, remote)
    state = state_of(run)
    assert "No space left" in (state.error or "")
    assert state.waiting == ["checkpoint-10"], "and not checkpoint-5, which is there"
    shutil.rmtree(run.checkpoint(10))
    save(run, 15, size=5)  # 21,000 bytes: fits without the half of checkpoint-10
    assert send_all(run, remote)
    assert complete_and_verified(remote, tmp_path / "check") == [15, 5]


class Faults:
    """Counts the operations of a remote directory; the planned ones fail before or after they happen, or kill
    the process."""

    def __init__(self, plan: dict[int, str]) -> None:
        self.plan, self.count, self.is_dead = plan, 0, False

    def around(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            if self.is_dead:
                raise Crash
            self.count += 1
            fault = self.plan.get(self.count)
            if fault == "crash":
                self.is_dead = True
                raise Crash
            if fault == "fail":
                raise OSError("the connection was lost")
            result = operation(*arguments, **options)
            if fault == "crash after":
                self.is_dead = True
                raise Crash
            if fault == "fail after":
                raise OSError("the answer was lost")
            return result

        return run


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[int, str]], Faults]]:
    originals = {
        name: getattr(RemoteDirectory, name) for name in ("list", "read", "write", "create", "remove", "send")
    }

    def plant(plan: dict[int, str]) -> Faults:
        faults = Faults(plan)
        for name, operation in originals.items():
            monkeypatch.setattr(RemoteDirectory, name, faults.around(operation))
        return faults

    yield plant
    for name, operation in originals.items():
        monkeypatch.setattr(RemoteDirectory, name, operation)


FAULT = st.sampled_from(["crash", "crash after", "fail", "fail after"])
LIVES = st.lists(st.dictionaries(st.integers(1, 70), FAULT, max_size=4), min_size=1, max_size=4)


def step_of(name: str) -> int:
    return int(name.partition("/")[0].removesuffix(".run").partition("-")[2])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=LIVES, steps=st.lists(st.sampled_from([5, 10, 15, 20]), min_size=1, max_size=4))
def test_after_any_interruptions_the_mirror_has_verified_checkpoints_or_none(
    lives: list[dict[int, str]], steps: list[int], faulty: Callable[[dict[int, str]], Faults], tmp_path: Path
) -> None:
    for folder in ("run", "mirror", "check"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    run, remote = make_run(tmp_path / "run"), RemoteRun(f"file://{tmp_path}/mirror", "run")
    for life, plan in enumerate(lives):
        step = steps[life % len(steps)]
        save(run, step, seed=life, ranks=1 + life % 2)
        for path in run.path.glob("checkpoint-*"):
            if int(path.name.partition("-")[2]) > step:
                shutil.rmtree(path)
        faulty(plan)
        with suppress(Crash):
            send_all(run, remote, keep=1, start=step)
        faulty({})
        complete_and_verified(remote, tmp_path / "check")
    assert send_all(run, remote, keep=1, start=steps[(len(lives) - 1) % len(steps)])
    local = sorted((int(path.name.partition("-")[2]) for path in run.path.glob("checkpoint-*")), reverse=True)
    assert complete_and_verified(remote, tmp_path / "check") == local
    for name in remote.directory.list():  # the rest is of later steps, which the run trains again
        assert (
            name in ("mirror.json",)
            or name.startswith("writers/")
            or step_of(name) in local
            or step_of(name) > local[0]
        ), name


def test_private_files_stay_private_in_a_directory(tmp_path: Path, run: RunDir, remote: RemoteRun) -> None:
    run.recipe_json.chmod(0o600)
    secret = save(run, 5) / "trainer_state.json"
    secret.chmod(0o600)
    assert send_all(run, remote)
    folder = tmp_path / "mirror" / "run"
    modes = {
        name: (folder / name).stat().st_mode & 0o777
        for name in ("checkpoint-5.run/recipe.json", "checkpoint-5/trainer_state.json")
    }
    assert set(modes.values()) == {0o600}, modes
    assert (
        folder / "checkpoint-5.run" / "metrics.jsonl"
    ).stat().st_mode & 0o777 == run.metrics_jsonl.stat().st_mode & 0o777


def test_file_of_an_earlier_checkpoint_with_the_same_size_is_not_taken_for_the_new_one(
    tmp_path: Path, remote: RemoteRun
) -> None:
    """Another machine sends what the first misses and the mirror lacks, by name and size."""
    run = make_run(tmp_path / "run")
    save(run, 5)
    assert send_all(run, remote)
    save(run, 5, seed=1)
    manifest = read_manifest(run.checkpoint(5))
    assert manifest is not None
    remote.begin("checkpoint-5", manifest, remote.directory.list())
    assert not [name for name in remote.directory.list("checkpoint-5") if name.endswith(".distcp")]


def test_hashing_a_model_counts_as_progress(run: RunDir, remote: RemoteRun) -> None:
    run.merged.mkdir()
    (run.merged / "model.safetensors").write_bytes(b"x" * 1000)
    (run.merged / MERGE_RECORD).write_text("{}")
    assert send_all(run, remote)
    state = state_of(run)
    assert state.hashed_bytes == 1002


def test_directory_without_permission_is_no_matter_of_a_login() -> None:
    error = mirror_error("file:///mnt/runs", UrlError("Permission denied", "credentials"))
    assert error.problems[0].hint == (
        "let this user list, read, write and delete there; or correct `checkpoint.mirror`"
    )
