"""A checkpoint is complete or absent, training does not change it while it is written, and rotation deletes
only own ones."""

from __future__ import annotations

import functools
import json
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fsdp_tune.run.directory import (
    CHECKPOINT_KIND,
    Rejected,
    RunDir,
    complete_checkpoints,
    inspect_checkpoint,
    latest_checkpoint,
)
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.manifest import (
    DAMAGE_NAME,
    MANIFEST_NAME,
    Manifest,
    damage,
    digest_file,
    list_files,
    read_manifest,
)
from fsdp_tune.run.rotation import make_way, remove_leftovers, rotate
from fsdp_tune.worker.checkpoint import save as saving
from fsdp_tune.worker.checkpoint.save import Checkpointer, Saved
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.worker.short_runs import STEPS, new_run, short_run, trained


def complete(run: RunDir, step: int, *, kind: str = CHECKPOINT_KIND) -> Path:
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes([step]))
    entries = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(Manifest(kind, entries, {"step": step}).to_json())
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_seconds_of_a_save_are_from_its_request(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, *, asynchronous: bool
) -> None:
    """What is copied while training waits counts too: a stop must come that long before the end."""
    found: list[Saved] = []
    saver: Any = object.__new__(Checkpointer)
    saver.__dict__.update(
        run=run,
        device_type="cpu",
        asynchronous=asynchronous,
        report=found.append,
        live=SimpleNamespace(full=True),
    )
    saver.heartbeat = SimpleNamespace(during=lambda *_: nullcontext())
    monkeypatch.setattr(saver, "_snapshot", lambda *_: time.sleep(0.2) or SimpleNamespace(step=1))
    monkeypatch.setattr(saver, "_write", lambda *_: time.sleep(0.1) or (7, None))
    monkeypatch.setattr(saver, "_rotate", lambda *_: None)
    saver.save(1, "", {}, best_step=None)
    saver.wait()
    (saved,) = found
    assert (saved.error, saved.size_bytes) == (None, 7)
    assert saved.seconds >= 0.3
    assert saved.stall_seconds >= (0.2 if asynchronous else 0.3)
    assert saver.longest_seconds == saved.seconds


def steps(run: RunDir) -> list[int]:
    return [checkpoint.step for checkpoint in complete_checkpoints(run)[0]]


