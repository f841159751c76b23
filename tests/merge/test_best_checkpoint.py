"""`--best` chooses by a score of `evaluation:` if the recipe's metric is one, and never falls back to another
checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.merge.best_checkpoint import BY_TRAINER, best_checkpoint
from fsdp_tune.merge.source import CheckpointChoice, newer_checkpoint, select_checkpoint
from fsdp_tune.run.directory import RunDir
from tests.planner.recipes import resolved
from tests.run.test_checkpoint_scores import complete, recipe_by, save, score


def test_best_checkpoint_is_by_the_score_or_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    recipe = recipe_by("text/perplexity", is_greater=False)
    for step in (10, 20, 30):
        save(run, step)
    with pytest.raises(FailedError, match="so none is the best; none of them has scores"):
        best_checkpoint(run, recipe, complete(run))
    score(run, 10, text__loss=3.0)
    with pytest.raises(FailedError, match="their scores are text/loss"):
        best_checkpoint(run, recipe, complete(run))
    score(run, 10, text__perplexity=3.0)
    score(run, 20, text__perplexity=2.0)
    chosen, reason = best_checkpoint(run, recipe, complete(run))
    assert (chosen.step, reason) == (20, "the lowest text/perplexity (2) among 3 complete checkpoints")


@pytest.mark.parametrize(("is_greater", "step"), [(True, 20), (False, 10)])
def test_best_metric_of_the_lines_is_in_the_direction_of_the_recipe(
    is_greater: bool, step: int, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    for number, value in ((10, 0.5), (20, 0.75)):
        save(run, number)
        with run.metrics_jsonl.open("a") as file:
            file.write(json.dumps({"step": number, "eval_accuracy": value, "eval_loss": value}) + "\n")
    recipe = resolved()
    keys = {"metric_for_best_model": "accuracy", "greater_is_better": is_greater}
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update=keys)})
    chosen, reason = best_checkpoint(run, recipe, complete(run))
    kind = "highest" if is_greater else "lowest"
    assert (chosen.step, reason.partition(" (")[0]) == (step, f"the {kind} eval_accuracy")
    assert best_checkpoint(run, None, complete(run))[0].step == 10, "of another tool: the lowest eval_loss"


def test_run_without_any_checkpoint_is_not_offered_an_incomplete_one(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(FailedError, match="no checkpoint-N at all") as caught:
        select_checkpoint(tmp_path, CheckpointChoice())
    assert caught.value.problems[0].hint is None


def test_merged_model_that_is_no_longer_the_best_is_reported(tmp_path: Path) -> None:
    """A checkpoint whose evaluation failed gets its score from the next command, after the merge."""
    run, recipe = RunDir(tmp_path), recipe_by("text/perplexity", is_greater=False)
    run.recipe_json.write_text(recipe.model_dump_json(by_alias=True))
    for step in (10, 20, 30):
        save(run, step)
        (run.checkpoint(step) / "pytorch_model_fsdp_0").mkdir()
    score(run, 10, text__perplexity=3.0)
    run.merged.mkdir()
    (run.merged / "merge.json").write_text(
        '{"steps": [10], "reason": "the lowest text/perplexity (3) among 3 complete checkpoints"}'
    )
    assert newer_checkpoint(run, run.merged) == (), "a later checkpoint without a score is not better"
    score(run, 30, text__perplexity=4.0)
    assert newer_checkpoint(run, run.merged) == ()
    score(run, 20, text__perplexity=2.0)
    (found,) = newer_checkpoint(run, run.merged)
    assert (found.code, found.message) == (
        "merge-out-of-date",
        "it is of step 10, and checkpoint-20 has a better score now",
    )
    assert found.hint is not None
    assert "--best --overwrite" in found.hint
    shutil.rmtree(run.checkpoint(20))
    assert newer_checkpoint(run, run.merged) == (), "the best of those that are left is worse"


def test_merged_model_that_the_trainer_no_longer_has_as_its_best_is_reported(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (10, 20):
        save(run, step)
        (run.checkpoint(step) / "pytorch_model_fsdp_0").mkdir()
    run.merged.mkdir()
    (run.merged / "merge.json").write_text(
        f'{{"steps": [10], "reason": "{BY_TRAINER} (3.0) among 1 complete checkpoints"}}'
    )
    state = run.checkpoint(20) / "trainer_state.json"
    state.write_text('{"best_global_step": 10, "best_metric": 3.0}')
    assert newer_checkpoint(run, run.merged) == ()
    state.write_text('{"best_global_step": 20, "best_metric": 2.0}')
    (found,) = newer_checkpoint(run, run.merged)
    assert found.message == "it is of step 10, and the trainer's best is checkpoint-20 now"
