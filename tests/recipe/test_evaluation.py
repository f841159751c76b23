"""What chooses the best model by a score of `evaluation:` needs nothing of the ranks. test_contradictions.py has what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp_tune.core.devices import Machine
from fsdp_tune.recipe.resolve import resolve
from fsdp_tune.recipe.rules.contradictions import RULES
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.recipe.loading import load_with


@pytest.mark.parametrize("name", ["sums/exact_match", "arc_easy/acc_norm"])
def test_best_model_by_a_score_needs_no_evaluation_by_the_ranks(name: str) -> None:
    extra = "evaluation:\n  sets: [{path: a.jsonl, label: sums, metric: exact_match}]\n  tasks: [arc_easy]\n"
    best = f"{{load_best_model_at_end: true, metric_for_best_model: {name}, greater_is_better: true}}"
    recipe = load_with(f"{extra}training: {best}\n").recipe
    assert recipe.best_by_score
    assert not recipe.evaluates


def test_resolved_sets_break_no_rule() -> None:
    """The ranks and the next command read the recipe with everything written."""
    sets = "evaluation:\n  sets: [{path: a.jsonl}, {path: b.jsonl, metric: exact_match}]\n"
    once = resolve(load_with(sets).recipe, Machine("cuda", 8, 16, "an accelerator"), cwd=Path("/")).recipe
    assert [finding for rule in RULES for finding in rule(Recipe.model_validate(once.model_dump(by_alias=True)))] == []


@pytest.mark.parametrize(
    ("training", "merge", "codes"),
    [("", "true", ["best-not-merged"]), (", load_best_model_at_end: true", "true", []), ("", "false", [])],
)
def test_best_model_that_is_kept_and_not_merged_is_a_notice(training: str, merge: str, codes: list[str]) -> None:
    sets = "evaluation:\n  sets: [{path: a.jsonl, label: sums, metric: exact_match}]\n"
    loaded = load_with(f"{sets}training: {{metric_for_best_model: sums/exact_match{training}}}\nmerge: {{at_end: {merge}}}\n")
    assert [notice.code for notice in loaded.notices] == codes