@pytest.mark.parametrize(
    ("keep", "protected", "left"),
    [
        (2, set(), [50, 40]),
        (1, {10}, [50, 10]),
        (0, set(), [50]),
        (None, set(), [50, 40, 30, 20, 10]),
        (9, set(), [50, 40, 30, 20, 10]),
    ],
)
def test_rotation_keeps_newest_and_protected_checkpoints(
    run: RunDir, keep: int | None, protected: set[int], left: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        complete(run, step)
    gone = rotate(run, keep, protected=protected)
    assert steps(run) == left
    assert sorted(gone) == sorted(run.checkpoint(step) for step in {10, 20, 30, 40, 50} - set(left))
    assert not [path for path in run.path.iterdir() if path.name.startswith(".")], "nothing half deleted"


def test_rotation_deletes_only_own_complete_checkpoints(run: RunDir) -> None:
    for step in (10, 20, 30):
        complete(run, step)
    other_kind = complete(run, 5, kind="something else")
    damaged = complete(run, 6)
    (damaged / "weights").unlink()
    mine = run.path / "checkpoint-best"
    mine.mkdir()
    link = run.path / "checkpoint-7"
    link.symlink_to(mine)
    file = run.path / "checkpoint-8"
    file.write_text("a file")
    rotate(run, 1, protected=set())
    assert steps(run) == [30]
    assert other_kind.is_dir()
    assert damaged.is_dir()
    assert mine.is_dir()
    assert link.is_symlink()
    assert file.is_file()


def test_files_of_others_make_way_for_a_checkpoint_under_a_visible_name(run: RunDir) -> None:
    for step in (1, 2):
        complete(run, step)
    (run.checkpoint(2) / MANIFEST_NAME).write_text("damaged")
    run.checkpoint(3).mkdir()
    assert [make_way(run.checkpoint(step)) for step in (1, 2, 3, 4)] == [None] * 4, "ours, empty or absent"
    complete(run, 5, kind="something else")
    run.checkpoint(6).mkdir()
    (run.checkpoint(6) / "notes.txt").write_text("theirs")
    run.checkpoint(7).write_text("a file")
    run.checkpoint(8).symlink_to("nowhere")
    (run.path / "other-checkpoint-8").touch()
    sentences = [make_way(run.checkpoint(step)) for step in (5, 6, 7, 8)]
    assert (
        sentences[3]
        == "checkpoint-8 was there and is no checkpoint of this run; it is now other-checkpoint-8-2"
    )
    moved = [run.path / f"other-checkpoint-{name}" for name in ("5", "6", "7", "8-2")]
    assert (moved[0] / "weights").is_file()
    assert (moved[1] / "notes.txt").read_text() == "theirs"
    assert (moved[2].read_text(), str(moved[3].readlink())) == ("a file", "nowhere")
    assert not [step for step in (5, 6, 7, 8) if run.checkpoint(step).exists()]


@pytest.mark.parametrize("is_scattered", [False, True])
def test_save_reports_the_files_that_made_way(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, *, is_scattered: bool
) -> None:
    saver: Any = object.__new__(Checkpointer)
    saver.__dict__.update(run=run, is_scattered=is_scattered, _group=None)
    monkeypatch.setattr(saver, "_lead", lambda act, _: act())
    monkeypatch.setattr(saving, "gather", lambda mine, _: [(1, None), mine])

    def fill(_: Any, stage: Path) -> Any:
        stage.mkdir()
        return SimpleNamespace(size_bytes=7)

    monkeypatch.setattr(saver, "_fill_stage", fill)
    run.checkpoint(6).mkdir()
    (run.checkpoint(6) / "notes.txt").write_text("theirs")
    size_bytes, moved = saver._write(SimpleNamespace(step=6), run.checkpoint(6))
    assert size_bytes == (8 if is_scattered else 7)
    assert moved == "checkpoint-6 was there and is no checkpoint of this run; it is now other-checkpoint-6"
    assert (run.path / "other-checkpoint-6" / "notes.txt").read_text() == "theirs"
    assert list(run.checkpoint(6).iterdir()) == []


def test_only_crash_leftovers_are_removed(run: RunDir) -> None:
    from fsdp_tune.core.atomic import STAGE_MARK

    complete(run, 10)
    stage = run.path / f".checkpoint-20{STAGE_MARK}20"
    stage.mkdir()
    (stage / "half").write_text("x")
    kept = run.path / ".vscode"
    kept.mkdir()
    assert remove_leftovers(run) == [stage]
    assert not stage.exists()
    assert kept.is_dir()
    assert steps(run) == [10]


ALONE = Case(ranks=1)
"""For laws that do not depend on the number of ranks."""


def test_run_that_does_not_save_trains_and_leaves_no_checkpoint(bench: Bench) -> None:
    run = new_run(bench, ALONE, changes={"training": {"save_steps": 2}})
    ResumeRequest(saves=False).write(run.resume_json)
    runs.train(bench.on_ranks, run, ALONE.ranks)
    assert len(runs.loss_lines(run)) == STEPS
    assert not list(run.path.glob("*checkpoint-*"))


@on_devices
@pytest.mark.ranks
def test_checkpoint_lists_every_file_and_leaves_no_stage(bench: Bench) -> None:
    run = short_run(bench)
    checkpoint = run.checkpoint(STEPS)
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert sorted(manifest.files) == list_files(checkpoint)
    assert damage(checkpoint, manifest, digests=True) == []
    assert (manifest.facts["step"], manifest.facts["world_size"], manifest.facts["mesh"]) == (STEPS, 2, [2])
    assert not [path.name for path in run.path.iterdir() if path.name.startswith(".")]


EVERY_SECOND = {"max_steps": 6, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "warmup_steps": 0}
BEST_IS_FIRST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "save_total_limit": 1,
}


@on_devices
@pytest.mark.slow
@pytest.mark.ranks
def test_finished_run_keeps_both_its_last_and_its_best_checkpoint(bench: Bench) -> None:
    run = trained(bench, Case(), {"training": EVERY_SECOND | BEST_IS_FIRST})
    assert steps(run) == [6, 2]


@on_devices
@pytest.mark.ranks
def test_last_checkpoint_has_the_weights_of_the_last_step_where_the_best_is_another(bench: Bench) -> None:
    """`save_strategy: best` leaves the last step to the end of the run."""
    changes = EVERY_SECOND | BEST_IS_FIRST | {"save_strategy": "best"}
    run = trained(bench, ALONE, {"training": changes | {"max_steps": 4}})
    assert steps(run) == [4, 2]
    last, best = (runs.saved_parameters(run, step) for step in (4, 2))
    assert not any(torch.equal(last[name], best[name]) for name in last)
    longer = new_run(bench, ALONE, {"training": changes})
    runs.resume_from(longer, run, 2)
    runs.resume_from(longer, run, 4)
    runs.train(bench.on_ranks, longer, ALONE.ranks)
    assert steps(longer) == [6, 2], "a resumed run knows the best of the run before"


