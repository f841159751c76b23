"""The first moments of a resumed run: what it owes to the step at which it stopped, and what it must not do
again."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_tune.data.preparation import Prepared
from fsdp_tune.run.directory import RunDir, best_so_far
from fsdp_tune.run.launch_files import ResumeRequest
from fsdp_tune.run.manifest import digest
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.test_resume import stop_after
from tests.session import made_once

pytestmark = pytest.mark.ranks

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
DONOR_STEPS = 4


def new_run(bench: Bench, training: dict[str, Any], folder: Path | None = None) -> RunDir:
    training = {
        "max_steps": 8,
        "save_steps": 2,
        "eval_steps": 2,
        "warmup_steps": 0,
        "witness": "off",
        "global_batch_size": 16,
    } | training
    changes = {"model": {"from_config": GPT2}, "training": training, "launch": {"num_processes": 1}}
    return bench.written_run(changes, vocabulary=384, folder=folder)


def donor(bench: Bench, **training: Any) -> RunDir:
    """A run that has finished after `DONOR_STEPS`, with a checkpoint and an evaluation at each second
    step."""

    def make(folder: Path) -> None:
        runs.train(
            bench.on_ranks,
            new_run(bench, {"max_steps": DONOR_STEPS, "lr_scheduler_type": "constant"} | training, folder),
            1,
        )

    return RunDir(made_once(f"{bench.folder.name}/resume-{digest(repr(sorted(training.items())))}", make))


def resumed(bench: Bench, source: RunDir, step: int, *, eval_rows: str = "eval", **training: Any) -> RunDir:
    """A run that has continued from a checkpoint of `source`, and evaluates this set of the store."""
    run = new_run(bench, {"lr_scheduler_type": "constant"} | training)
    prepared = Prepared.read(run.data_json)
    assert prepared is not None
    replace(prepared, evals={"eval": str(bench.store / eval_rows)}).write(run.data_json)
    runs.resume_from(run, source, step)
    runs.train(bench.on_ranks, run, 1)
    return run


def steps(run: RunDir, kind: str) -> list[int]:
    return [line["step"] for line in runs.lines(run) if kind in line]


@pytest.mark.parametrize(
    "length", [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 0.6}], ids=["steps", "epochs"]
)
def test_checkpoint_of_the_last_step_is_trained_no_further(bench: Bench, length: dict[str, Any]) -> None:
    run = resumed(bench, donor(bench), 4, **length, witness=1)
    assert steps(run, "loss") == [1, 2, 3, 4]
    assert [path.name for path in run.path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert [line["step"] for line in runs.lines(run) if line.get("event") == "train_finished"][-1] == 4


def test_run_in_another_directory_that_ends_where_it_starts_has_a_checkpoint(bench: Bench) -> None:
    source = donor(bench)
    run = new_run(bench, {"max_steps": 4})
    (run.path / "resume.json").write_text(f'{{"resume_from": "{source.checkpoint(4)}"}}')
    runs.train(bench.on_ranks, run, 1)
    one, other = (runs.saved_parameters(each, 4) for each in (run, source))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    generators = [
        torch.load(each.checkpoint(4) / "rng_state_0.pth", weights_only=True)["rng"]["torch"]
        for each in (run, source)
    ]
    assert torch.equal(*generators)


BEST: dict[str, Any] = {
    "load_best_model_at_end": True,
    "early_stopping": {"patience": 9},
    "learning_rate": 3e-2,
}


def restarts(run: RunDir) -> list[str]:
    return [line["message"] for line in runs.lines(run) if line.get("event") == "best_restarted"]


@pytest.mark.parametrize(
    ("changed", "eval_rows", "words"),
    [
        ({"metric_for_best_model": "perplexity"}, "eval", "it is the lowest eval_perplexity now"),
        ({"greater_is_better": True}, "eval", "it is the highest eval_loss now"),
        ({}, "train", "eval_loss is measured on other rows now"),
    ],
)
def test_best_of_another_metric_or_other_rows_does_not_count(
    bench: Bench, changed: dict[str, Any], eval_rows: str, words: str
) -> None:
    run = resumed(bench, donor(bench, **BEST), 4, eval_rows=eval_rows, **BEST | {"max_steps": 6} | changed)
    [message] = restarts(run)
    assert message.startswith("the best so far, the lowest eval_loss (")
    assert message.endswith(f"no longer counts: {words}")
    name = f"eval_{changed.get('metric_for_best_model', 'loss')}"
    lines = runs.lines(run)
    since = lines[[line.get("event") for line in lines].index("best_restarted") :]
    values = [(line["step"], line[name]) for line in since if name in line]
    assert [step for step, _ in values] == [4, 6], "the step of the checkpoint is evaluated again"
    assert best_so_far(run.checkpoint(6)) == (max if changed.get("greater_is_better") else min)(
        values, key=lambda value: value[1]
    )


def test_best_goes_on_with_an_unchanged_metric(bench: Bench) -> None:
    """Also through a start that chooses no checkpoint, and under the metric's other name."""
    source = donor(bench, **BEST)
    between = resumed(bench, source, 4, max_steps=6, learning_rate=3e-2)
    run = resumed(bench, between, 6, **BEST | {"metric_for_best_model": "eval_loss"})
    assert restarts(between) == restarts(run) == []
    before, after = (best_so_far(each.checkpoint(step)) for each, step in ((source, 4), (run, 8)))
    assert before is not None
    assert after is not None
    assert after.metric is not None
    assert before.metric is not None
    assert after.metric <= before.metric


