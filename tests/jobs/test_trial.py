"""The figures of a trial, and what of them calibrates later plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitReason
from fsdp_tune.core.gpus import find_hardware
from fsdp_tune.core.units import GIB
from fsdp_tune.jobs.observer import TrainResult
from fsdp_tune.jobs.trial import Trial
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
