"""Faults inside a step end the run with their own reason and exit code, or give a warning; never a wrong
number or a hang."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import on_devices
from tests.faults import ranks
from tests.faults.checks import verified_steps
from tests.faults.ranks import Happening
from tests.faults.training import Training, numbers
from tests.parity import runs, store
from tests.parity.bench import shared_bench
from tests.parity.cases import Case
from tests.ranks import End, Ranks

pytestmark = pytest.mark.ranks
slow = pytest.mark.slow


def outcome(run: RunDir, rank: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.rank_outcome(rank).read_text())
    return document


@on_devices
@pytest.mark.parametrize(
    "what",
    [
        "NaN in a gradient",
        pytest.param("infinite gradient", marks=slow),
        pytest.param("infinite weight", marks=slow),
    ],
)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=slow)])
def test_nonfinite_gradient_on_one_rank_stops_all_before_the_update(
    rank: int, what: str, training: Training
) -> None:
    run = training.new()
    training.attempt(run, sabotage=[(what, rank, 4)])
    for each in range(2):
        assert (outcome(run, each)["exit_code"], outcome(run, each)["exit_reason"]) == (4, "non_finite")
    message = outcome(run, 0)["problem"]["message"]
    assert "step 5" in message
    assert verified_steps(run) == [3]
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
@pytest.mark.parametrize(
    ("what", "code", "reason"),
    [
        ("device out of memory", 3, "out_of_memory"),
        ("device out of memory in evaluation", 3, "out_of_memory"),
        ("device out of memory in a save", 3, "out_of_memory"),
        ("host out of memory", 1, "failed"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_error_names_rank_and_memory(
    rank: int, what: str, code: int, reason: str, training: Training
) -> None:
    run = training.new()
    training.attempt(run, sabotage=[(what, rank, 4)])
    mine, other = outcome(run, rank), outcome(run, 1 - rank)
    assert (mine["exit_code"], mine["exit_reason"]) == (code, reason)
    assert "memory" in mine["problem"]["code"]
    assert (other["exit_code"], other["exit_reason"]) == (5, "lost_rank")
    training.finish(run)
    training.is_whole(run)


@on_devices
@slow
@pytest.mark.parametrize("what", ["loader raises", "loader dies"])
def test_failing_loader_worker_ends_the_run(what: str, on_ranks: Ranks) -> None:
    training = Training(on_ranks, changes={"training": {"dataloader_num_workers": 1}})
    run = training.new()
    ends = training.attempt(run, sabotage=[(what, 1, 0)])
    assert all(end.code != 0 or end.value["exit_code"] != 0 for end in ends)
    problem = outcome(run, 1)["problem"]
    assert outcome(run, 1)["exit_code"] == 1
    if what == "loader raises":
        assert problem["code"] == "row-unreadable"
        assert re.fullmatch(
            r"row \d+ cannot be read: OSError: \[Errno 5\] Input/output error", problem["message"]
        )
    else:
        assert problem["code"] == "loader-died"
        assert re.search(r"for step \d+ and later, from \d+ \(hand-made:\d+\)", problem["message"]), problem[
            "message"
        ]
    training.finish(run)
    training.is_whole(run)


@slow
def test_resume_between_epochs_with_loader_workers_loses_no_rows(on_ranks: Ranks) -> None:
    training = Training(on_ranks, changes={"training": {"dataloader_num_workers": 1}})
    run = training.new()
    training.attempt(run, [Happening(1, "forward", 8)])
    assert verified_steps(run) == [3, 6], "an epoch ends at step 6"
    training.finish(run)
    training.is_whole(run)


@pytest.mark.parametrize("step", [5, pytest.param(11, marks=slow), pytest.param(12, marks=slow)])
def test_unwritable_metrics_end_the_run_after_saving(step: int, training: Training) -> None:
    """The lines that are missing are in the checkpoint: the resumed run writes them. The first line of a step
    is that of the witness, before the ranks vote."""
    run = training.new()
    training.attempt(run, sabotage=[("metrics full", 0, step)])
    saved = min(step + 1, 12)
    assert (outcome(run, 0)["exit_code"], outcome(run, 0)["problem"]["code"]) == (1, "metrics-unwritable")
    assert (
        f"No space left on device; stopped after step {saved}, which is saved"
        in outcome(run, 0)["problem"]["message"]
    )
    assert outcome(run, 1)["exit_code"] == 1
    assert verified_steps(run)[-1] == saved
    if step == 5:
        # the same checkpoint twice: each line comes back once
        training.attempt(run, [Happening(1, "forward", 8)])
    training.finish(run)
    training.is_whole(run)


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_moved_run_directory_is_followed(rank: int, training: Training) -> None:
    run = training.new()
    moved = RunDir(run.path.with_name(f"{run.path.name}-moved"))
    ends: list[End] = training.on_ranks.ends(
        2, ranks.train, str(run.path), (), (), (("run directory moved", rank, 4),)
    )
    assert not any(end.stuck for end in ends)
    assert [outcome(moved, each)["exit_code"] for each in range(2)] == [0, 0]
    assert [path for path in run.path.rglob("*") if path.is_file()] == [], (
        "nothing is written into the other directory"
    )
    shutil.rmtree(run.path)
    moved.path.rename(run.path)
    training.is_whole(run)


@slow
@pytest.mark.parametrize("rank", [0, 1])
def test_deleted_run_directory_ends_the_run_and_is_not_recreated(rank: int, training: Training) -> None:
    run = training.new()
    ends: list[End] = training.on_ranks.ends(
        2, ranks.train, str(run.path), (), (), (("run directory removed", rank, 4),)
    )
    assert not any(end.stuck for end in ends)
    assert all(end.code != 0 or end.value["exit_code"] != 0 for end in ends)
    assert not run.path.exists() or [path for path in run.path.rglob("*") if path.is_file()] == []


@on_devices
@pytest.mark.parametrize(
    ("what", "told"),
    [
        pytest.param("tracker fails", "ConnectionError: the tracker's server is gone", marks=slow),
        pytest.param("tracker hangs", "TimeoutError: `on_log` did not return within 2 s", marks=slow),
    ],
    ids=["fails", "hangs"],
)
def test_tracker_that_fails_or_hangs_is_a_warning(what: str, told: str, training: Training) -> None:
    run = training.new(changes={"training": {"report_to": ["tensorboard"]}})
    ends = training.attempt(run, sabotage=[(what, 0, 0)])
    assert [end.value["exit_reason"] for end in ends] == ["finished"] * 2
    assert [line["message"] for line in runs.lines(run) if line.get("event") == "tracker_failed"] == [
        f"TensorBoard failed and gets no more events: {told}"
    ]
    training.is_whole(run)


def untrained_store(folder: Path, rows: set[int]) -> Path:
    """The tests' rows, some of which are wholly untrained."""
    made = store.make_store(folder)
    segments = np.fromfile(made / "train" / "segments.int64", "<i8").reshape(-1, 2)
    trained = np.fromfile(made / "trained.uint8", np.uint8)
    for row in rows:
        start, length = segments[row]
        trained[start : start + length] = 0
    trained.tofile(made / "trained.uint8")
    return made


