"""The command has each complete checkpoint scored once, by a process that never outlives it."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.core.processes import StoppedBySignal
from fsdp_tune.jobs import evaluating as jobs
from fsdp_tune.jobs.evaluating import Evaluating, EvaluationDevice, check_evaluation, evaluation_device
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir, complete_checkpoints
from fsdp_tune.run.metrics_file import MetricsFile, read_metrics
from tests.run.test_checkpoint_scores import save

SCORES = {"scores": {"sums/exact_match": {"value": 0.5, "low": 0.1, "high": 0.9, "rows": 8}}}
PRINTS = "import sys, json; print(json.dumps({line}))"
WAITS = "import sys, time, os; open(sys.argv[1] + '/pid', 'w').write(str(os.getpid())); time.sleep(99)"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def scored_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces the process that scores a checkpoint by a program that is given the run and the step."""
    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.05)
    return lambda program: monkeypatch.setattr(jobs, "SCORE", (sys.executable, "-I", "-S", "-c", program))


def recipe(run: RunDir, timeout: str = "1h", **training: Any) -> Recipe:
    document = {
        "model": {"name_or_path": "gpt2"},
        "data": {"train": [{"path": "rows.jsonl"}]},
        "evaluation": {"sets": [{"path": "rows.jsonl", "label": "sums", "metric": "exact_match"}], "timeout": timeout},
        "training": training,
        "launch": {"device": "cpu"},
        "output_dir": str(run.path),
    }
    return Recipe.model_validate(document)


def events(run: RunDir) -> list[tuple[str, int]]:
    return [(str(line["event"]), int(line["step"])) for line in read_metrics(run) if "evaluat" in str(line.get("event"))]


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_each_checkpoint_is_scored_once_and_old_ones_are_removed_at_the_end(run: RunDir, scored_by: Callable[[str], None]) -> None:
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    evaluations = Evaluating(run, recipe(run, save_total_limit=1), Observer())
    with evaluations.following():
        until(lambda: events(run) == [("checkpoint_evaluated", 10)])
        save(run, 20)
        save(run, 30)
        evaluations.finish()
    assert events(run) == [("checkpoint_evaluated", step) for step in (10, 20, 30)]
    assert [each.step for each in complete_checkpoints(run)[0]] == [30]
    again = Evaluating(run, recipe(run), Observer())
    with again.following():
        again.finish()
    assert len(events(run)) == 3


def test_line_that_rank_0_cut_off_is_written_again(run: RunDir, scored_by: Callable[[str], None]) -> None:
    scored_by(PRINTS.format(line=SCORES))
    save(run, 10)
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        until(lambda: len(events(run)) == 1)
        MetricsFile(run, resume_step=5, enabled=True).close()
        scored_by("raise SystemExit(1)")
        until(lambda: events(run) == [("checkpoint_evaluated", 10)])


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (PRINTS.format(line={"problem": {"code": "merge-disk-full", "message": "no room"}}), "merge-disk-full"),
        ("raise SystemExit(3)", "evaluation-failed"),
        ("import os; os.kill(os.getpid(), 9)", "evaluation-failed"),
        (WAITS, "evaluation-timeout"),
    ],
)
def test_failed_evaluation_is_an_event_and_is_tried_again_by_the_next_command(
    run: RunDir, scored_by: Callable[[str], None], program: str, code: str
) -> None:
    scored_by(program)
    save(run, 10)
    evaluations = Evaluating(run, recipe(run, "1s" if program == WAITS else "1h"), Observer())
    with evaluations.following():
        evaluations.finish()
    assert [line["code"] for line in read_metrics(run)] == [code]
    scored_by(PRINTS.format(line=SCORES))
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        evaluations.finish()
    assert events(run)[1:] == [("checkpoint_evaluated", 10)]


def test_stop_ends_the_process_and_the_next_command_evaluates(run: RunDir, scored_by: Callable[[str], None]) -> None:
    scored_by(WAITS)
    save(run, 10)
    with Evaluating(run, recipe(run), Observer()).following():
        until(lambda: (run.path / "pid").exists() and (run.path / "pid").read_text() != "")
        child = psutil.Process(int((run.path / "pid").read_text()))
    assert not child.is_running()
    assert events(run) == []
    scored_by(PRINTS.format(line=SCORES))
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        evaluations.finish()
    assert events(run) == [("checkpoint_evaluated", 10)]


def test_mistake_in_a_set_is_found_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp_tune.data.tokenise.tokenizer import load_encoder

    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a row without a prompt"}) + "\n")
    document = recipe(RunDir(tmp_path)).model_dump(by_alias=True)
    document["model"] |= {"tokenizer": "builtin:arithmetic", "tokenizer_revision": "main"}
    document["data"] |= {"cache_dir": str(tmp_path / "cache"), "num_proc": 1}
    document["evaluation"]["sets"][0]["path"] = str(tmp_path / "rows.jsonl")
    strange = Recipe.model_validate(document)
    with pytest.raises(FsdpTuneError) as caught:
        check_evaluation(strange, load_encoder(strange), Observer())
    assert caught.value.problems[0].code == "no-prompt"
    document["evaluation"]["sets"][0] |= {"path": str(tmp_path / "missing.jsonl")}
    missing = Recipe.model_validate(document)
    with pytest.raises(FsdpTuneError) as caught:
        check_evaluation(missing, load_encoder(missing), Observer())
    assert str(caught.value.problems[0].where.key).startswith("evaluation.sets[0]")


@pytest.mark.parametrize(
    ("when", "visible", "ranks", "variable", "expected"),
    [
        ("alongside", 8, 8, None, EvaluationDevice("cpu")),
        ("alongside", 8, 6, None, EvaluationDevice("cuda", {"CUDA_VISIBLE_DEVICES": "6,7"})),
        ("alongside", 3, 2, "4,5,6", EvaluationDevice("cuda", {"CUDA_VISIBLE_DEVICES": "6"})),
        ("at_end", 8, 8, None, EvaluationDevice("auto")),
    ],
)
def test_evaluation_uses_gpus_that_no_rank_uses(
    monkeypatch: pytest.MonkeyPatch, when: str, visible: int, ranks: int, variable: str | None, expected: EvaluationDevice
) -> None:
    monkeypatch.setattr(jobs, "visible_devices", lambda _: [object()] * visible)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    document = {"evaluation": {"sets": [{"path": "a"}], "when": when}, "launch": {"device": "cuda", "num_processes": ranks}}
    assert evaluation_device(Recipe.model_validate(document)) == expected


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, StoppedBySignal), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_at_the_last_step_is_not_followed_by_evaluations(
    run: RunDir, scored_by: Callable[[str], None], number: int, error: type[BaseException]
) -> None:
    scored_by(WAITS)
    save(run, 10)
    evaluations = Evaluating(run, recipe(run), Observer())
    with pytest.raises(error), evaluations.following():
        evaluations.finish(number)
    scored_by(PRINTS.format(line=SCORES))
    evaluations = Evaluating(run, recipe(run), Observer())
    with evaluations.following():
        evaluations.finish()
        evaluations.finish(number)  # nothing is left, so the run is merged
    assert events(run) == [("checkpoint_evaluated", 10)]
