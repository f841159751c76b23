"""Contradictions in `evaluation:`: names of scores, keys that nothing reads, and what the ranks would have to know."""

from __future__ import annotations

import pytest

from tests.recipe.loading import load_with, one_problem, problems, problems_with

SET = "evaluation:\n  sets: [{path: rows.jsonl, label: sums, metric: exact_match}]\n"
BY_SCORE = f"{SET}training:\n  metric_for_best_model: sums/exact_match\n"

WRONG = [
    ("evaluation:\n  sets: [{path: a.jsonl}, {path: b/a.jsonl}]", "both named `a`"),
    ("evaluation:\n  sets: [{path: a.jsonl}]\n  tasks: [a]", "both named `a`"),
    ("evaluation:\n  sets: [{path: a.jsonl, label: a/b}]", "letters, digits"),
    ("evaluation:\n  sets: [{path: json}]", "data_files` is missing"),
    ("evaluation:\n  sets: [{path: a.jsonl, weight: 2.0}]", "for training rows"),
    ("evaluation:\n  sets: [{path: a.jsonl, loader: mine}]", "for training rows"),
    ("evaluation:\n  sets: [{path: a.jsonl, max_new_tokens: 8}]", "read by exact_match"),
    ("evaluation:\n  task_rows: 8\n  sets: [{path: a.jsonl}]", "there are none"),
    ("evaluation:\n  every: 500", "nothing to evaluate"),
    (f"{SET}  every: 750", "is not a multiple of `training.save_steps: 500`"),
    (f"{SET}training: {{save_strategy: 'no'}}", "`training.save_strategy` is no"),
    (f"{SET}launch: {{num_machines: 2, num_processes: 2, shared_directory: false}}", "no machine has one"),
    (f"{SET}training: {{metric_for_best_model: sums/perplexity}}", "is not a score"),
    ("training: {metric_for_best_model: sums/exact_match}", "is not a score"),
    (f"{BY_SCORE}  early_stopping: {{}}\ndata: {{train: [{{path: a}}], eval: {{rows: 8}}}}", "cannot end the run by it"),
    (f"{BY_SCORE}  save_strategy: best\ndata: {{train: [{{path: a}}], eval: {{rows: 8}}}}", "cannot save by it"),
]


@pytest.mark.parametrize(("extra", "words"), WRONG)
def test_contradiction_is_refused(extra: str, words: str) -> None:
    found = problems(f"model: {{name_or_path: gpt2}}\n{extra}\n") if "\ndata:" in extra else problems_with(f"{extra}\n")
    assert words in one_problem(found).message


def test_worst_perplexity_is_not_the_best_model() -> None:
    extra = "evaluation:\n  sets: [{path: a.jsonl}]\ntraining: {metric_for_best_model: a/perplexity, greater_is_better: true}\n"
    assert "would keep the worst" in one_problem(problems_with(extra)).message


@pytest.mark.parametrize("name", ["sums/exact_match", "arc_easy/acc_norm"])
def test_best_model_by_a_score_needs_no_evaluation_by_the_ranks(name: str) -> None:
    extra = "evaluation:\n  sets: [{path: a.jsonl, label: sums, metric: exact_match}]\n  tasks: [arc_easy]\n"
    recipe = load_with(f"{extra}training: {{load_best_model_at_end: true, metric_for_best_model: {name}}}\n").recipe
    assert recipe.best_by_score
    assert not recipe.evaluates
