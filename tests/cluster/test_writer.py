"""One command at a time writes to a mirror: a live one is refused, a dead one is replaced, and it finds
out."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fsdp_tune.cluster.mirror import writer as writing
from fsdp_tune.cluster.mirror.remote_run import RemoteRun
from fsdp_tune.cluster.mirror.send import follow
from fsdp_tune.cluster.mirror.sender import Sender
from fsdp_tune.cluster.mirror.writer import MirrorInUseError, Writer
from fsdp_tune.run.manifest import digest_data
from fsdp_tune.run.remote_files import RemoteDirectory
from fsdp_tune.run.remote_requests import NoConditionalWritesError, UrlError
from tests.cluster.mirrors import Elsewhere, complete_and_verified, make_run, save, send_all
from tests.launch.links import until


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("BEAT_SECONDS", 0.05),
        ("SILENCE_SECONDS", 0.5),
        ("POLL_SECONDS", 0.05),
        ("SETTLE_SECONDS", 0.0),
    ):
        monkeypatch.setattr(writing, name, seconds)


@pytest.fixture
def directory(tmp_path: Path) -> RemoteDirectory:
    (tmp_path / "mirror").mkdir()
    return RemoteDirectory(f"file://{tmp_path}/mirror/run")


def test_second_live_writer_is_refused_by_name(directory: RemoteDirectory) -> None:
    first, second, waits = Elsewhere(directory), Writer(directory, Path("run")), list[object]()
    first.claim()
    with pytest.raises(
        MirrorInUseError, match=r"on node7 since .* \(run /there/run\) writes to it"
    ) as caught:
        second.claim_patiently(waits.append)
    assert caught.value.is_certain
    assert len(waits) == 1
    first.check()
    with pytest.raises(UrlError):
        second.check()
    first.release()


def test_live_writer_of_the_same_process_is_refused_and_a_released_one_is_not(
    directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (Writer(directory, Path(name)) for name in ("run", "other"))
    first.claim()
    with pytest.raises(
        MirrorInUseError, match=rf"pid {os.getpid()} on .* \(run .*/run\) writes to it"
    ) as caught:
        second.claim()
    assert caught.value.is_certain
    first.check()
    with monkeypatch.context() as patched:
        patched.setattr(RemoteDirectory, "write", lambda *_, **__: pytest.fail("the end is not recorded"))
        first._is_away = True
        first.release()
    assert second.claim() is not None, "though the store has not recorded that the first one has ended"
    second.release()


def test_writer_that_gave_the_mirror_back_is_no_obstacle(directory: RemoteDirectory) -> None:
    for _ in range(3):
        writer = Elsewhere(directory)
        assert writer.claim() is None
        writer.release()
    assert len(directory.list("writers")) == 1, "earlier claims are removed"


def test_silent_writer_is_taken_over_and_finds_out(directory: RemoteDirectory, tmp_path: Path) -> None:
    first, second = Elsewhere(directory), Elsewhere(directory, "node8")
    first.claim()
    first.dies()
    taken = second.claim_patiently(lambda _: None)
    assert taken is not None
    assert taken.owner.host == "node7"
    second.check()
    with pytest.raises(UrlError, match="another command has taken it over"):
        first.check()
    (tmp_path / "shard").write_bytes(b"old")
    with pytest.raises(UrlError, match="taken it over"):
        directory.send(
            tmp_path / "shard", "checkpoint-5/shard", digest_data(b"old"), lambda _: None, first.check
        )
    assert directory.read("checkpoint-5/shard") is None, "what it was sending does not appear"
    second.release()


def test_claim_that_the_store_dates_far_back_is_taken_over_at_once(
    directory: RemoteDirectory, tmp_path: Path
) -> None:
    first, second = Elsewhere(directory), Elsewhere(directory, "node8")
    first.claim()
    first.dies()
    (claim,) = (tmp_path / "mirror/run/writers").iterdir()
    os.utime(claim, (time.time() - 100, time.time() - 100))
    assert second.claim() is not None
    second.release()


CLAIMS = """
import sys, time, pathlib
from fsdp_tune.cluster.mirror.writer import Writer
from fsdp_tune.run.remote_files import RemoteDirectory
Writer(RemoteDirectory(sys.argv[1]), pathlib.Path("run")).claim()
print("claimed", flush=True)
time.sleep(100)
"""


def test_killed_writer_of_this_machine_is_taken_over_at_once_and_a_live_one_is_not(
    directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SILENCE_SECONDS", 1000.0)
    child = subprocess.Popen([sys.executable, "-c", CLAIMS, directory.url], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "claimed\n"
    second = Writer(directory, Path("run"))
    with pytest.raises(MirrorInUseError, match=f"pid {child.pid}") as caught:
        second.claim()
    assert caught.value.is_certain
    child.kill()
    child.wait()
    child.stdout.close()
    taken = second.claim()
    assert taken is not None
    assert taken.owner.pid == child.pid
    second.release()


def test_of_several_at_once_one_succeeds(directory: RemoteDirectory) -> None:
    writers, owned, barrier = (
        [Elsewhere(directory, f"node{each}") for each in range(8)],
        list[Writer](),
        threading.Barrier(8),
    )

    def claim(writer: Writer) -> None:
        barrier.wait()
        try:
            writer.claim_patiently(lambda _: None)
        except MirrorInUseError:
            return
        owned.append(writer)

    threads = [threading.Thread(target=claim, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = owned
    winner.check()
    winner.release()


def test_store_without_conditional_writes_shows_the_loser_that_it_lost(
    directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_: object) -> bool:
        raise NoConditionalWritesError

    monkeypatch.setattr(RemoteDirectory, "create", create)
    first, second = Elsewhere(directory), Elsewhere(directory, "node8")
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_numbers", lambda _: [])  # both saw no other claim
        first._create(1)
        second._create(1)
    first._number = second._number = 1
    second.check()
    with pytest.raises(UrlError, match="taken it over"):
        first.check()


def test_owner_continues_in_a_mirror_that_was_emptied(directory: RemoteDirectory, tmp_path: Path) -> None:
    first = Elsewhere(directory)
    first.claim()
    for claim in (tmp_path / "mirror/run/writers").iterdir():
        claim.unlink()
    first.check()
    with pytest.raises(MirrorInUseError):
        Elsewhere(directory, "node8").claim()
    first.release()


def test_sender_whose_mirror_was_taken_over_changes_nothing_in_it(
    tmp_path: Path, directory: RemoteDirectory
) -> None:
    run, remote = make_run(tmp_path / "run"), RemoteRun(f"file://{tmp_path}/mirror", "run")
    save(run, 5)
    assert send_all(run, remote)
    command = Elsewhere(directory)
    command.claim()
    command.dies()
    sender = Sender(run, RemoteRun(f"file://{tmp_path}/mirror", "run"), keep=1, claim=command.key)
    other = Elsewhere(directory, "node8")
    other.claim_patiently(lambda _: None)
    before = remote.directory.list()
    save(run, 10)
    assert not follow(sender, lambda: True, 0, lambda _: None)
    after = remote.directory.list()
    assert {name: entry for name, entry in after.items() if not name.startswith("writers/")} == {
        name: entry for name, entry in before.items() if not name.startswith("writers/")
    }
    other.release()
    assert complete_and_verified(remote, tmp_path / "check") == [5]


def test_claim_whose_answers_were_all_lost_is_completed_by_the_process_that_sends(
    directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, command = RemoteDirectory.create, Writer(directory, Path("run"))

    def lose_answer(self: RemoteDirectory, name: str, data: bytes) -> bool:
        create(self, name, data)
        raise UrlError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "create", lose_answer)
        with pytest.raises(UrlError):
            command.claim()
    assert not command.is_owner
    sender = Elsewhere(directory)  # another process, for which the command's is a live one
    sender.adopt(command.key)
    assert not sender.is_owner
    assert sender.claim() is None
    sender.check()
    sender.release()


def test_claim_without_conditions_that_another_one_replaced_is_not_kept(
    directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read back after a while, in which the other claim arrives."""
    first, second, waits = Elsewhere(directory), Elsewhere(directory, "node8"), list[float]()

    def create(*_: object) -> bool:
        raise NoConditionalWritesError

    def settle(seconds: float) -> None:
        waits.append(seconds)
        directory.write("writers/00000001.json", second._record.to_json())

    monkeypatch.setattr(RemoteDirectory, "create", create)
    monkeypatch.setattr(writing, "time", SimpleNamespace(sleep=settle, monotonic=time.monotonic))
    monkeypatch.setattr(writing, "SETTLE_SECONDS", 3.0)
    with pytest.raises(MirrorInUseError) as caught:
        first.claim()
    assert (caught.value.is_certain, first.is_owner, waits) == (False, False, [3.0])
    with pytest.raises(UrlError, match="another command may write to it"):
        first.check()


