"""`eval_loss` is the cross-entropy of the targets, whatever the label smoothing of the training."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case


@pytest.mark.ranks
def test_evaluation_is_without_label_smoothing(bench: Bench) -> None:
    def lines(factor: float) -> tuple[list[float], list[float]]:
        training: dict[str, Any] = {"learning_rate": 0.0, "max_steps": 1, "eval_steps": 1, "label_smoothing_factor": factor}
        training |= {"warmup_steps": 0, "save_strategy": "no", "witness": "off", "logging_steps": 1}
        case = Case(ranks=1)
        run = bench.written_run(runs.merged(case.recipe(str(bench.model("llama"))), {"training": training}))
        runs.train(bench.on_ranks, run, 1)
        found = runs.lines(run)
        return [line["loss"] for line in found if "loss" in line], [line["eval_loss"] for line in found if "eval_loss" in line]

    (plain, evaluated), (smoothed, evaluated_smoothed) = lines(0.0), lines(0.3)
    assert evaluated == evaluated_smoothed
    assert len(evaluated) == 1
    assert smoothed != plain
