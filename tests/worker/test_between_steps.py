"""`evaluation.when: between_steps`: the ranks wait for the scores of a save, and compute what they compute
without."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir, complete_checkpoints
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.events import CheckpointEvaluationFailed
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.run.rank_files import read_heartbeat
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.run.test_checkpoint_scores import save
from tests.worker.short_runs import new_run

SCORES = {"scores": {"sums/exact_match": {"value": 0.5, "low": 0.1, "high": 0.9, "rows": 8}}}
PRINTS = f"import json; print(json.dumps({SCORES}))"
PRINTS_LATE = f"import time; time.sleep(6); {PRINTS}"
WAITS = "import sys, time, os; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(99)"
CHANGES: dict[str, Any] = {"training": {"max_steps": 4, "save_steps": 2, "save_total_limit": None}}
EVALUATION: dict[str, Any] = {
    "evaluation": {"sets": [{"path": "rows.jsonl", "label": "sums"}], "when": "between_steps"}
}

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def scored_by(path: str, program: str) -> dict[str, Any]:
    """On a rank: the worker, with another program in the place of the one that scores a checkpoint."""
    from fsdp_tune.launch import scoring

    with patch.object(scoring, "SCORE", (sys.executable, "-I", "-S", "-c", program)):
        return runs.run_worker(path)


def signalled(path: str, program: str) -> dict[str, Any]:
    """On a rank: the second of two gets SIGTERM while both wait; the time from there to the end of the wait
    is in `seconds`."""
    import torch.distributed as dist

    run = RunDir(Path(path))
    took: list[float] = []

    def send() -> None:
        while not ((run.path / "pid").exists() and (run.path / "pid").read_text()):
            time.sleep(0.02)
        began = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        while (beat := read_heartbeat(run, 1)) is None or beat.phase == "evaluating a checkpoint":
            time.sleep(0.02)
        took.append(time.monotonic() - began)

    if dist.get_rank() == 1:
        threading.Thread(target=send, daemon=True).start()
    try:
        outcome = scored_by(path, program)
    except runs.Leaves as left:
        outcome = left.value
    return outcome | {"seconds": took}


def events(run: RunDir) -> list[tuple[str, int]]:
    return [
        (line["event"], line["step"])
        for line in runs.lines(run)
        if "checkpoint_evaluat" in line.get("event", "")
    ]


def numbers(run: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in runs.loss_lines(run)]


def test_ranks_wait_for_the_scores_and_the_run_is_bitwise_the_same(bench: Bench) -> None:
    alone, waiting = (new_run(bench, Case(ranks=2), CHANGES | more) for more in ({}, EVALUATION))
    runs.train(bench.on_ranks, alone, 2)
    outcomes = bench.on_ranks.run(2, scored_by, str(waiting.path), PRINTS_LATE)
    assert [each["exit_reason"] for each in outcomes] == ["finished", "finished"]
    assert numbers(alone) == numbers(waiting)
    one, other = (
        {str(file.relative_to(run.path)): file.read_bytes() for file in run.checkpoint(4).rglob("*.distcp")}
        for run in (alone, waiting)
    )
    assert one == other
    assert len(one) >= 2, "model and optimizer"
    assert events(waiting) == [("checkpoint_evaluated", 2)], "the last one is scored after the ranks"
    seconds = [line["step_seconds"] for line in runs.loss_lines(waiting)]
    assert max(seconds) < 6, f"the wait is no time of a step: {seconds}"


def test_evaluation_that_fails_is_an_event_and_the_run_continues(bench: Bench) -> None:
    run = new_run(bench, Case(ranks=1), CHANGES | EVALUATION)
    [outcome] = bench.on_ranks.run(1, scored_by, str(run.path), "import os; os.kill(os.getpid(), 9)")
    assert outcome["exit_reason"] == "finished"
    assert events(run) == [("checkpoint_evaluation_failed", 2)]


def test_signal_ends_the_wait_within_a_second_and_the_run_saves(bench: Bench) -> None:
    """The next step needs the memory, so the process of the evaluation is gone by then."""
    run = new_run(
        bench,
        Case(ranks=2),
        {"training": CHANGES["training"] | {"max_steps": 8, "save_steps": 2}} | EVALUATION,
    )
    _, outcome = bench.on_ranks.run(2, signalled, str(run.path), WAITS)
    assert outcome["exit_reason"] == "preempted"
    [seconds] = outcome["seconds"]
    assert seconds < 1.0 + 0.1 * psutil.getloadavg()[0], "on an idle machine within a second"
    assert not psutil.pid_exists(int((run.path / "pid").read_text()))
    assert events(run) == [], "the next start evaluates it"
    assert complete_checkpoints(run)[0][0].step in (3, 4)
    json.loads(run.rank_outcome(0).read_text())


def test_checkpoint_whose_wait_was_cut_is_scored_with_the_next_one(tmp_path: Path) -> None:
    """The oldest first, and one whose evaluation failed in this start not again."""
    from fsdp_tune.launch import scoring
    from fsdp_tune.worker.between_steps import _Waiting

    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    for step in (10, 20, 30):
        save(run, step)
    document = {
        "model": {"name_or_path": "gpt2"},
        "launch": {"device": "cpu"},
        "output_dir": str(run.path),
    } | EVALUATION
    recipe, found = Recipe.model_validate(document), list[Any]()
    record = EvaluationRecord.of(recipe.evaluation, {"sums": "digest"})
    record.write(run.evaluation_json)
    failed = next(each for each in complete_checkpoints(run)[0] if each.step == 20).manifest.identity
    append_event(run, CheckpointEvaluationFailed(20, failed, "evaluation-failed", "killed", record.command))
    parts: Any = SimpleNamespace(run=run, recipe=recipe, metrics=SimpleNamespace(event=found.append))
    with patch.object(scoring, "SCORE", (sys.executable, "-I", "-S", "-c", PRINTS)):
        waiting, limit = _Waiting(parts, lambda _: None), time.monotonic() + 60
        while not waiting.are_scored():
            assert time.monotonic() < limit
            time.sleep(0.02)
        waiting.end()
    assert [each.step for each in found] == [10, 30]
    assert all(each.ranks_waited_seconds > 0 for each in found)
