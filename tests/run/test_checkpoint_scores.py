"""Which checkpoints have scores, which is the best by one, and which a rotation must keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.launch.run_status import run_status
from fsdp_tune.pages.metrics_table import MetricsTable
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.checkpoint_scores import best_by_score, better_by_score, kept_for_scores
from fsdp_tune.run.directory import CHECKPOINT_KIND, Checkpoint, RunDir, complete_checkpoints
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.event_parts import CheckpointScore
from fsdp_tune.run.events import CheckpointEvaluated, CheckpointEvaluationFailed
from fsdp_tune.run.manifest import MANIFEST_NAME, Manifest
from fsdp_tune.run.metrics_file import append_event, read_metrics
from tests.recipe.loading import load_with

SETS = (
    "evaluation: {sets: [{path: rows.jsonl, label: sums, metric: exact_match}, {path: rows.jsonl, label: "
    "text}]%s}\n"
)


def save(run: RunDir, step: int, **facts: object) -> Path:
    folder = run.checkpoint(step)
    folder.mkdir(exist_ok=True)
    (folder / MANIFEST_NAME).write_text(Manifest(CHECKPOINT_KIND, {}, {"step": step, **facts}).to_json())
    return folder


def write_recipe(run: RunDir, recipe: Recipe) -> None:
    """Write it as if it were resolved."""
    launch = recipe.launch.model_copy(update={"num_processes": 1})
    run.recipe_json.write_text(recipe.model_copy(update={"launch": launch}).model_dump_json(by_alias=True))


def identity(run: RunDir, step: int) -> str:
    return next(each.manifest.identity for each in complete(run) if each.step == step)


def complete(run: RunDir) -> list[Checkpoint]:
    return complete_checkpoints(run)[0]


def score(run: RunDir, step: int, definition: str | None = None, **scores: float) -> None:
    named = {name.replace("__", "/"): CheckpointScore(value, None, None, 8) for name, value in scores.items()}
    append_event(run, CheckpointEvaluated(step, identity(run, step), 1.0, named, definition))


def recipe_by(metric: str, *, is_greater: bool, evaluation: str = "") -> Recipe:
    best = (
        f"training: {{load_best_model_at_end: true, metric_for_best_model: {metric}, greater_is_better: "
        f"{str(is_greater).lower()}}}\n"
    )
    return load_with(SETS % evaluation + best).recipe


@pytest.mark.parametrize(
    ("metric", "is_greater", "best"), [("sums/exact_match", True, 20), ("text/perplexity", False, 30)]
)
def test_best_checkpoint_is_of_the_known_scores_and_the_first_of_equal_ones(
    run: RunDir, metric: str, best: int, *, is_greater: bool
) -> None:
    for step in (10, 20, 30, 40):
        save(run, step)
    score(run, 10, sums__exact_match=0.1, text__perplexity=9.0)
    score(run, 20, sums__exact_match=0.5, text__perplexity=8.0)
    score(run, 30, sums__exact_match=0.5, text__perplexity=2.0)
    found = best_by_score(run, recipe_by(metric, is_greater=is_greater), complete(run))
    assert found is not None
    assert found.checkpoint.step == best


def test_checkpoint_of_another_attempt_has_no_score(run: RunDir) -> None:
    recipe = recipe_by("sums/exact_match", is_greater=True)
    save(run, 10)
    score(run, 10, sums__exact_match=1.0)
    save(run, 10, recipe_digest="of another attempt")
    assert best_by_score(run, recipe, complete(run)) is None
    assert kept_for_scores(run, recipe) == {10}


def test_rotation_keeps_unscored_checkpoints_and_the_best(run: RunDir) -> None:
    recipe = recipe_by("sums/exact_match", is_greater=True)
    for step in (10, 20, 30, 40, 50):
        save(run, step)
    assert kept_for_scores(run, recipe) == {10, 20, 30, 40, 50}
    score(run, 10, sums__exact_match=0.1)
    score(run, 20, sums__exact_match=0.5)
    score(run, 30, sums__exact_match=0.4)
    append_event(
        run, CheckpointEvaluationFailed(40, identity(run, 40), "evaluation-failed", "its process ended")
    )
    assert kept_for_scores(run, recipe) == {20, 50}


def test_rotation_keeps_only_steps_that_are_evaluated(run: RunDir) -> None:
    for step in (10, 20, 30, 40):
        save(run, step)
    assert kept_for_scores(run, load_with(SETS % ", every: 1000").recipe) == set()
    assert (
        kept_for_scores(run, recipe_by("sums/exact_match", is_greater=True, evaluation=", every: 500"))
        == set()
    )
    recipe = load_with((SETS % ", every: 20") + "training: {save_steps: 10}\n").recipe
    assert kept_for_scores(run, recipe) == {20, 40}
    assert kept_for_scores(run, load_with("").recipe) == set()


def test_all_evaluated_steps_are_kept_while_none_is_known_to_be_the_best(run: RunDir) -> None:
    for step in (10, 20, 30, 40):
        save(run, step)
        if step < 40:
            score(run, step, sums__another=0.5)
    append_event(
        run, CheckpointEvaluationFailed(40, identity(run, 40), "evaluation-failed", "its process ended")
    )
    assert kept_for_scores(run, recipe_by("sums/exact_match", is_greater=True)) == {10, 20, 30, 40}
    assert kept_for_scores(run, load_with(SETS % "").recipe) == set()
    score(run, 20, sums__exact_match=0.5)
    assert kept_for_scores(run, recipe_by("sums/exact_match", is_greater=True)) == {20}


def test_best_score_is_a_number(run: RunDir) -> None:
    for step, value in ((10, 0.5), (20, 0.9), (30, float("nan")), (40, float("inf"))):
        save(run, step)
        score(run, step, sums__exact_match=value, text__perplexity=value)
    for metric, is_greater, best in (("sums/exact_match", True, 20), ("text/perplexity", False, 10)):
        found = best_by_score(run, recipe_by(metric, is_greater=is_greater), complete(run))
        assert found is not None
        assert found.checkpoint.step == best


def test_any_number_is_better_than_a_score_that_is_none(run: RunDir) -> None:
    for step, value in ((10, float("nan")), (20, 3.0)):
        save(run, step)
        score(run, step, text__perplexity=value)
    recipe = recipe_by("text/perplexity", is_greater=False)
    found = better_by_score(run, recipe, complete(run), [10])
    assert found is not None
    assert found.step == 20
    assert better_by_score(run, recipe, complete(run), [20]) is None


def test_scores_of_another_definition_are_not_compared(run: RunDir) -> None:
    recipe = recipe_by("sums/exact_match", is_greater=True)
    before = EvaluationRecord.of(recipe.evaluation, {"sums": "rows", "text": "rows"})
    for step in (10, 20):
        save(run, step)
        score(run, step, before.definition, sums__exact_match=1.0 / step)
    for record, expected in (
        (before, 10),
        (EvaluationRecord.of(recipe.evaluation, {"sums": "other rows", "text": "rows"}), None),
    ):
        record.write(run.evaluation_json)
        found = best_by_score(run, recipe, complete(run))
        assert (found.checkpoint.step if found is not None else None) == expected
    assert kept_for_scores(run, recipe) == {10, 20}


def test_scores_on_other_rows_are_in_no_curve_and_no_status(run: RunDir) -> None:
    """They have the same names, and `status --json` and the report would show them as the progress of one."""
    write_recipe(run, load_with("").recipe)
    for step, definition, value in ((10, "old", 0.9), (20, "old", 0.8), (10, "new", 0.1)):
        save(run, step)
        score(run, step, definition, sums__exact_match=value)
    table = MetricsTable()
    table.add(read_metrics(run))
    curve = table.curve("sums/exact_match")
    assert (list(curve.steps), list(curve.values)) == ([10], [0.1])
    found = run_status(run).evaluated_checkpoints
    assert [(each.step, each.scores["sums/exact_match"].value) for each in found] == [(10, 0.1)]


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (", every: 20, batch_size: 2", True),
        (", task_rows: 8, tasks: [arc_easy]", False),
        (", tasks: [arc_easy]", False),
    ],
)
def test_definition_is_what_decides_scores(other: str, *, is_same: bool) -> None:
    one, two = (
        EvaluationRecord.of(load_with(text).recipe.evaluation, {})
        for text in (SETS % "", SETS % other + "training: {save_steps: 10}\n")
    )
    assert (one.definition == two.definition) == is_same
    section = load_with(SETS % "").recipe.evaluation
    merges: tuple[dict[str, object], ...] = ({}, {"base": "original"})
    assert len({EvaluationRecord.of(section, {}, merge=merge).definition for merge in merges}) == 2, (
        "of other weights"
    )
    answers = load_with(SETS.replace("exact_match", "exact_match, answer: 'a (.*)'") % "").recipe.evaluation
    assert EvaluationRecord.of(answers, {}).definition != one.definition


def test_failure_counts_in_its_own_start_of_the_run(run: RunDir) -> None:
    recipe = load_with(SETS % "").recipe
    save(run, 10)
    record = EvaluationRecord.of(recipe.evaluation, {})
    record.write(run.evaluation_json)
    append_event(
        run, CheckpointEvaluationFailed(10, identity(run, 10), "evaluation-failed", "no room", record.command)
    )
    assert kept_for_scores(run, recipe) == set()
    EvaluationRecord.of(recipe.evaluation, {}).write(run.evaluation_json)
    assert kept_for_scores(run, recipe) == {10}
