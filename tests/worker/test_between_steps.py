"""`evaluation.when: between_steps`: the ranks wait for the scores of a save, and compute what they compute
without."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch

from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir, complete_checkpoints
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.events import CheckpointEvaluationFailed
from fsdp_tune.run.metrics_file import append_event
from fsdp_tune.run.rank_files import read_heartbeat
from tests.parity import runs
from tests.parity.bench import Bench
from tests.parity.cases import Case
from tests.ranks import Ranks
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


@pytest.mark.slow
@pytest.mark.ranks
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


@pytest.mark.slow
@pytest.mark.ranks
def test_evaluation_that_fails_is_an_event_and_the_run_continues(bench: Bench) -> None:
    run = new_run(bench, Case(ranks=1), CHANGES | EVALUATION)
    [outcome] = bench.on_ranks.run(1, scored_by, str(run.path), "import os; os.kill(os.getpid(), 9)")
    assert outcome["exit_reason"] == "finished"
    assert events(run) == [("checkpoint_evaluation_failed", 2)]


@pytest.mark.slow
@pytest.mark.ranks
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

    run, recipe = evaluated_run(tmp_path, (10, 20, 30))
    record, found = EvaluationRecord.read(run.evaluation_json), list[Any]()
    assert record is not None
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


def evaluated_run(folder: Path, steps: tuple[int, ...], **evaluation: object) -> tuple[RunDir, Recipe]:
    """Return a run with checkpoints of these steps, none of which has scores."""
    run = RunDir(folder / "run")
    run.logs.mkdir(parents=True)
    for step in steps:
        save(run, step)
    document = {"model": {"name_or_path": "gpt2"}, "launch": {"device": "cpu"}, "output_dir": str(run.path)}
    recipe = Recipe.model_validate(document | {"evaluation": {**EVALUATION["evaluation"], **evaluation}})
    EvaluationRecord.of(recipe.evaluation, {"sums": "digest"}).write(run.evaluation_json)
    run.recipe_json.write_text(recipe.model_dump_json(by_alias=True))
    return run, recipe


class Beats:
    """The heartbeat of a rank: its phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    @contextlib.contextmanager
    def during(self, phase: str, step: int) -> Iterator[None]:
        self.phases.append(f"{phase} {step}")
        yield
        self.phases.append("back")

    def tick(self) -> None: ...


def callback_after_save(run: RunDir, recipe: Recipe, code: int, *, saved_step: int) -> tuple[Any, Any, Any]:
    """Return the callback, its trainer, and what it prints. `code`: of the stop that this rank is asked for;
    `saved_step`: of the newest checkpoint."""
    from fsdp_tune.worker.between_steps import ScoresBetweenSteps

    events, left_out, said = list[Any](), list[float](), list[str]()
    parts = SimpleNamespace(
        run=run, recipe=recipe, heartbeat=Beats(), metrics=SimpleNamespace(event=events.append)
    )
    trainer: Any = SimpleNamespace(
        parts=parts,
        args=SimpleNamespace(device=torch.device("cpu")),
        checkpointer=SimpleNamespace(wait=lambda: None, last_step=saved_step),
        lines=SimpleNamespace(leave_out=left_out.append, seconds=left_out),
        events=events,
    )
    request: Any = SimpleNamespace(code=lambda: code)
    callback = ScoresBetweenSteps(request, said.append)
    callback.attach(trainer)
    return callback, trainer, said


def on_save(callback: Any, step: int, *, stops: bool = False) -> None:
    state, control = (
        SimpleNamespace(global_step=step, max_steps=40),
        SimpleNamespace(should_training_stop=stops),
    )
    callback.on_save(None, state, control)


