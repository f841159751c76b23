"""The process of an evaluation scores what evaluation.json defines, and nothing that cannot be compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.answer.statistics import Estimate
from fsdp_tune.core.errors import FailedError, Notice, failed_error
from fsdp_tune.jobs import checkpoint_scores as jobs
from fsdp_tune.jobs.checkpoint_scores import score_checkpoint
from fsdp_tune.jobs.evaluate import CheckpointResults
from fsdp_tune.jobs.evaluated_recipes import options_of_set, recipe_of_set
from fsdp_tune.jobs.evaluated_sets import SetResult
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.evaluation_record import EvaluationRecord
from fsdp_tune.run.event_parts import CheckpointScore

SOURCE = {
    "path": "a.jsonl",
    "format": "alpaca",
    "loss_on": "all",
    "rename_columns": {"a": "b"},
    "chat_template": "chatml",
}


def recipe(**evaluation: Any) -> Recipe:
    data = {"train": [SOURCE], "drop_duplicates": True, "loss_on": "assistant"}
    return Recipe.model_validate({"model": {"name_or_path": "gpt2"}, "data": data, "evaluation": evaluation})


@pytest.fixture
def merges(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The options of each merge; the run was started without `evaluation:`."""
    found: list[Any] = []

    def merge(_: Path, options: Any) -> SimpleNamespace:
        found.append(options)
        rounded = SimpleNamespace(path=options.output.with_name("rounded")) if options.quantise else None
        return SimpleNamespace(output=options.output, quantised=rounded)

    monkeypatch.setattr(jobs, "merge_checkpoint", merge)
    monkeypatch.setattr(jobs, "read_resolved", lambda _: recipe())
    return found


