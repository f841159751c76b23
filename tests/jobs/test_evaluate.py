"""The processes that run the models of an evaluation, its metric, and the model card that gets the result."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fsdp_tune.answer.find_model import ModelToEvaluate
from fsdp_tune.answer.model_requests import Request
from fsdp_tune.answer.statistics import Estimate
from fsdp_tune.core.errors import ExitCode, FailedError, FsdpTuneError, Problem, usage_error
from fsdp_tune.jobs import evaluate as jobs
from fsdp_tune.jobs.evaluated_sets import SetResult
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, EvaluateOptions
from fsdp_tune.recipe.extensions import Extension
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.run.test_checkpoint_scores import write_recipe


class Noted(Observer):
    def __init__(self) -> None:
        self.codes: list[str] = []

    def notices(self, notices: Any) -> None:
        self.codes += [notice.code for notice in notices]


@pytest.mark.parametrize(
    ("device", "given", "processes"),
    [("cpu", None, 1), ("cpu", 5, 5), ("cuda", None, 4), ("cuda", 3, 3), ("cuda", 5, None)],
)
def test_models_run_on_each_gpu_and_once_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, given: int | None, processes: int | None
) -> None:
    monkeypatch.setattr(jobs, "this_machine", lambda _: SimpleNamespace(device="cuda", device_count=4))
    options = EvaluateOptions(num_processes=given)
    if processes is not None:
        assert jobs.processes_of(options, device) == processes
        return
    with pytest.raises(FsdpTuneError, match="this machine shows 4 of cuda") as caught:
        jobs.processes_of(options, device)
    assert caught.value.problems[0].hint == "--num-processes 4"


def test_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = ["cuda"]
    monkeypatch.setattr(jobs, "this_machine", lambda _: SimpleNamespace(device=found[0]))
    assert [jobs.device_of(kind) for kind in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    found[0] = None
    assert jobs.device_of("auto") == "cpu"
    with pytest.raises(FsdpTuneError, match="`--device cuda`: this machine shows no accelerator"):
        jobs.device_of("cuda")


INSTALLED = Extension("metrics", "bleu", "x:bleu", "x", "1.0")


def test_metric_of_a_package_is_called_only_on_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_extension(_: str, name: str) -> Extension:
        if name != "bleu":
            raise usage_error("unknown-extension", "not installed", hint="installed: bleu")
        return INSTALLED

    monkeypatch.setattr(jobs, "find_extension", find_extension)
    assert jobs._extension(EvaluateOptions(metric="exact_match", answer="(.*)")) is None
    assert jobs._extension(EvaluateOptions(metric="perplexity")) is None
    allowed = EvaluateOptions(metric="bleu", allowed=Allowed(extensions=True))
    assert jobs._extension(allowed) == INSTALLED
    refused = {
        "extension-not-allowed": EvaluateOptions(metric="bleu"),
        "answer-pattern": EvaluateOptions(metric="perplexity", answer="(.*)"),
        "unknown-extension": EvaluateOptions(metric="rouge", allowed=Allowed(extensions=True)),
    }
    for code, options in refused.items():
        with pytest.raises(FsdpTuneError) as caught:
            jobs._extension(options)
        (problem,) = caught.value.problems
        assert problem.code == code
    assert problem.message == "`--metric rouge`: not installed"
    assert problem.hint == "this package has exact_match and perplexity; installed: bleu"


class Scored(dict[str, Any]):
    """What the children of an evaluation have sent, by their sets."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int, int]] = []

    def __getitem__(self, label: str) -> Any:
        return SimpleNamespace(add=lambda model, rows: self.sent.append((label, model, len(rows))))


def request(**changes: Any) -> Request:
    plain: dict[str, Any] = {
        "vocabulary_size": 9,
        "pad_id": 0,
        "batch_size": 1,
        "device": "cpu",
        "dtype": "auto",
    }
    return Request(models=[], sets={}, **plain | changes)


ANSWERS = """
import json, os, sys
asked = json.loads(sys.stdin.readline())
label = f"{asked['part']} on {asked['device']} with {os.environ.get('OMP_NUM_THREADS')}"
print(json.dumps({"set": label, "model": 1, "rows": [{"index": 0}, {"index": 1}]}))
"""


@pytest.mark.parametrize(
    ("changes", "threads", "label"),
    [
        ({}, "8", "1 on cpu with 8"),
        ({"parts": 3}, None, "1 on cpu with 4"),
        ({"parts": 3}, "8", "1 on cpu with 8"),
        ({"device": "cuda"}, None, "1 on cuda with None"),
        ({"device": "cuda", "parts": 3}, None, "1 on cuda:1 with None"),
    ],
)
def test_each_process_has_a_gpu_of_its_own_or_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], threads: str | None, label: str
) -> None:
    """A number of threads that the user has set stays."""
    monkeypatch.setattr(jobs, "this_machine", lambda _: SimpleNamespace(cores=13))
    monkeypatch.setattr(jobs, "SCORE", (sys.executable, "-I", "-S", "-c", ANSWERS))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    scored, counted = Scored(), list[int]()
    bar = SimpleNamespace(advance=counted.append)
    jobs._run_part(request(**changes), 1, scored, cast(Any, bar), threading.Lock())
    assert (scored.sent, counted) == ([(label, 1, 2)], [2])