def after_save(path: str, program: str, stopped_rank: int | None) -> tuple[list[str], list[str], float]:
    """On a rank: save step 20, whose checkpoint `program` scores. Returns what the rank recorded and printed,
    and the seconds that are no time of a step."""
    import torch.distributed as dist

    from fsdp_tune.launch import scoring

    run = RunDir(Path(path))
    recipe = Recipe.model_validate_json(run.recipe_json.read_bytes())
    code = 2 if dist.get_rank() == stopped_rank else 0
    callback, trainer, said = callback_after_save(run, recipe, code, saved_step=20)
    with patch.object(scoring, "SCORE", (sys.executable, "-I", "-S", "-c", program)):
        on_save(callback, 20)
    recorded = [f"{type(each).__name__} {each.step}" for each in trainer.events]
    return [*recorded, *trainer.parts.heartbeat.phases], said, trainer.lines.seconds[0]


@pytest.mark.ranks
def test_all_ranks_wait_until_the_first_has_the_scores(tmp_path: Path, on_ranks: Ranks) -> None:
    run, _ = evaluated_run(tmp_path, (10, 20), every=20)
    program = f"import time; time.sleep(0.4); {PRINTS}"
    first, second = on_ranks.run(2, after_save, str(run.path), program, None)
    phases = ["evaluating a checkpoint 20", "back"]
    assert first[:2] == (
        ["CheckpointEvaluated 20", *phases],
        ["the ranks wait while checkpoint-20 is evaluated"],
    )
    assert second[:2] == (phases, [])
    assert min(first[2], second[2]) >= 0.4


@pytest.mark.ranks
def test_request_to_stop_of_any_rank_ends_the_wait_and_the_evaluation(
    tmp_path: Path, on_ranks: Ranks
) -> None:
    run, _ = evaluated_run(tmp_path, (20,))
    began = time.monotonic()
    first, _ = on_ranks.run(2, after_save, str(run.path), "import time; time.sleep(99)", 1)
    assert time.monotonic() - began < 60
    assert "CheckpointEvaluated 20" not in first[0]
    left = [
        each for each in psutil.process_iter(["cmdline"]) if str(run.path) in (each.info["cmdline"] or [])
    ]
    assert left == []


@pytest.mark.parametrize(
    ("step", "saved_step", "stops"),
    [(40, 40, False), (20, 20, True), (30, 30, False), (20, 10, False)],
    ids=["last step", "run that is ending", "step without evaluation", "save that failed"],
)
def test_nothing_is_waited_for_without_a_checkpoint_to_score_now(
    step: int, saved_step: int, stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, recipe = evaluated_run(tmp_path, (20,), every=20)
    callback, _, _ = callback_after_save(run, recipe, 0, saved_step=saved_step)
    monkeypatch.setattr(callback, "_wait", lambda: pytest.fail("the ranks would stand still"))
    on_save(callback, step, stops=stops)


def test_step_that_is_saved_twice_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an epoch requests the save of a step again."""
    run, recipe = evaluated_run(tmp_path, (20,))
    callback, trainer, _ = callback_after_save(run, recipe, 0, saved_step=20)
    waits: list[str] = []
    monkeypatch.setattr(callback, "_wait", lambda: waits.append("waited"))
    on_save(callback, 20)
    on_save(callback, 20)
    assert (waits, len(trainer.lines.seconds)) == (["waited"], 1)


def test_evaluation_that_cannot_start_is_left_to_the_command(tmp_path: Path) -> None:
    """The ranks wait for nothing, and the run continues."""
    from fsdp_tune.worker import between_steps

    run, recipe = evaluated_run(tmp_path, (10, 20))
    _, trainer, said = callback_after_save(run, recipe, 0, saved_step=20)
    with patch.object(between_steps, "ScoringProcess", side_effect=OSError("no space")):
        waiting = between_steps._Waiting(trainer.parts, said.append)
        assert waiting.are_scored()
    waiting.end()
    assert (trainer.events, len(said)) == ([], 2)
    run.metrics_jsonl.mkdir()
    assert between_steps._Waiting(trainer.parts, said.append).are_scored(), "its scores cannot be read"