def test_evaluation_of_the_command_is_scored_without_the_quantised_model(
    tmp_path: Path, merges: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    infinite = float("inf")

    def score_tasks(_: Path, own: Recipe, __: str) -> dict[str, CheckpointScore]:
        values = {"acc": (0.5, 0.25), "perplexity": (infinite, 1.0), "word_perplexity": (3.0, infinite)}
        return {
            f"{own.evaluation.tasks[0]}/{name}": CheckpointScore(value, None, high, 8)
            for name, (value, high) in values.items()
        }

    monkeypatch.setattr(jobs, "_score_tasks", score_tasks)
    run = RunDir(tmp_path)
    EvaluationRecord.of(recipe(tasks=["arc_easy"]).evaluation, {}).write(run.evaluation_json)
    scores, warnings = score_checkpoint(run, 10, "cpu")
    assert {name: (score.value, score.high) for name, score in scores.items()} == {
        "arc_easy/acc": (0.5, 0.25),
        "arc_easy/word_perplexity": (3.0, None),
    }
    assert warnings == ["`arc_easy/perplexity` is inf, so it is left out"]
    assert [options.quantise for options in merges] == [False]


def test_quantised_model_is_scored_if_the_run_ships_it(
    tmp_path: Path, merges: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its scores are those of rounded weights, and cannot be compared with those of others."""
    scored: list[Path] = []
    monkeypatch.setattr(jobs, "_score_tasks", lambda model, *_: scored.append(model) or {})
    own = Recipe.model_validate(
        recipe(tasks=["arc_easy"]).model_dump(by_alias=True)
        | {"quantization": {"train": "int4"}, "merge": {"quantise": True}}
    )
    monkeypatch.setattr(jobs, "read_resolved", lambda _: own)
    score_checkpoint(RunDir(tmp_path), 10, "cpu")
    assert [path.name for path in scored] == ["rounded"]
    assert [options.quantise for options in merges] == [True]
    records = [EvaluationRecord.of(own.evaluation, {}, is_rounded=is_rounded) for is_rounded in (False, True)]
    assert records[0].definition != records[1].definition


def test_rows_that_changed_after_the_start_are_not_scored(
    tmp_path: Path, merges: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        jobs, "evaluate_checkpoint", lambda *_: CheckpointResults({}, {"test": "other rows"}, [])
    )
    run = RunDir(tmp_path)
    EvaluationRecord.of(recipe(sets=[{"path": "test.jsonl"}]).evaluation, {"test": "rows"}).write(
        run.evaluation_json
    )
    with pytest.raises(FailedError, match="rows of `test` are not those that the start of the run read"):
        score_checkpoint(run, 10, "cpu")
    assert len(merges) == 1


def test_set_has_nothing_of_the_training_rows() -> None:
    own = recipe(sets=[{"path": "test.jsonl", "max_rows": 8}])
    (entry,) = own.evaluation.sets
    data = recipe_of_set(own, options_of_set(entry, own)).data
    (source,) = data.train
    assert (source.path, source.max_rows) == ("test.jsonl", 8)
    assert (source.format, source.loss_on, source.rename_columns, source.chat_template) == (
        None,
        None,
        {},
        None,
    )
    assert (data.drop_duplicates, data.loss_on) == (False, "assistant")


@pytest.mark.parametrize(("words", "niceness"), [([], []), (["low-priority"], [10])])
def test_priority_is_lower_only_on_request(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    niceness: list[int],
) -> None:
    found: list[int] = []
    monkeypatch.setattr(jobs.os, "nice", found.append)
    monkeypatch.setattr(jobs, "_FIRST_OUT_OF_MEMORY", Path("/proc/self/oom_score_adj").read_text().strip())
    monkeypatch.setattr(jobs, "score_checkpoint", lambda *_: ({}, []))
    monkeypatch.setattr(jobs.sys, "argv", ["checkpoint_scores", str(tmp_path), "10", "cpu", *words])
    jobs.main()
    assert found == niceness
    assert capsys.readouterr().out == '{"scores": {}, "warnings": []}\n'


def test_scores_of_a_set_are_named_by_its_label_and_metric(
    tmp_path: Path, merges: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [
        {"path": "a.jsonl", "label": "sums", "metric": "exact_match"},
        {"path": "b.jsonl", "metric": "perplexity"},
    ]
    evaluated: list[Any] = []

    def evaluate_checkpoint(run: RunDir, model: Path, options: dict[str, Any]) -> CheckpointResults:
        evaluated.append((run, model.name, {label: each.device for label, each in options.items()}))
        half, three = Estimate(0.5, 0.25, 0.75), Estimate(3.0, 2.0, float("inf"))
        found = {
            "sums": SetResult(8, 0, 10, half),
            "b": SetResult(4, 0, 10, three, Estimate(1.1, 1.0, 1.2)),
        }
        return CheckpointResults(found, {"sums": "x", "b": "y"}, [Notice("few-rows", "too narrow")])

    monkeypatch.setattr(jobs, "evaluate_checkpoint", evaluate_checkpoint)
    run = RunDir(tmp_path)
    EvaluationRecord.of(recipe(sets=sets).evaluation, {"sums": "x", "b": "y"}).write(run.evaluation_json)
    scores, warnings = score_checkpoint(run, 10, "cpu")
    assert scores == {
        "sums/exact_match": CheckpointScore(0.5, 0.25, 0.75, 8),
        "b/perplexity": CheckpointScore(3.0, 2.0, None, 4),
        "b/loss": CheckpointScore(1.1, 1.0, 1.2, 4),
    }
    assert warnings == ["too narrow"]
    assert evaluated == [(run, "checkpoint-10-model", {"sums": "cpu", "b": "cpu"})]


ANSWERS = (
    "import json, sys; asked = json.loads(sys.stdin.readline()); "
    "print(json.dumps({'scores': {'/'.join(%s): %r}}))"
)


def test_tasks_are_run_by_a_child_on_the_merged_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score = {"value": 0.5, "low": 0.25, "high": 0.75, "rows": 8}
    own = recipe(tasks=["arc_easy", "gsm8k"], task_rows=8)
    model: Any = SimpleNamespace(weights="there", adapter=None)
    monkeypatch.setattr(jobs, "find_model", lambda _: model)
    program = ANSWERS % ("[asked['weights'], *asked['tasks'], str(asked['rows']), asked['device']]", score)
    monkeypatch.setattr(jobs, "TASKS", (sys.executable, "-I", "-S", "-c", program))
    assert jobs._score_tasks(tmp_path, own, "cpu") == {"there/arc_easy/gsm8k/8/cpu": CheckpointScore(**score)}
    monkeypatch.setattr(jobs, "TASKS", (sys.executable, "-I", "-S", "-c", "raise SystemExit('no such task')"))
    with pytest.raises(FailedError, match=r"lm_eval could not run arc_easy, gsm8k: .*no such task"):
        jobs._score_tasks(tmp_path, own, "cpu")


def test_process_that_cannot_score_prints_its_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        print("a library prints this")
        raise failed_error("merge-disk-full", "no room", hint="free space")

    monkeypatch.setattr(jobs, "score_checkpoint", refuse)
    monkeypatch.setattr(jobs, "_FIRST_OUT_OF_MEMORY", Path("/proc/self/oom_score_adj").read_text().strip())
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path), "10", "cpu"])
    jobs.main()
    printed = capsys.readouterr()
    problem = json.loads(printed.out)["problem"]
    assert (problem["code"], problem["message"], problem["hint"]) == (
        "merge-disk-full",
        "no room",
        "free space",
    )
    assert printed.err == "a library prints this\n"