@on_devices
@pytest.mark.ranks
def test_rotation_keeps_the_best_until_a_better_one_is_written(bench: Bench) -> None:
    run = new_run(
        bench, ALONE, {"training": EVERY_SECOND | {"metric_for_best_model": "loss", "save_total_limit": 1}}
    )
    outcomes = bench.on_ranks.run(ALONE.ranks, run_recording_rotations, str(run.path))
    assert outcomes[0] == [[2], [4], [6]]


def run_recording_rotations(path: str) -> list[list[int]]:
    """The steps that each rotation protects; each step is better than the one before, and saves are slower
    than steps."""
    from fsdp_tune.worker.checkpoint import save

    protected_steps: list[list[int]] = []

    def record(*_: Any, protected: set[int], **__: Any) -> list[Path]:
        protected_steps.append(sorted(protected))
        return []

    with patch.object(save, "rotate", record):
        run_with_slow_disk(path)
    return protected_steps


@on_devices
@pytest.mark.ranks
def test_background_save_has_the_state_of_its_step_and_is_resumed_from(bench: Bench) -> None:
    """Steps continue while a save is written: it must be that of a run which waits, also to the run that
    resumes from it."""
    case, short = Case("gpt2-dropout"), {"training": {"max_steps": 6, "save_steps": 2}}
    waiting = trained(bench, case, short | {"checkpoint": {"async": False}})
    background = trained(bench, case, short, run_with_slow_disk)
    resumed = new_run(bench, case, short)
    runs.resume_from(resumed, background, 4)
    runs.train(bench.on_ranks, resumed, 2)
    for run, step in ((background, 2), (background, 4), (resumed, 6)):
        one, other = (runs.saved_parameters(each, step) for each in (waiting, run))
        assert all(torch.equal(one[name], other[name]) for name in one), step
    curves = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in runs.loss_lines(run)]
        for run in (waiting, resumed)
    ]
    assert curves[0] == curves[1]


def run_with_slow_disk(path: str) -> dict[str, Any]:
    """The worker, whose saves take longer than the next step."""
    from fsdp_tune.worker.checkpoint.save import Checkpointer
    from fsdp_tune.worker.trainer import FsdpTrainer

    fill_stage, training_step = Checkpointer._fill_stage, FsdpTrainer.training_step
    trained_again = threading.Event()

    def slow(self: Any, *arguments: Any) -> Any:
        trained_again.clear()
        trained_again.wait(0.5)  # the last save has no step after it
        time.sleep(0.05)
        return fill_stage(self, *arguments)

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        loss = training_step(self, *arguments, **options)
        trained_again.set()
        return loss

    with patch.object(Checkpointer, "_fill_stage", slow), patch.object(FsdpTrainer, "training_step", noted):
        return runs.run_worker(path)


def run_with_broken_disk(path: str, rank: int, operation: str, first: int, last: int) -> dict[str, Any]:
    """The worker, whose disk refuses one rank's operations `first` to `last` of a kind inside checkpoints."""
    import itertools

    import torch.distributed as dist

    from fsdp_tune.core import atomic

    original, count = getattr(type(atomic.DISK), operation), itertools.count(1)

    def broken(self: Any, *arguments: Any, **options: Any) -> Any:
        inside = ".checkpoint-" in str(arguments[0] if isinstance(arguments[0], Path) else arguments[0].name)
        if inside and dist.get_rank() == rank and first <= next(count) <= last:
            raise OSError(28, "No space left on device")
        return original(self, *arguments, **options)

    with patch.object(type(atomic.DISK), operation, broken):
        return runs.run_worker(path)


def saves(run: RunDir) -> dict[int, str]:
    return {
        line["step"]: line["event"]
        for line in runs.lines(run)
        if str(line.get("event")).startswith("checkpoint_")
    }


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("operation", "rank"),
    [
        ("write", 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("open", 0), ("open", 1), ("write", 0))),
    ],
)
def test_failed_write_on_one_rank_leaves_no_checkpoint_and_the_next_save_succeeds(
    operation: str, rank: int, bench: Bench
) -> None:
    worker = functools.partial(run_with_broken_disk, rank=rank, operation=operation, first=2, last=2)
    run = trained(bench, Case(), {"training": {"max_steps": 5, "save_steps": 2}}, worker)
    assert saves(run) == {2: "checkpoint_failed", 4: "checkpoint_saved", 5: "checkpoint_saved"}
    assert steps(run) == [5, 4]
    assert not [path.name for path in run.path.iterdir() if path.name.startswith(".")], (
        "no half-written stage stays"
    )
    [line] = [line for line in runs.lines(run) if line.get("event") == "checkpoint_failed"]
    assert "No space left" in line["message"]


