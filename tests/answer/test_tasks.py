"""Tasks of lm_eval on the model of a checkpoint: what it is called with, and the names and intervals of its
scores."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.answer.tasks import run
from fsdp_tune.answer.tasks_request import TasksRequest

RESULTS: dict[str, Any] = {
    "results": {
        "arc_easy": {
            "alias": "arc_easy",
            "acc,none": 0.5,
            "acc_stderr,none": 0.1,
            "acc_norm,none": 0.25,
            "acc_norm_stderr,none": "N/A",
        },
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.125,
            "exact_match_stderr,strict-match": 0.0,
        },
        "wikitext": {
            "alias": "wikitext",
            "word_perplexity,none": float("inf"),
            "bits_per_byte,none": float("nan"),
        },
    },
    "n-samples": {
        "arc_easy": {"original": 2376, "effective": 20},
        "gsm8k": {"original": 1319, "effective": 8},
    },
}


@pytest.mark.parametrize("adapter", [None, "folder/adapter"])
def test_scores_are_named_by_task_metric_and_filter(
    monkeypatch: pytest.MonkeyPatch, adapter: str | None
) -> None:
    called: dict[str, Any] = {}

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        called.update(options)
        return RESULTS

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    request = TasksRequest(
        "folder/model", adapter, ["arc_easy", "gsm8k"], 20, 4, "cpu", trust_remote_code=False
    )
    scores = run(TasksRequest.from_json(request.as_json()))
    assert list(scores) == ["arc_easy/acc", "arc_easy/acc_norm", "gsm8k/exact_match.strict-match"]
    assert [(each.value, each.rows) for each in scores.values()] == [(0.5, 20), (0.25, 20), (0.125, 8)]
    assert scores["arc_easy/acc"].low == pytest.approx(0.5 - 1.96 * 0.1, abs=1e-4)
    assert scores["arc_easy/acc_norm"].high is None
    assert (called["tasks"], called["limit"], called["batch_size"], called["device"]) == (
        ["arc_easy", "gsm8k"],
        20,
        4,
        "cpu",
    )
    assert called["model_args"].get("peft") == adapter
