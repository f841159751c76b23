"""The model of a run that had finished: merged where it is missing, or of an earlier end."""

from __future__ import annotations

import shutil
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem
from fsdp_tune.jobs import training_end
from fsdp_tune.jobs.observer import Observer, TrainResult
from fsdp_tune.jobs.training_end import conclude, finished
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.source import newer_checkpoint
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.rank_files import Outcome, Verdict
from fsdp_tune.run.written_files import merge_record
from tests.merge.checkpoints import make_run, merged_tensors


def end(run: RunDir, step: int, recipe: Recipe | None = None) -> TrainResult:
    """Start a run again that has finished at this step."""
    run.logs.mkdir(exist_ok=True)
    Outcome(0, ExitReason.FINISHED, rank=0, step=step).write(run.rank_outcome(0))
    return finished(run, recipe or Recipe(), Observer(), Start(is_new=False, is_finished=True))


def test_merged_model_of_an_earlier_end_is_replaced(tmp_path: Path) -> None:
    """A run was extended, and its merge was killed: the model that is there is not that of the run."""
    run = RunDir(make_run(tmp_path / "run", {10: {"w": torch.zeros(2, 3)}}))
    assert end(run, 10).merged == run.merged
    before = merge_record(run.merged)
    assert end(run, 10).merged == run.merged
    assert merge_record(run.merged) == before, "it is not written again"
    later = make_run(tmp_path / "later", {20: {"w": torch.ones(2, 3)}})
    (later / "checkpoint-20").rename(run.checkpoint(20))
    assert end(run, 20).merged == run.merged
    assert merge_record(run.merged)["steps"] == [20]


def test_merged_model_of_a_step_that_was_trained_again_is_replaced(tmp_path: Path) -> None:
    run = RunDir(make_run(tmp_path / "run", {10: {"w": torch.zeros(2, 3)}}))
    end(run, 10)
    shutil.rmtree(run.checkpoint(10))
    again = make_run(tmp_path / "again", {10: {"w": torch.ones(2, 3)}})
    (again / "checkpoint-10").rename(run.checkpoint(10))
    (found,) = newer_checkpoint(run, run.merged)
    assert found.message == "it is of step 10, which the run has trained again since"
    end(run, 10)
    assert merged_tensors(run.merged)["w"].sum() == 6
    assert newer_checkpoint(run, run.merged) == ()


@pytest.mark.parametrize(
    ("kind", "there", "merges"),
    [
        ("adapter", ["adapter"], []),
        ("adapter", [], [True]),
        ("both", [], [True, False]),
        ("both", ["adapter"], [False]),
        ("both", ["merged"], [True]),
        ("both", ["adapter", "merged"], []),
        ("merged", [], [False]),
    ],
)
def test_only_what_is_missing_of_a_lora_run_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, there: list[str], merges: list[bool]
) -> None:
    run, called = RunDir(tmp_path), list[bool | None]()
    for name in there:
        (tmp_path / name).mkdir()

    def merge_checkpoint(source: Path, options: MergeOptions, *, observer: Observer) -> SimpleNamespace:
        called.append(options.adapter)
        output = run.adapter if options.adapter else run.merged
        output.mkdir()
        return SimpleNamespace(output=output)

    monkeypatch.setattr(training_end, "merge_checkpoint", merge_checkpoint)
    recipe = Recipe.model_validate({"lora": {}, "merge": {"adapter": kind}})
    model = end(run, 10, recipe).merged
    assert (called, model) == (merges, run.adapter if kind == "adapter" else run.merged)


def test_model_is_pushed_if_a_crash_prevented_the_merge_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pushed = RunDir(make_run(tmp_path / "run", {10: {"w": torch.zeros(2, 3)}})), list[Path]()

    def push(folder: Path, **_options: object) -> SimpleNamespace:
        assert run.merged.is_dir()
        pushed.append(folder)
        return SimpleNamespace(url="https://hub/commit")

    monkeypatch.setattr(training_end, "push", push)
    recipe = Recipe.model_validate({"training": {"push_to_hub": True, "hub_model_id": "me/model"}})
    assert end(run, 10, recipe).pushed == "https://hub/commit"
    assert end(run, 10, recipe).pushed is None, "the model was there already"
    assert pushed == [run.path]


def test_finished_run_without_a_merge_at_its_end_is_not_merged(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"merge": {"at_end": False}})
    run = RunDir(make_run(tmp_path / "run", {10: {"w": torch.zeros(2, 3)}}, recipe=recipe))
    assert end(run, 10, recipe).merged is None
    assert not run.merged.exists()