def test_model_that_cannot_be_run_is_a_failure_with_the_problem_or_the_last_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bar = cast(Any, SimpleNamespace(advance=pytest.fail))
    problem = Problem("device-out-of-memory", "no memory").as_dict()
    line = json.dumps({"problems": [problem], "exit_code": 3})
    monkeypatch.setattr(jobs, "SCORE", (sys.executable, "-I", "-S", "-c", f"print({line!r})"))
    with pytest.raises(FsdpTuneError, match="no memory") as caught:
        jobs._run_part(request(), 0, Scored(), bar, threading.Lock())
    assert caught.value.exit_code is ExitCode.OUT_OF_MEMORY
    monkeypatch.setattr(jobs, "SCORE", (sys.executable, "-I", "-S", "-c", "raise SystemExit('no kernel')"))
    with pytest.raises(FailedError, match=r"the model could not be run: .*no kernel"):
        jobs._run_part(request(), 0, Scored(), bar, threading.Lock())


RESULT = SetResult(8, 0, 10, Estimate(0.5, 0.25, 0.75), base=Estimate(0.4, 0.2, 0.6))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.model.mkdir(parents=True)
    write_recipe(made, Recipe())
    made.merged.mkdir()
    (made.merged / "README.md").write_text("---\nlibrary_name: transformers\n---\n\n# A model\n")
    return made


@pytest.mark.parametrize(
    ("data", "options", "origins"),
    [
        (
            {"train": [{"path": "/home/me/rows.jsonl", "split": "test"}]},
            EvaluateOptions(data="/home/me/rows.jsonl", metric="exact_match"),
            [("/home/me/rows.jsonl", "rows.jsonl", None, "test")],
        ),
        (
            {
                "train": [{"path": "me/rows", "name": "main", "revision": "v1"}, {"path": "me/more"}],
                "eval": {"rows": 4},
            },
            EvaluateOptions(metric="exact_match"),
            [
                ("rows", "me/rows", "v1", "held out of train"),
                ("more", "me/more", None, "held out of train"),
            ],
        ),
        (
            {
                "train": [{"path": "a.jsonl"}],
                "eval": [{"path": "me/rows", "name": "main", "revision": "v1", "label": "x"}],
            },
            EvaluateOptions(metric="exact_match", base="gpt2"),
            [("x", "me/rows", "v1", "train")],
        ),
    ],
)
def test_card_of_a_model_names_the_rows_and_no_folder_of_this_machine(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    data: dict[str, Any],
    options: EvaluateOptions,
    origins: list[tuple[Any, ...]],
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(jobs, "add_results", lambda path, rows: written.append((path, rows)))
    recipe = Recipe.model_validate({"data": data})
    labels = recipe.data.eval_labels if options.data is None else ["rows"]
    model = ModelToEvaluate("m", str(run.merged))
    card = jobs._put_on_card(model, options, recipe, dict.fromkeys(labels, RESULT), Noted())
    ((path, rows),) = written
    assert card == str(path) == str(run.merged / "README.md")
    assert [(each.name, each.data, each.revision, each.split) for each in rows] == origins
    assert [(each.value, each.interval, each.rows) for each in rows] == [(0.5, (0.25, 0.75), 8)] * len(rows)
    assert [each.base for each in rows] == [("gpt2", 0.4) if options.base else None] * len(rows)


def test_result_without_a_card_that_can_be_written_is_not_lost(run: RunDir, tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"data": {"train": [{"path": "a.jsonl"}]}})
    options, noted = EvaluateOptions(data="a.jsonl", metric="exact_match"), Noted()

    def put(folder: Path) -> str | None:
        return jobs._put_on_card(
            ModelToEvaluate("m", str(folder)), options, recipe, {"a.jsonl": RESULT}, noted
        )

    card = run.merged / "README.md"
    assert put(run.merged) == str(card)
    assert "0.5" in card.read_text()
    card.write_text("---\nlibrary_name: [\n---\n")
    assert put(run.merged) is None
    assert noted.codes == ["card-not-written"]
    card.unlink()
    assert put(run.merged) is None
    (tmp_path / "README.md").touch()
    assert put(tmp_path) is None, "it is the model of no run"
    assert noted.codes == ["card-not-written"]
    assert (tmp_path / "README.md").read_text() == ""


class Words:
    def __init__(self, **ids: int) -> None:
        self.tokenizer = SimpleNamespace(get_vocab=lambda: ids)


@pytest.mark.parametrize(
    ("own", "refused"),
    [
        ({"a": 0, "b": 1, "c": 2}, False),
        ({"a": 0, "b": 1, "c": 9}, False),
        ({"a": 9, "b": 8, "c": 2}, True),
        ({"x": 0, "y": 1}, False),
    ],
)
def test_model_whose_tokenizer_gives_most_words_other_ids_is_refused(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, own: dict[str, int], refused: bool
) -> None:
    """A few special tokens may be renumbered, and a model without a tokenizer takes that of the rows."""
    encoder, options, noted = cast(Any, Words(a=0, b=1, c=2)), EvaluateOptions(), Noted()
    models = [ModelToEvaluate("m", str(run.merged))]
    monkeypatch.setattr(jobs, "open_tokenizer", lambda _: Words(**own))
    monkeypatch.setattr(jobs, "newer_checkpoint", lambda *_: (Problem("merge-out-of-date", ""),))
    if refused:
        with pytest.raises(FsdpTuneError, match="the tokenizer of `m` gives other ids"):
            jobs._check_models(models, encoder, options, noted)
    else:
        jobs._check_models(models, encoder, options, noted)
    assert noted.codes == ["merge-out-of-date"]

    def missing(_: object) -> None:
        raise usage_error("tokenizer-not-found", "there is none")

    monkeypatch.setattr(jobs, "open_tokenizer", missing)
    jobs._check_models(models, encoder, options, noted)