def broken_run(bench: Bench, changes: dict[str, Any], last: int) -> tuple[RunDir, list[dict[str, Any]]]:
    """A run whose rank 1 cannot write, up to its write number `last`, and every rank's outcome."""
    run = new_run(bench, Case(), changes)
    worker = functools.partial(run_with_broken_disk, rank=1, operation="write", first=1, last=last)
    return run, bench.on_ranks.run(2, functools.partial(worker, str(run.path)))


@on_devices
@pytest.mark.ranks
def test_run_whose_last_step_cannot_be_saved_fails(bench: Bench) -> None:
    run, outcomes = broken_run(bench, {"training": {"save_steps": 2}}, last=10**9)
    assert {outcome["exit_code"] for outcome in outcomes} == {1}
    problem = outcomes[0]["problem"]
    assert problem["message"].startswith(
        "rank 1 could not write its part of pytorch_model_fsdp_0: No space left on device; "
    )
    assert "free space" in problem["hint"]
    assert steps(run) == []


@on_devices
@pytest.mark.ranks
def test_stop_on_failed_save_stops_every_rank(bench: Bench) -> None:
    _, outcomes = broken_run(
        bench, {"training": {"save_steps": 1}, "checkpoint": {"save_failure": "stop", "async": False}}, last=1
    )
    assert [(outcome["exit_code"], outcome["step"]) for outcome in outcomes] == [(1, 1), (1, 1)]


@on_devices
@pytest.mark.ranks
def test_probe_writes_a_complete_checkpoint_and_removes_it(bench: Bench) -> None:
    run = trained(bench, Case(), {"checkpoint": {"probe": True}})
    probed = [line for line in runs.lines(run) if line.get("event") == "checkpoint_probed"]
    assert [line["step"] for line in probed] == [1]
    assert steps(run) == [STEPS]
    one, other = ([line["loss"] for line in runs.loss_lines(each)] for each in (run, short_run(bench)))
    assert one == other, "a probe changes no number"


@on_devices
@pytest.mark.ranks
def test_probe_that_fails_ends_the_run_after_one_step(bench: Bench) -> None:
    _, outcomes = broken_run(bench, {"checkpoint": {"probe": True}}, last=1)
    assert [(outcome["exit_code"], outcome["step"]) for outcome in outcomes] == [(1, 1), (1, 1)]
    assert "No space left" in json.dumps(outcomes[0]["problem"])


def test_checkpoint_found_damaged_by_its_digest_no_longer_counts_for_the_limit(run: RunDir) -> None:
    for step in (10, 20, 30):
        complete(run, step)
    (run.checkpoint(20) / "weights").write_bytes(b"?")
    assert latest_checkpoint(run)[0] == latest_checkpoint(run, digests=True)[0]
    assert steps(run) == [30, 20, 10], "nothing has read it"
    assert isinstance(inspect_checkpoint(run.checkpoint(20), digests=True), Rejected)
    with patch("fsdp_tune.run.manifest.digest_file", side_effect=AssertionError("rotation reads no file")):
        assert rotate(run, 2, protected={30}) == []
        assert steps(run) == [30, 10]
    assert run.checkpoint(20).is_dir(), "it is kept as evidence"


def test_damaged_checkpoint_counts_again_when_its_file_is_replaced(run: RunDir) -> None:
    folder = complete(run, 20)
    (folder / "weights").write_bytes(b"?")
    assert isinstance(inspect_checkpoint(folder, digests=True), Rejected)
    assert steps(run) == []
    (folder / "weights").unlink()
    (folder / "weights").write_bytes(bytes([20]))
    assert steps(run) == [20]
    assert not isinstance(inspect_checkpoint(folder, digests=True), Rejected)
    assert [path.name for path in folder.iterdir() if path.name == DAMAGE_NAME] == []


def test_damage_in_a_directory_that_cannot_be_written_is_still_reported(run: RunDir) -> None:
    folder = complete(run, 20)
    (folder / "weights").write_bytes(b"?")
    with patch("fsdp_tune.run.manifest.write_json", side_effect=PermissionError("read-only")):
        assert isinstance(inspect_checkpoint(folder, digests=True), Rejected)