def train_on(
    folder: Path, rows: set[int], world: int, on_ranks: Ranks, shuffle: bool
) -> tuple[RunDir, list[End]]:
    case = Case("llama", ranks=world, accumulation=2)
    changes = {
        "data": {"shuffle": shuffle},
        "training": {"max_steps": 4, "save_steps": 4, "eval_strategy": "no"},
    }
    recipe = runs.merged(case.recipe(str(shared_bench().model("llama"))), changes)
    run = runs.write_run(folder / f"run-{world}", recipe, untrained_store(folder / f"store-{world}", rows))
    return run, on_ranks.ends(world, ranks.train, str(run.path))


def test_rows_without_targets_match_one_rank(tmp_path: Path, on_ranks: Ranks) -> None:
    """Rows 0 to 3 are one rank's whole micro-batch of the first step; more are strewn about."""
    untrained = {0, 1, 2, 3, 20, 33, 35, 50}
    curves = []
    for world in (1, 2):
        run, ends = train_on(tmp_path, untrained, world, on_ranks, shuffle=False)
        assert [end.value["exit_reason"] for end in ends] == ["finished"] * world
        curves.append(numbers(run))
    for one, two in zip(*curves, strict=True):
        assert one[2] == pytest.approx(two[2], rel=1e-6), "loss"
        assert one[3] == pytest.approx(two[3], rel=1e-5), "gradient norm"
        assert one[5:] == two[5:], "tokens"


@slow
def test_step_without_targets_is_an_error(tmp_path: Path, on_ranks: Ranks) -> None:
    run, _ = train_on(tmp_path, set(range(16, 32)), 2, on_ranks, shuffle=False)
    assert {outcome(run, rank)["problem"]["code"] for rank in range(2)} == {"step-without-targets"}
    assert "step 2" in outcome(run, 0)["problem"]["message"]
    assert all(line["loss"] > 0 for line in runs.loss_lines(run))
