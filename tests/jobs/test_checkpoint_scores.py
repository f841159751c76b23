"""The process of an evaluation scores what evaluation.json defines, and nothing that cannot be compared."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import FailedError
from fsdp_tune.jobs import checkpoint_scores as jobs
from fsdp_tune.jobs.checkpoint_scores import score_checkpoint
from fsdp_tune.jobs.evaluate import CheckpointResults
from fsdp_tune.jobs.evaluated_recipes import options_of_set, recipe_of_set
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
