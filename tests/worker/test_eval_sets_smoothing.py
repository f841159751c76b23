"""`eval_loss` is the cross-entropy of the targets, whatever the training loss."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case


@pytest.mark.ranks
def test_evaluation_is_without_label_smoothing_and_weights(bench: Bench) -> None:
    def lines(**keys: Any) -> tuple[list[float], list[float]]:
        training: dict[str, Any] = {"learning_rate": 0.0, "max_steps": 1, "eval_steps": 1, **keys}
        training |= {"warmup_steps": 0, "save_strategy": "no", "witness": "off", "logging_steps": 1}
        case = Case(ranks=1)
        run = bench.written_run(runs.merged(case.recipe(str(bench.model("llama"))), {"training": training}))
        runs.train(bench.on_ranks, run, 1)
        found = runs.lines(run)
        return [line["loss"] for line in found if "loss" in line], [
            line["eval_loss"] for line in found if "eval_loss" in line
        ]

    (plain, evaluated), (smoothed, evaluated_smoothed), (weighted, evaluated_weighted) = (
        lines(),
        lines(label_smoothing_factor=0.3),
        lines(loss="dft"),
    )
    assert evaluated == evaluated_smoothed == evaluated_weighted
    assert len(evaluated) == 1
    assert smoothed != plain
    assert weighted[0] <= math.exp(-1), "the most that -p log p can be"
