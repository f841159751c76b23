"""Machines with a run directory each: the files of the first reach the others, and one checkpoint is chosen
of all parts."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.core.errors import FailedError, FsdpTuneError, Problem
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.resizing import OwnRun, other_data
from fsdp_tune.launch.machines import directories, store, tcp_store, verdicts
from fsdp_tune.launch.machines.directories import OwnDirectory
from fsdp_tune.launch.machines.rendezvous import Machines
from fsdp_tune.run.directory import Held, RunDir, held_checkpoints, inspect_checkpoint, latest_checkpoint
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.rank_files import Verdict
from tests.launch.links import Answers, CutStore, Network, identity, problem_of, start, until
from tests.launch.written_runs import write_parts

pytestmark = pytest.mark.usefixtures("quick_machines")


class OwnPlay:
    """Two machines in one process."""

    def __init__(self, folder: Path) -> None:
        self.network = Network(2)
        self.runs = [RunDir(folder / f"machine-{at}" / "run") for at in (0, 1)]
        self.installed: list[dict[str, bytes]] = []
        self.refusal: Problem | None = None
        for run in self.runs:
            run.logs.mkdir(parents=True)
            (run.path / "model").mkdir()
        self.folders = [folder / f"channel-{at}" for at in (0, 1)]
        for each in self.folders:
            each.mkdir()

    def _install(self, received: RunDir) -> Problem | None:
        files = (path for path in received.path.rglob("*") if path.is_file())
        self.installed.append(
            {path.relative_to(received.path).as_posix(): path.read_bytes() for path in files}
        )
        return self.refusal

    def machine(self, number: int) -> Machines:
        directory = OwnDirectory(self.runs[number], self.folders[number], digests=True, install=self._install)
        channel = self.network.channel(number, self.folders[number])
        there = identity(f"host-{number}")
        return Machines(
            self.runs[number],
            number,
            2,
            hang_seconds=20.0,
            channel=channel,
            identity=there,
            directory=directory,
        ).__enter__()


@pytest.fixture
def play(tmp_path: Path) -> Iterator[OwnPlay]:
    made = OwnPlay(tmp_path)
    yield made
    made.network.close()


def test_files_of_the_first_machine_reach_the_other_for_each_launch(
    play: OwnPlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "CHUNK_BYTES", 1000)
    first = play.runs[0]
    first.recipe_json.write_text("{}")
    (first.model / "tokenizer.json").write_bytes(bytes(range(256)) * 100)
    first.resume_json.write_text("one")
    both = play.machine(0), play.machine(1)
    start(*both)
    assert play.installed[0]["model/tokenizer.json"] == bytes(range(256)) * 100
    assert play.installed[0]["resume.json"] == b"one"
    first.resume_json.write_text("two")
    start(*both, launch=1)
    assert play.installed[-1]["resume.json"] == b"two"
    assert not play.runs[1].recipe_json.exists()  # what is written is the caller's part


def test_machine_that_cannot_install_the_files_ends_the_launch(play: OwnPlay) -> None:
    play.refusal = Problem("machines-differ", "machine 1 (host-1) prepares other data than machine 0")
    first, second = play.machine(0), play.machine(1)
    joining = Answers(second.join)
    assert "prepares other data" in problem_of(first.gather(0)).message
    joining.all()


ENDS = verdicts.verdict_of(FailedError(Problem("test", "ends")))


def count_slowly(progress: Callable[[int], object]) -> None:
    """For longer than machines are waited for that count nothing."""
    for _ in range(16):
        progress(100)
        time.sleep(0.04)


def fail(machine: Machines) -> None:
    with pytest.raises(FailedError), machine:
        raise FailedError(Problem("run-in-use", "the run is in use"))


def test_failure_of_a_machine_before_it_joins_ends_the_run(play: OwnPlay) -> None:
    first, second = play.machine(0), play.machine(1)
    fail(second)
    assert second.report.life is None
    with pytest.raises(FsdpTuneError) as caught:
        first.held_elsewhere()
    for problem in (caught.value.problems[0], problem_of(first.gather(0))):
        assert (problem.code, problem.message) == ("machine-failed", "machine 1: the run is in use")


def test_failure_before_the_first_machine_is_there_reaches_it(play: OwnPlay) -> None:
    second = play.machine(1)
    play.network.link(1).is_cut.set()
    failing = Answers(lambda: fail(second))
    time.sleep(0.1)
    play.network.link(1).is_cut.clear()
    failing.all()
    assert "the run is in use" in problem_of(play.machine(0).gather(0)).message


def test_end_of_the_first_machine_reaches_one_that_comes_soon_after(play: OwnPlay) -> None:
    first = play.machine(0)
    closing = Answers(lambda: fail(first))
    time.sleep(0.1)
    assert play.network.link(0).thread.is_alive()
    assert problem_of(play.machine(1).join()).message == "machine 0: the run is in use"
    closing.all()


def test_stop_is_not_delayed_by_a_machine_that_never_came(
    play: OwnPlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SERVED_SECONDS", 20.0)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), play.machine(0):
        raise KeyboardInterrupt
    assert time.monotonic() - began < 10.0


def test_checkpoints_are_hashed_only_after_a_launch(play: OwnPlay, monkeypatch: pytest.MonkeyPatch) -> None:
    second = play.machine(1)
    monkeypatch.setattr(OwnDirectory, "held", lambda *_, **__: pytest.fail("it was hashed"))
    fail(second)


@pytest.mark.parametrize("decides", [True, False])
def test_machine_that_counts_work_is_waited_for(
    play: OwnPlay, monkeypatch: pytest.MonkeyPatch, *, decides: bool
) -> None:
    first, second = play.machine(0), play.machine(1)
    monkeypatch.setattr(first, "hang_seconds", 0.3)

    def prepare_and_join() -> Verdict | None:
        count_slowly(second.advance)
        return second.join() if decides else second.join() or (second.next_launch(), None)[1]

    following = Answers(prepare_and_join)
    if decides:
        assert first.held_elsewhere() == []
        first.conclude(ENDS)
    else:
        assert first.gather(0) is None
    following.all()


def test_restart_waits_for_digests_of_another_machine(play: OwnPlay) -> None:
    write_parts(play.runs, 10)
    first, second = play.machine(0), play.machine(1)
    start(first, second)
    assert second.report.held is None

    def hash_slowly(progress: Callable[[int], object], *, compares: bool = True) -> tuple[Held, ...] | None:
        count_slowly(progress)
        return tuple(held_checkpoints(play.runs[1], digests=compares))

    second._directory.held = hash_slowly
    ending = Answers(lambda: second.end(ENDS))
    assert [each.step for each in first.held_elsewhere(0.3)] == [10]
    ending.all()


def taken(play: OwnPlay, damage: Callable[[bytes], bytes] = lambda raw: raw) -> Problem:
    """Why the second machine refuses the archive of the first."""
    offered = OwnDirectory(play.runs[0], play.folders[0], digests=False).offer()
    raw = (play.folders[0] / offered["archive"]).read_bytes()
    (play.folders[1] / offered["archive"]).write_bytes(damage(raw))
    problem = OwnDirectory(play.runs[1], play.folders[1], digests=False, install=lambda _: None).take(
        1, lambda: offered
    )
    assert problem is not None
    return problem


def test_archive_of_more_bytes_than_announced_is_refused(
    play: OwnPlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.runs[0].recipe_json.write_text("x" * 5000)
    monkeypatch.setattr(directories, "LARGEST_ARCHIVE_BYTES", 4999)
    assert "its 1 files have 5,000 bytes" in taken(play).message


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1] + b"x", lambda raw: raw[:-1]], ids=["changed", "cut"]
)
def test_damaged_archive_is_refused(play: OwnPlay, damage: Callable[[bytes], bytes]) -> None:
    play.runs[0].recipe_json.write_text("{}")
    assert taken(play, damage).code == "run-files-missing"


@pytest.mark.parametrize("chunk", [base64.b64encode(b"xx"), b"x"], ids=["larger", "damaged"])
def test_chunk_of_another_size_is_not_written(tmp_path: Path, chunk: bytes) -> None:
    class Wrong(CutStore):
        def get(self, key: str, /) -> bytes:
            return chunk

    document = {"files": {"archive": "0" * 32, "archive_bytes": "1"}}
    with pytest.raises(tcp_store.StoreFault, match="another size"):
        store.Archives(tmp_path).fetch(
            Wrong(cast(tcp_store.KeyValueStore, None), threading.Event()), document
        )
    assert list(tmp_path.iterdir()) == []


def test_newest_checkpoint_of_which_all_parts_are_there_is_chosen(play: OwnPlay) -> None:
    write_parts(play.runs, 10)
    write_parts(play.runs, 20)
    write_parts(play.runs, 30, on=(0,))  # the other machine was killed before its rename
    weights = play.runs[1].checkpoint(20) / "weights-1"
    weights.write_bytes(b"x" * weights.stat().st_size)
    first, second = play.machine(0), play.machine(1)
    joining = Answers(second.join)
    held = first.held_elsewhere()
    assert {each.step: each.is_verified for each in held} == {20: False, 10: True}
    checkpoint, rejected = latest_checkpoint(play.runs[0], digests=True, elsewhere=held)
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert [each.path.name for each in rejected] == ["checkpoint-20", "checkpoint-30"]
    assert f"1 of its 3 files is not here; host-1:{play.runs[1].path} had it" in rejected[0].reason
    first.conclude(ENDS)
    joining.all()


def test_parts_alone_are_no_complete_checkpoint(play: OwnPlay) -> None:
    write_parts(play.runs, 10)
    for run in play.runs:
        assert latest_checkpoint(run)[0] is None
        assert latest_checkpoint(run, elsewhere=None)[0] is not None
    (play.runs[0].checkpoint(10) / "weights-0").unlink()
    found = inspect_checkpoint(play.runs[0].checkpoint(10), digests=False, elsewhere=())
    assert "2 of its 3 files are not here" in str(found)


def test_missing_machine_is_named_before_the_start_is_decided(
    play: OwnPlay, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = play.machine(0)
    monkeypatch.setattr(first, "hang_seconds", 0.2)
    with pytest.raises(FsdpTuneError) as caught:
        first.held_elsewhere()
    assert caught.value.problems[0].code == "machines-missing"
    until(lambda: first.held_elsewhere(0.1) == [])


BASE = "600:1700000000000000000"


@pytest.mark.parametrize(
    ("mine", "said", "hint"),
    [
        (
            {"rows.jsonl": "600:1700000001000000005"},
            "rows.jsonl has another modification time on here",
            "`touch -d @1700000000.000000000 rows.jsonl`",
        ),
        (
            {"rows.jsonl": "601:1700000000000000000"},
            "rows.jsonl has 601 bytes on here and 600 on machine 0",
            "must be the same",
        ),
        (
            {"rows.jsonl": BASE, "sales (mine)": "rows:b"},
            "sales (mine) has other rows on here than on machine 0",
            "must be the same",
        ),
        ({}, "rows.jsonl is only on machine 0", "must be the same"),
        (
            {"rows.jsonl": BASE, "sales (mine)": "rows:a"},
            "here prepares other data than machine 0",
            "must be the same",
        ),
    ],
)
def test_file_that_differs_between_machines_is_named(mine: dict[str, str], said: str, hint: str) -> None:
    data, first = (
        SimpleNamespace(stamps=mine, key="a"),
        SimpleNamespace(stamps={"rows.jsonl": BASE, "sales (mine)": "rows:a"}, key="b"),
    )
    problem = other_data("here", cast(Prepared, data), cast(Prepared, first))
    assert problem is not None
    assert said in problem.message
    assert hint in str(problem.hint)
    assert other_data("here", cast(Prepared, first), cast(Prepared, first)) is None


def test_old_run_is_moved_aside_only_when_the_first_machine_starts_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.recipe_json.write_text("{}")
    assert run.is_used
    plan, missing = SimpleNamespace(run=run, machine_rank=1), cast(Any, None)
    own = OwnRun(missing, missing, cast(Any, plan), (), TrainOptions(overwrite=True), Observer(), ExitStack())
    refused = own._start_over(ResumeRequest("/data/run/checkpoint-8"))
    assert refused is not None
    assert "machine 0 resumes from /data/run/checkpoint-8" in refused.message
    assert run.recipe_json.exists()
    assert own._start_over(ResumeRequest()) is None
    assert not run.path.exists()
    run.logs.mkdir(parents=True)
    run.recipe_json.write_text("{}")  # the new run
    assert own._start_over(ResumeRequest("/data/run/checkpoint-4")) is None  # of a restart
    assert run.recipe_json.exists()