class Ended(Observer):
    """Records the exit reasons with which the run has ended."""

    def __init__(self) -> None:
        self.reasons: list[ExitReason] = []

    def run_ended(self, result: TrainResult) -> None:
        self.reasons.append(result.exit_reason)


class Scores:
    """Records the evaluations of checkpoints that are finished."""

    def __init__(self) -> None:
        self.signals: list[int | None] = []

    def finish(self, signal: int | None = None) -> None:
        self.signals.append(signal)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is made of a finished run."""
    names = list[str]()

    def merge_checkpoint(run: Path, _options: MergeOptions, *, observer: Observer) -> SimpleNamespace:
        names.append("merged")
        return SimpleNamespace(output=run / "merged")

    def push(_run: Path, *, adapter: bool, observer: Observer) -> SimpleNamespace:
        names.append("pushed adapter" if adapter else "pushed")
        return SimpleNamespace(url="https://hub/commit")

    monkeypatch.setattr(training_end, "merge_checkpoint", merge_checkpoint)
    monkeypatch.setattr(training_end, "push", push)
    return names


PUSHED = {"push_to_hub": True, "hub_model_id": "org/model"}


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ({}, ["merged"]),
        ({"merge": {"at_end": False}}, []),
        ({"training": PUSHED}, ["merged", "pushed"]),
        ({"training": PUSHED, "lora": {}, "merge": {"adapter": "adapter"}}, ["merged", "pushed adapter"]),
        ({"training": PUSHED, "lora": {}, "merge": {"adapter": "both"}}, ["merged", "pushed"]),
    ],
    ids=["merged", "not merged", "pushed", "adapter", "both"],
)
def test_finished_run_is_evaluated_merged_and_pushed(
    tmp_path: Path, done: list[str], recipe: dict[str, Any], names: list[str]
) -> None:
    """Until it is merged it counts as failed: the merge may be killed."""
    observer, scores = Ended(), Scores()
    outcome = Outcome(0, ExitReason.FINISHED, facts={"loss": 1.5})
    ended = Verdict(ExitCode.OK, ExitReason.FINISHED, 9, first_outcome=outcome, signal=SIGTERM)
    found = conclude(RunDir(tmp_path), Recipe.model_validate(recipe), observer, ended, scores)  # type: ignore[arg-type]
    assert (done, scores.signals) == (names, [SIGTERM])
    assert observer.reasons == ([ExitReason.FAILED] if "merged" in names else [])
    assert (found.exit_reason, found.step, found.outcome) == (ExitReason.FINISHED, 9, {"loss": 1.5})
    assert found.merged == (tmp_path / "merged" if "merged" in names else None)
    assert found.pushed == ("https://hub/commit" if len(names) > 1 else None)


@pytest.mark.parametrize("reason", [ExitReason.PREEMPTED, ExitReason.MAX_RUNTIME])
def test_stopped_run_is_neither_evaluated_nor_merged(
    tmp_path: Path, done: list[str], reason: ExitReason
) -> None:
    scores = Scores()
    ended = Verdict(ExitCode.PREEMPTED, reason, 9)
    found = conclude(RunDir(tmp_path), Recipe(), Ended(), ended, scores)  # type: ignore[arg-type]
    assert (done, scores.signals, found.exit_reason) == ([], [], reason)


def test_failed_run_is_an_error_with_the_commands_that_resume_it(tmp_path: Path, done: list[str]) -> None:
    run = RunDir(tmp_path)
    run.recipe_json.write_text("{}")
    problem = Problem("out-of-memory", "rank 1 is out of memory", ways_out=("a smaller batch",))
    observer = Ended()
    ended = Verdict(ExitCode.OUT_OF_MEMORY, ExitReason.OUT_OF_MEMORY, 9, problem)
    with pytest.raises(FsdpTuneError) as caught:
        conclude(run, Recipe(), observer, ended, None)
    assert (done, observer.reasons) == ([], [ExitReason.OUT_OF_MEMORY])
    assert caught.value.exit_code == ExitCode.OUT_OF_MEMORY
    (found,) = caught.value.problems
    assert found.ways_out[0] == "a smaller batch"
    assert "starts again at step 0" in found.ways_out[1]


def test_evaluations_that_a_crash_prevented_are_made_at_the_next_start(tmp_path: Path) -> None:
    run, scores = RunDir(tmp_path), Scores()
    run.logs.mkdir()
    Outcome(0, ExitReason.FINISHED, rank=0, step=9).write(run.rank_outcome(0))
    recipe = Recipe.model_validate({"merge": {"at_end": False}})
    start = Start(is_new=False, is_finished=True)
    found = finished(run, recipe, Observer(), start, scores)  # type: ignore[arg-type]
    assert (scores.signals, found.had_finished, found.step) == ([None], True, 9)