def stopped(bench: Bench, step: int, **training: Any) -> RunDir:
    """A run that a signal has stopped after `step`; it is noticed one step after it arrives."""
    run = new_run(bench, training)
    [outcome] = bench.on_ranks.run(1, functools.partial(stop_after, str(run.path), step - 1, 0))
    assert (outcome["exit_reason"], outcome["step"]) == ("preempted", step), outcome["traceback"]
    return run


def go_on(bench: Bench, run: RunDir, step: int) -> RunDir:
    ResumeRequest(str(run.checkpoint(step))).write(run.resume_json)
    runs.train(bench.on_ranks, run, 1)
    return run


def evaluations(run: RunDir) -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in runs.lines(run) if "eval_loss" in line]


@pytest.mark.parametrize(
    ("training", "step"),
    [
        ({"max_steps": 6}, 4),
        ({"max_steps": 6, "eval_delay": 5}, 4),
        ({"max_steps": -1, "num_train_epochs": 1.5, "eval_strategy": "epoch"}, 6),
    ],
    ids=["steps", "delay", "epoch"],
)
def test_evaluation_that_a_stop_left_out_is_made_up_before_the_next_step(
    bench: Bench, training: dict[str, Any], step: int
) -> None:
    training = BEST | training | {"save_steps": 2, "load_best_model_at_end": False}
    whole = new_run(bench, training)
    runs.train(bench.on_ranks, whole, 1)
    run = stopped(bench, step, **training)
    assert step not in steps(run, "eval_loss")
    # it has been stopped once more before its next save, and evaluates the step again
    for _ in range(2):
        go_on(bench, run, step)
        assert evaluations(run) == evaluations(whole)
    one, other = ([(line["step"], line["loss"]) for line in runs.loss_lines(each)] for each in (run, whole))
    assert one == other
    last = steps(whole, "loss")[-1]
    weights, expected = (runs.saved_parameters(each, last) for each in (run, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert best_so_far(run.checkpoint(last)) == best_so_far(whole.checkpoint(last))


def test_evaluation_that_is_made_up_ends_a_run_early(bench: Bench) -> None:
    run = stopped(bench, 4, early_stopping={"patience": 1, "threshold": 1e6})
    for _ in range(2):
        go_on(bench, run, 4)
        assert (steps(run, "loss"), steps(run, "eval_loss")) == ([1, 2, 3, 4], [2, 4])
        assert [line["step"] for line in runs.lines(run) if line.get("event") == "early_stopped"] == [4]


def test_step_of_the_checkpoint_is_evaluated_once(bench: Bench) -> None:
    """`eval_on_start` is for a start at step 0: a second evaluation of a step would be one without
    improvement for early stopping."""
    training: dict[str, Any] = {
        "early_stopping": {"patience": 1},
        "eval_on_start": True,
        "learning_rate": 1e-3,
    }
    run = resumed(bench, donor(bench, **training), 4, eval_rows="eval", **training)
    assert steps(run, "eval_loss") == [0, 2, 4, 6, 8]
    assert steps(run, "loss")[-1] == 8


def test_last_step_is_evaluated_although_its_checkpoint_was_not(bench: Bench) -> None:
    source = donor(bench, **BEST | {"eval_steps": 4, "load_best_model_at_end": False})
    run = resumed(bench, source, 2, **BEST | {"max_steps": 2})
    [(step, loss)] = evaluations(run)
    assert step == 2
    assert best_so_far(run.checkpoint(2)) == (2, loss)
