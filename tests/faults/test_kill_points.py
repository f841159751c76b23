"""Kill commands at any file operation (rotation, new run, resumed run, merge): the result is old or new, and
the next command continues."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.launch.command.resume import Start, decide_start
from fsdp_tune.launch.command.run_files import write_run
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import CHECKPOINT_KIND, RunDir
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest, digest_file, list_files
from fsdp_tune.run.rotation import remove_leftovers, rotate
from tests.faults.checks import half_files, in_child, stages, verified_steps
from tests.faults.conftest import Count
from tests.faults.disk import Fault, injected, kill_points, shown_late
from tests.launch.test_accelerate import resolved
from tests.launch.test_resume import files_of
from tests.ranks import KILLED

STEPS = (10, 20, 30, 40, 50)


def make_checkpoint(run: RunDir, step: int, *, kind: str = CHECKPOINT_KIND) -> Path:
    folder = run.checkpoint(step)
    (folder / "inner").mkdir(parents=True)
    for name in ("weights", "inner/a", "inner/b", "state"):
        (folder / name).write_bytes(bytes([step]) * 100)
    files = {name: digest_file(folder / name) for name in list_files(folder)}
    (folder / MANIFEST_NAME).write_text(Manifest(kind, files, {"step": step}).to_json())
    return folder


def every_kill(
    make: Callable[[Path], Path],
    act: Callable[[Path], object],
    check: Callable[[Path, bool], None],
    folder: Path,
    *,
    every: int = 1,
) -> int:
    """Runs `act` on a fresh `make(…)` once for each kill point, in a process that dies there;
    `check(place, done)` after each."""
    place = make(folder / "counted")
    with injected(None) as log:
        act(place)
    check(place, True)
    points = kill_points([(operation.name, str(operation.path)) for operation in log], every=every)
    assert points

    def dying(place: Path, fault: Fault) -> None:
        with injected(fault):
            act(place)

    for index, fault in enumerate(points):
        place = make(folder / str(index))
        code = in_child(lambda place=place, fault=fault: dying(place, fault))
        assert code == KILLED, (str(fault), code)
        try:
            check(place, False)
        except AssertionError as error:
            operation = log[fault.number - 1]
            raise AssertionError(f"{fault} ({operation.name} {operation.path.name}): {error}") from error
        shutil.rmtree(place)
    return len(points)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_rotation_killed_anywhere_shows_no_half_deleted_checkpoint(
    every: int, tmp_path: Path, count: Count
) -> None:
    def make(place: Path) -> Path:
        for step in STEPS:
            make_checkpoint(RunDir(place), step)
        return place

    def check(place: Path, done: bool) -> None:
        run = RunDir(place)
        assert half_files(place) == []
        assert verified_steps(run)[-2:] == [40, 50]
        if not done:
            remove_leftovers(run)
            rotate(run, 2, protected=set())
        assert verified_steps(run) == [40, 50]
        assert stages(place) == []

    points = every_kill(
        make, lambda place: rotate(RunDir(place), 2, protected=set()), check, tmp_path, every=every
    )
    count(kill_points_in_a_rotation=points)


def test_rotation_with_a_stale_listing_deletes_too_few_and_never_the_newest(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for step in STEPS:
        make_checkpoint(run, step)
    with shown_late(run.checkpoint(50), 1e9):
        assert half_files(run.path) == []
        rotate(run, 2, protected={50})
    assert verified_steps(run) == [30, 40, 50]
    rotate(run, 2, protected={50})
    assert verified_steps(run) == [40, 50]


@pytest.mark.parametrize("protected", [set(), {20}])
def test_rotation_deletes_only_own_checkpoints_and_never_the_newest(
    protected: set[int], tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    for step in STEPS:
        make_checkpoint(run, step)
    make_checkpoint(run, 1, kind="something else")
    (run.path / "checkpoint-best").mkdir()
    (run.path / "checkpoint-7").mkdir()
    (run.path / "checkpoint-8").symlink_to(run.checkpoint(50))
    (run.path / "checkpoint-9").symlink_to(run.path / "checkpoint-9")
    (run.path / "checkpoint-60").write_text("a file")
    damaged = make_checkpoint(run, 70)
    (damaged / "weights").write_bytes(b"")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis").write_text("x")
    (run.path / ".mine").symlink_to(outside)
    rotate(run, 0, protected=protected)
    assert verified_steps(run) == sorted({50, *protected})
    kept = {
        "checkpoint-1",
        "checkpoint-best",
        "checkpoint-7",
        "checkpoint-8",
        "checkpoint-9",
        "checkpoint-60",
        "checkpoint-70",
    }
    assert kept <= {path.name for path in run.path.iterdir()}
    assert (outside / "thesis").read_text() == "x"


def test_leftovers_are_removed_and_links_not_followed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    make_checkpoint(run, 10)
    for pid in range(5):
        (run.path / f".checkpoint-20.stage-{pid}" / "pytorch_model_fsdp_0").mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "thesis").write_text("x")
    (run.path / ".checkpoint-30.stage-1").symlink_to(outside)
    (run.path / ".checkpoint-notes").mkdir()
    remove_leftovers(run)
    assert (outside / "thesis").read_text() == "x"
    assert {name for name in stages(run.path) if not (run.path / name).is_symlink()} == {".checkpoint-notes"}
    assert verified_steps(run) == [10]


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_new_run_killed_anywhere_is_absent_or_complete(every: int, tmp_path: Path, count: Count) -> None:
    recipe = resolved(tmp_path)

    def make(place: Path) -> Path:
        place.mkdir()
        return place

    def act(place: Path) -> None:
        write_run(RunDir(place / "run"), files_of(RunDir(place / "run"), recipe))

    def check(place: Path, done: bool) -> None:
        run = RunDir(place / "run")
        assert run.path.exists() or not done
        if run.path.exists():
            assert half_files(run.path) == []
            assert Recipe.model_validate_json(run.recipe_json.read_bytes()) == recipe
            assert (run.model / "config.json").exists()
        else:
            act(place)
            assert run.is_used

    count(kill_points_in_a_new_run=every_kill(make, act, check, tmp_path / "cases", every=every))


@pytest.fixture(autouse=True)
def _cases(tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_run_killed_while_updating_its_files_resumes(every: int, tmp_path: Path, count: Count) -> None:
    """Each file is the old or the new one, and the recipe that a rank would read is one of the two."""
    old = resolved(tmp_path)
    new = resolved(tmp_path, "training.logging_steps=3", "training.learning_rate=1.0e-4")

    def make(place: Path) -> Path:
        run = RunDir(place)
        write_run(run, files_of(run, old))
        make_checkpoint(run, 10)
        return place

    def act(place: Path) -> None:
        run = RunDir(place)
        write_run(run, files_of(run, new, decide_start(run, new, "auto", overwrite=False)))

    def check(place: Path, done: bool) -> None:
        run = RunDir(place)
        assert half_files(place) == []
        assert Recipe.model_validate_json(run.recipe_json.read_bytes()) in ((new,) if done else (old, new))
        start = decide_start(run, new, "auto", overwrite=False)
        assert start.checkpoint is not None
        assert start.checkpoint.step == 10
        if not done:
            act(place)
            assert Recipe.model_validate_json(run.recipe_json.read_bytes()) == new
            earlier = [
                json.loads((folder / "recipe.json").read_text())
                for folder in run.history.iterdir()
                if folder.name.isdigit()
            ]
            assert earlier, "the recipe that the run began with is kept"

    count(kill_points_in_a_resume=every_kill(make, act, check, tmp_path / "cases", every=every))


def test_resume_of_a_directory_whose_files_were_damaged_is_one_error(tmp_path: Path, count: Count) -> None:
    """Every file that `train --resume auto` reads, cut, emptied or filled with noise: a decision or an error,
    never a traceback."""
    recipe = resolved(tmp_path)
    run = RunDir(tmp_path / "run")
    write_run(run, files_of(run, recipe))
    make_checkpoint(run, 10)
    done = 0
    for path in (run.recipe_json, run.data_json, run.launch_json, run.rank_outcome(0)):
        raw = path.read_bytes() if path.exists() else b"{}"
        for damaged in (raw[: len(raw) // 2], b"", b"\0" * 100, b"\xff\xfe", b"[]", b"null", b"{}"):
            path.write_bytes(damaged)
            with contextlib.suppress(FsdpTuneError):
                assert isinstance(decide_start(run, recipe, "auto", overwrite=False), Start)
            done += 1
        path.write_bytes(raw)
    count(corruptions=done)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_merge_killed_anywhere_leaves_no_model_or_a_complete_one(
    every: int, tmp_path: Path, count: Count
) -> None:
    import torch

    from fsdp_tune.merge.merge_options import MergeOptions
    from fsdp_tune.merge.merging import merge_checkpoint
    from tests.merge.checkpoints import make_run, merged_tensors, same_bits

    state = {f"layer.{index}.weight": torch.randn(30, 20) for index in range(4)}
    options = MergeOptions(dtype="keep", max_shard_bytes=5_000)
    source = make_run(tmp_path / "source", {1: state})

    def check(place: Path, done: bool) -> None:
        output = place / "merged"
        assert output.exists() or not done
        if not output.exists():
            merge_checkpoint(place, options)
        merged = merged_tensors(output)
        assert all(same_bits(merged[name], state[name]) for name in state)
        if not done:
            assert verified_steps(RunDir(place)) == [1], "the source is as it was"

    count(
        kill_points_in_a_merge=every_kill(
            lambda place: shutil.copytree(source, place),
            lambda place: merge_checkpoint(place, options),
            check,
            tmp_path / "cases",
            every=every,
        )
    )