@contextmanager
def outage(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No directory is listed in the block, which begins when an owner has noticed it."""
    tries = threading.Event()

    def away(*_: object) -> None:
        tries.set()
        raise UrlError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteDirectory, "list", away)
        assert tries.wait(5.0)
        yield patch


def test_owner_of_a_store_that_does_not_respond_leaves_its_claim_as_it_is(
    directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end would take the time of the requests, and a later command waits for its silence."""
    first = Elsewhere(directory)
    first.claim()
    with outage(monkeypatch) as patch:
        until(lambda: first._is_away)
        patch.setattr(RemoteDirectory, "write", lambda *_, **__: pytest.fail("the end is not recorded"))
        first.release()
    (name,) = directory.list("writers")
    record = writing.WriterRecord.from_json(directory.read(name) or b"")
    assert record is not None
    assert not record.has_ended


def test_claim_is_kept_after_an_outage(directory: RemoteDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Elsewhere(directory)
    first.claim()
    with outage(monkeypatch):
        pass
    until(lambda: not first._is_away)
    first.release()
    (name,) = directory.list("writers")
    record = writing.WriterRecord.from_json(directory.read(name) or b"")
    assert record is not None
    assert record.has_ended


@pytest.mark.parametrize(
    "damage",
    [b"", b"[]", b'{"pid": 1}', b'"beat": "x"', b'"beat": [1]', b'"beat": 1e999', b"[" * 100_000],
    ids=["empty", "list", "incomplete", "beat of letters", "beat of a list", "infinite beat", "nested"],
)
def test_damaged_claim_of_another_command_is_replaced_once_it_is_silent(
    directory: RemoteDirectory, damage: bytes
) -> None:
    other = Elsewhere(directory, "node8")
    raw = damage
    if damage.startswith(b'"beat"'):
        raw = other._record.to_json().replace(b'"beat": 0', damage)
        assert raw != other._record.to_json()
    directory.write("writers/00000001.json", raw)
    mine, waits = Elsewhere(directory), list[object]()
    assert mine.claim_patiently(waits.append) is None, "it has no owner to be named"
    mine.check()
    assert waits == [None]
    mine.release()
