"""The process that sends: when it tries again, and how it ends."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.cluster.mirror import send as sending
from fsdp_tune.cluster.mirror.remote_run import RemoteRun
from fsdp_tune.cluster.mirror.send import follow, follow_first_machine, main
from fsdp_tune.cluster.mirror.writer import Writer
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.mirror_state import MirrorState, state_path
from fsdp_tune.run.remote_requests import UrlError
from tests.cluster.mirrors import complete_steps, make_run, save, state_of

pytestmark = pytest.mark.usefixtures("disk_without_waits")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "mirror").mkdir()
    run = make_run(tmp_path / "run")
    save(run, 5)
    return run


@pytest.fixture(autouse=True)
def polite(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process of the test keeps its priority."""
    niced = list[int]()
    monkeypatch.setattr(sending.os, "nice", niced.append)
    return niced


def started(monkeypatch: pytest.MonkeyPatch, run: RunDir, **changes: str) -> int:
    """Run the process in this one, with an input that has ended."""
    given = {
        "machine": "0",
        "machines": "1",
        "keep": "2",
        "start": "0",
        "claim": "none",
        "directory": "shared",
    }
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return main([str(run.path), f"file://{run.path.parent}/mirror", *(given | changes).values()])


def test_process_sends_what_is_left_and_ends_with_its_input(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch, polite: list[int]
) -> None:
    assert started(monkeypatch, run) == 0
    assert complete_steps(remote) == [5]
    assert polite == [10], "it takes no time from the ranks"
    other = Writer(remote.directory, Path("other"))
    assert other.claim() is None, "the claim has been given back"
    other.release()


def test_process_with_a_damaged_checkpoint_ends_with_1(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.checkpoint(5) / "trainer_state.json").write_text("{}")
    assert started(monkeypatch, run, keep="all", start="unknown") == 1
    assert complete_steps(remote) == []
    assert "checkpoint-5" in state_of(run).refused


def test_process_of_another_machine_ends_at_once_on_a_shared_disk(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert started(monkeypatch, run, machine="1", machines="2") == 0
    assert remote.directory.list() == {}


def test_process_writes_under_the_claim_of_its_command(
    run: RunDir, remote: RemoteRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = Writer(remote.directory, run.path)
    command.claim()
    assert started(monkeypatch, run, claim=command.key) == 0
    command.check()
    assert complete_steps(remote) == [5]
    command.release()


class Failing:
    """A sender whose attempts fail until these errors have been raised."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.failures: list[str] = []
        self.opened = 0
        self.left = ["checkpoint-5"]

    def waiting(self) -> list[str]:
        return list(self.left)

    def open(self, _: int | None) -> None:
        self.opened += 1

    def send(self, name: str) -> None:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.left.remove(name)

    def failed(self, error: Exception) -> None:
        self.failures.append(str(error))

    def refused(self) -> dict[str, str]:
        return {}

    def note_progress(self, _: list[str]) -> None: ...

    def succeeded(self) -> None: ...


def test_pauses_grow_and_start_again_after_a_success() -> None:
    sender, waits = Failing(*map(UrlError, "abcdef"), None, UrlError("g")), list[float]()
    ends = iter([False] * 9 + [True] * 9)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if seconds == 1.0 and len(sender.failures) == 6:
            sender.left.append("checkpoint-10")

    assert follow(sender, lambda: next(ends), 0, wait)  # type: ignore[arg-type]
    assert waits == [5.0, 15.0, 30.0, 60.0, 60.0, 60.0, 1.0, 5.0, 1.0]
    assert sender.failures == list("abcdefg")
    assert sender.opened == 1


def test_end_is_tried_twice_without_a_pause() -> None:
    sender, waits = Failing(*map(UrlError, "abc")), list[float]()
    assert not follow(sender, lambda: True, 0, waits.append)  # type: ignore[arg-type]
    assert (sender.failures, waits) == (["a", "b"], [0.0])


def test_other_machine_with_its_own_directory_ends_when_the_mirror_has_its_newest(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: Iterator[object] = iter([UrlError("a"), json.JSONDecodeError("b", "", 0), False, True])
    failed, waits, slept = list[str](), list[float](), list[float]()

    def send_missing() -> bool:
        error = next(tries)
        if isinstance(error, Exception):
            raise error
        newest.append(bool(error))
        return True

    newest = list[bool]()
    sender: Any = SimpleNamespace(
        send_missing=send_missing,
        succeeded=lambda: None,
        has_newest=lambda: newest[-1],
        failed=lambda error: failed.append(type(error).__name__),
    )
    MirrorState("-").write(state_path(run, 0))
    monkeypatch.setattr(sending, "time", SimpleNamespace(sleep=slept.append))
    ends = iter([False, True, True, True])
    follow_first_machine(sender, run, lambda: next(ends), waits.append, has_own_directory=True)
    assert failed == ["UrlError", "JSONDecodeError"]
    assert (waits, slept) == ([sending.POLL_SECONDS], [sending.POLL_SECONDS] * 2)


def test_other_machine_looks_less_often_until_it_sees_the_state_of_the_first(run: RunDir) -> None:
    waits, sent = list[float](), list[None]()
    sender: Any = SimpleNamespace(
        send_missing=lambda: sent.append(None), succeeded=lambda: None, has_newest=lambda: True
    )

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            MirrorState("-").write(state_path(run, 0))

    follow_first_machine(sender, run, lambda: False, wait)
    assert waits == [sending.REMOTE_POLL_SECONDS] * 2
    assert len(sent) == 2
