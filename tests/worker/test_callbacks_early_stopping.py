"""A run that `training.early_stopping` ends, and what it leaves."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import on_devices
from tests.parity import runs
from tests.parity.bench import Bench

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}


def run_of(bench: Bench, **training: Any) -> RunDir:
    training = {"max_steps": 20, "logging_steps": 4, "eval_steps": 2, "save_steps": 20} | training
    changes = {"model": {"from_config": GPT2}, "training": training, "launch": {"num_processes": 2}}
    run = bench.written_run(changes, vocabulary=384)
    runs.train(bench.on_ranks, run, 2)
    return run


@on_devices
@pytest.mark.ranks
@pytest.mark.parametrize("metric", [None, "perplexity"])
def test_run_that_does_not_improve_ends_with_line_checkpoint_and_reason(
    bench: Bench, metric: str | None
) -> None:
    run = run_of(bench, early_stopping={"patience": 2, "threshold": 1e6}, metric_for_best_model=metric)
    assert [line["step"] for line in runs.lines(run) if "eval_loss" in line] == [2, 4, 6]
    assert [line["step"] for line in runs.loss_lines(run)] == [4, 6], (
        "the tokens of the last steps are counted"
    )
    (ended,) = [line for line in runs.lines(run) if line.get("event") == "early_stopped"]
    assert ended["step"] == 6
    assert ended["message"].startswith(f"{metric or 'loss'} has not improved in 2 evaluations; the best is ")
    assert run.checkpoint(6).is_dir()


@pytest.mark.ranks
@pytest.mark.parametrize("patience", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_run_that_evaluates_at_its_last_step_is_not_ended_early(bench: Bench, patience: int | None) -> None:
    run = run_of(bench, max_steps=4, early_stopping=patience and {"patience": patience, "threshold": 1e6})
    assert [line["step"] for line in runs.lines(run) if "eval_loss" in line] == [2, 4]
    assert not [line for line in runs.lines(run) if line.get("event") == "early_stopped"]
