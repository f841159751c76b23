"""The figures of a trial, and what of them calibrates later plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitReason, FsdpTuneError
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.jobs import trial as trials
from fsdp_tune.jobs.observer import TrainResult
from fsdp_tune.jobs.options import Allowed
from fsdp_tune.jobs.trial import Trial, TrialSettings, folder_of_trials
from fsdp_tune.planner.predict.predict import plan
from fsdp_tune.planner.search.candidates import PlannedRecipe
from fsdp_tune.recipe.read.loader import parse_recipe
from tests.pages.written import training_line, written
from tests.planner.hand_trace import Hand
from tests.planner.recipes import resolved

EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def read(
    folder: Path,
    *,
    share: float = 1.0,
    environment: dict[str, str] = EXPANDABLE,
    steps: Sequence[tuple[float, float]] = ((1.0, 1.0),) * 4,
) -> Trial:
    """A trial whose steps computed this share of the tokens of full rows. `steps`: seconds of each, and its
    tokens relative to that."""
    recipe = resolved()
    step = Hand().op("mm", flops=1e12).trace()
    planned = PlannedRecipe(recipe, plan(recipe, find_hardware("A100-40GB"), step))
    trial = Trial(
        planned, parse_recipe(recipe.model_dump_json(by_alias=True), folder / "recipe.yaml"), folder / "1"
    )
    tokens = share * planned.plan.tokens_per_step / planned.plan.num_processes
    lines = [
        training_line(
            step,
            1.0,
            step_seconds=seconds,
            tokens_per_second_per_device=tokens * relative / seconds,
            peak_reserved_gib=8 + 0.5 * step,
        )
        for step, (seconds, relative) in enumerate(steps, 1)
    ]
    run = written(trial.folder, lines)
    document = json.loads(run.launch_json.read_bytes())
    document.pop("document_digest")
    run.launch_json.write_text(json.dumps(document | {"environment": environment}))
    trial.read(TrainResult(run, recipe, ExitReason.FINISHED))
    return trial


def test_full_rows_calibrate_time_and_memory(tmp_path: Path) -> None:
    trial = read(tmp_path)
    assert trial.measured is not None
    assert trial.measured.step_seconds == 1.0
    assert trial.measured.reserved_bytes == 10 * GIB


def test_trial_with_shorter_steps_on_the_same_rows_is_the_faster_one(tmp_path: Path) -> None:
    """The long step has the fewest tokens: the median of the rates once preferred it with many."""
    tokens = (1.0, 1.0, 0.6, 0.8, 1.0)
    fast, slow = (
        read(tmp_path / name, steps=list(zip(seconds, tokens, strict=True)))
        for name, seconds in (("fast", (1, 1, 1.0, 0.9, 1.5)), ("slow", (1, 1, 0.6, 1.1, 1.3)))
    )
    rates = [trial.figures.tokens_per_second_per_device for trial in (fast, slow)]
    seconds = [trial.figures.step_seconds for trial in (fast, slow)]
    assert (seconds[0] < seconds[1], rates[0] > rates[1]) == (True, True), (seconds, rates)


@pytest.mark.parametrize("environment", [{}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}])
def test_memory_of_another_allocator_calibrates_nothing(tmp_path: Path, environment: dict[str, str]) -> None:
    trial = read(tmp_path, environment=environment)
    assert trial.measured is not None
    assert trial.measured.reserved_bytes is None
    assert trial.figures.peak_reserved_gib == 10.0


def test_short_rows_calibrate_nothing(tmp_path: Path) -> None:
    trial = read(tmp_path, share=0.5)
    assert trial.measured is None
    assert trial.figures.outcome == "measured"


def test_run_without_a_counted_step_has_failed(tmp_path: Path) -> None:
    """The first two steps compile and allocate."""
    trial = read(tmp_path, steps=((1.0, 1.0),) * 2)
    assert (trial.figures.outcome, trial.figures.step_seconds) == ("failed", None)
    assert trial.figures.problem == "the run has no line of a counted step"
    assert (trial.measured, trial.share_of_full_rows) == (None, 0.0)


def test_runs_are_on_the_disk_of_the_recipes_own_and_removed(tmp_path: Path) -> None:
    with folder_of_trials(tmp_path / "runs" / "one") as folder:
        assert folder.parent == tmp_path
        (folder / "1").mkdir()
    assert list(tmp_path.iterdir()) == []


def test_directory_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(trials.tempfile, "mkdtemp", refuse)
    with pytest.raises(FsdpTuneError, match="cannot be written") as caught, folder_of_trials(tmp_path / "a"):
        pass
    (problem,) = caught.value.problems
    assert problem.code == "output-not-writable"
    assert problem.message.startswith(f"{tmp_path} cannot be written (Permission denied)")


@pytest.mark.parametrize(("minutes", "seconds"), [(None, 1200), (5.0, 300), (0.1, 60), (90.0, 1200)])
def test_rank_that_hangs_ends_within_the_minutes_of_the_measurement(
    minutes: float | None, seconds: float
) -> None:
    recipe = resolved(launch={"hang_timeout": "20m"})
    settings = TrialSettings(5, minutes, Allowed())
    assert settings.hang_seconds(recipe) == seconds
    timeout = settings.recipe(recipe, Path("/runs/1")).launch.hang_timeout
    assert timeout == ("20m" if minutes is None else f"{seconds}s")
