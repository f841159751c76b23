"""By what the best checkpoint is chosen: which changes of metric, direction and rows make it another
choice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from transformers import EarlyStoppingCallback, TrainerState

from fsdp_tune.data.store import Row
from fsdp_tune.worker.best import chosen_by, start_anew


def rows(*lengths: int) -> Any:
    return [
        Row(np.arange(length, dtype=np.int32), np.arange(length, dtype=np.int32), (length,), 0)
        for length in lengths
    ]


def choice(metric: str | None, evals: dict[str, Any], *, greater: bool = False) -> str | None:
    arguments: Any = SimpleNamespace(metric_for_best_model=metric, greater_is_better=greater)
    return chosen_by(arguments, evals, ["hits"])


def test_metric_of_one_set_does_not_depend_on_the_others() -> None:
    easy, both, other = (
        {"easy": rows(3, 4)},
        {"easy": rows(3, 4), "hard": rows(5)},
        {"easy": rows(3, 4), "hard": rows(6)},
    )
    for metric in ("eval_easy_loss", "easy_perplexity", "eval_easy_hits"):
        assert choice(metric, both) == choice(metric, other)
        assert choice(metric, both) != choice(metric, {"easy": rows(4, 3), "hard": rows(5)})
    for metric in ("loss", "eval_perplexity", "hits"):
        assert len({choice(metric, sets) for sets in (easy, both, other)}) == 3


def test_names_of_metric_and_sets_are_no_choice() -> None:
    assert choice("loss", {"a": rows(3)}) == choice("eval_loss", {"b": rows(3)})
    assert choice("loss", {"a": rows(3)}) != choice("loss", {"a": rows(3)}, greater=True)
    assert choice(None, {"a": rows(3)}) is None


def test_evaluations_without_improvement_are_counted_anew() -> None:
    state, stopping = TrainerState(best_metric=2.0, best_global_step=3), EarlyStoppingCallback(5)
    stopping.early_stopping_patience_counter = 4
    before, now = (choice(metric, {"a": rows(3)}) for metric in ("loss", "perplexity"))
    assert before is not None
    assert now is not None
    assert "(2) of step 3" in start_anew(state, [stopping], before, now)
    assert (state.best_metric, state.best_global_step, stopping.early_stopping_patience_counter) == (
        None,
        None,
        0,
    )
    assert start_anew(state, [stopping], before, now) == "", "there was no best"
