"""Evaluation on one rank, without a process group: names and quotients of the metrics, and the model after an
error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.worker import eval_sets
from fsdp_tune.worker.eval_sets import evaluate_sets
from fsdp_tune.worker.rows.batches import Collator

SUMS = {"a": [[6.0, 4.0], [2.0, 8.0]], "b": [[1.0, 1.0], [0.0, 2.0]]}
"""[sum, count] of the metric `hits` and of the loss."""


def hits(*_: torch.Tensor) -> tuple[float, float]:
    return 0.0, 0.0


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[float]]]:
    """What the sets give in place of the forwards."""
    found = {label: [list(pair) for pair in pairs] for label, pairs in SUMS.items()}
    monkeypatch.setattr(eval_sets, "_batches", lambda *_: [])
    monkeypatch.setattr(eval_sets, "_sums", lambda recipe, wrapped, store, *_: found[store])
    return found


def evaluated(model: nn.Module, metrics: dict[str, eval_sets.Metric] | None = None) -> dict[str, float]:
    recipe = Recipe.model_validate(
        {"data": {"eval": [{"path": "a.jsonl", "label": "a"}, {"path": "b.jsonl", "label": "b"}]}}
    )
    stores: dict[str, Any] = {"a": "a", "b": "b"}
    return evaluate_sets(
        recipe, model, stores, Collator(pad_token_id=0, multiple_of=8), torch.device("cpu"), metrics
    )


@pytest.mark.usefixtures("sums")
def test_metrics_of_all_sets_are_weighted_by_their_counts() -> None:
    found = evaluated(nn.Linear(1, 1), {"hits": hits})
    assert (found["eval_hits"], found["eval_a_hits"], found["eval_b_hits"]) == (7.0 / 5.0, 1.5, 1.0)
    assert (found["eval_loss"], found["eval_a_loss"], found["eval_b_loss"]) == (0.2, 0.25, 0.0)
    assert found["eval_b_perplexity"] == 1.0


@pytest.mark.parametrize(
    ("index", "code", "words"),
    [(0, "extension-failed", "`hits` counted nothing"), (1, "eval-without-targets", "`b` has no")],
)
def test_set_of_which_nothing_was_counted_is_an_error(
    sums: dict[str, list[list[float]]], index: int, code: str, words: str
) -> None:
    sums["b"][index] = [0.0, 0.0]
    with pytest.raises(FsdpTuneError, match=words) as caught:
        evaluated(nn.Linear(1, 1), {"hits": hits})
    assert caught.value.problems[0].code == code


def test_model_trains_on_after_an_evaluation_that_failed(sums: dict[str, list[list[float]]]) -> None:
    sums.clear()
    model = nn.Linear(1, 1)
    with pytest.raises(KeyError):
        evaluated(model)
    assert model.training
