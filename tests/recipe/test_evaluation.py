"""What chooses the best model by a score of `evaluation:` needs nothing of the ranks. test_contradictions.py has what is refused."""

from __future__ import annotations

import pytest

from tests.recipe.loading import load_with


@pytest.mark.parametrize("name", ["sums/exact_match", "arc_easy/acc_norm"])
def test_best_model_by_a_score_needs_no_evaluation_by_the_ranks(name: str) -> None:
    extra = "evaluation:\n  sets: [{path: a.jsonl, label: sums, metric: exact_match}]\n  tasks: [arc_easy]\n"
    recipe = load_with(f"{extra}training: {{load_best_model_at_end: true, metric_for_best_model: {name}}}\n").recipe
    assert recipe.best_by_score
    assert not recipe.evaluates
