"""How models are run on sets: the processes that share the rows, what is refused, and where results go."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.answer.examples import AnswerReader
from fsdp_tune.answer.find_model import ModelToEvaluate
from fsdp_tune.answer.model_requests import Request, RowScore
from fsdp_tune.answer.statistics import Estimate
from fsdp_tune.core.devices import Machine
from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Notice, usage_error
from fsdp_tune.jobs import evaluate as job
from fsdp_tune.jobs.evaluated_sets import PreparedSet, SetResult
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import Allowed, EvaluateOptions
from fsdp_tune.merge.publish import CardResult
from fsdp_tune.recipe.extensions import Extension
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.data.support import ByteEncoder, prepared, write_jsonl


class Seen(Observer):
    def __init__(self) -> None:
        self.found: list[Notice] = []

    def notices(self, notices: Sequence[Notice]) -> None:
        self.found += notices


def machine(monkeypatch: pytest.MonkeyPatch, device: str | None, count: int, cores: int = 8) -> None:
    found = Machine(device, count, cores, None)
    monkeypatch.setattr(job, "this_machine", lambda _kind: found)


def code_of(call: Any, *arguments: object) -> tuple[str, str]:
    """Code and hint of the problem that a call raises."""
    with pytest.raises(FsdpTuneError) as caught:
        call(*arguments)
    (problem,) = caught.value.problems
    return problem.code, str(problem.hint)


@pytest.mark.parametrize(
    ("device", "count", "given", "processes"),
    [
        ("cuda", 4, None, 4),
        ("cuda", 4, 2, 2),
        ("cuda", 4, 5, ("no-device", "--num-processes 4")),
        ("cpu", 0, None, 1),
        ("cpu", 0, 3, 3),
    ],
)
def test_each_gpu_has_a_process_unless_fewer_are_wanted(
    monkeypatch: pytest.MonkeyPatch, device: str, count: int, given: int | None, processes: object
) -> None:
    machine(monkeypatch, None if device == "cpu" else device, count)
    options = EvaluateOptions(num_processes=given)
    if isinstance(processes, int):
        assert job.processes_of(options, device) == processes
    else:
        assert code_of(job.processes_of, options, device) == processes


@pytest.mark.parametrize(
    ("own", "kind", "device"),
    [
        ("cuda", "auto", "cuda"),
        ("cuda", "cpu", "cpu"),
        (None, "auto", "cpu"),
        (None, "cuda", ("no-device", "--device auto")),
        ("mps", "cuda", ("no-device", "--device auto")),
    ],
)
def test_device_is_one_that_the_machine_shows(
    monkeypatch: pytest.MonkeyPatch, own: str | None, kind: Any, device: object
) -> None:
    machine(monkeypatch, own, 1)
    if isinstance(device, str):
        assert job.device_of(kind) == device
    else:
        assert code_of(job.device_of, kind) == device


EXTENSION = Extension("metrics", "rouge", "package.module:metric", "my-metrics", "1.0")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"metric": "perplexity"}, None),
        ({"metric": "exact_match", "answer": "a(.)"}, None),
        ({"metric": "perplexity", "answer": "a(.)"}, "answer-pattern"),
        ({"metric": "rouge"}, "extension-not-allowed"),
        ({"metric": "rouge", "allowed": Allowed(extensions=True)}, EXTENSION),
        ({"metric": "bleu"}, "unknown-extension"),
    ],
)
def test_metric_is_one_of_the_package_or_an_allowed_extension(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], found: object
) -> None:
    def find(_kind: str, name: str) -> Extension:
        if name != "rouge":
            raise usage_error("unknown-extension", "there is none", hint="installed: rouge")
        return EXTENSION

    monkeypatch.setattr(job, "find_extension", find)
    given = EvaluateOptions(**options)
    if not isinstance(found, str):
        assert job._extension(given) == found
        return
    code, hint = code_of(job._extension, given)
    assert code == found
    if found == "unknown-extension":
        assert hint == "this package has exact_match and perplexity; installed: rouge"


class Scoring:
    """In place of the child process that runs the models."""

    def __init__(self, *lines: dict[str, Any], code: int = 0) -> None:
        self.left, self.code = list(lines), code
        self.environment: dict[str, str] = {}
        self.request: Request | None = None

    def __call__(self, command: Sequence[str], environment: dict[str, str]) -> Scoring:
        assert command[-1] == "fsdp_tune.answer.score"
        self.environment = environment
        return self

    def __enter__(self) -> Scoring:
        return self

    def __exit__(self, *_: object) -> None: ...

    def send(self, line: str, *, is_last: bool) -> None:
        assert is_last
        self.request = Request.from_json(line)

    def receive(self) -> dict[str, Any] | None:
        return self.left.pop(0) if self.left else None

    def wait(self) -> int:
        return self.code

    def failure(self) -> str:
        return "its process was killed by SIGKILL"


def request(device: str, parts: int) -> Request:
    return Request([ModelToEvaluate("m", "m")], {}, 10, 0, 2, device, "auto", parts=parts)


def run_part(
    monkeypatch: pytest.MonkeyPatch, child: Scoring, asked: Request, part: int = 1, scored: Any = None
) -> list[int]:
    """Run one part. Returns what its bar has counted."""
    advanced = list[int]()
    monkeypatch.setattr(job, "JsonChild", child)
    bar: Any = SimpleNamespace(advance=advanced.append)
    job._run_part(asked, part, {} if scored is None else scored, bar, threading.Lock())
    return advanced


@pytest.mark.parametrize(
    ("device", "parts", "threads", "used"),
    [
        ("cpu", 3, "2", "cpu"),
        ("cpu", 20, "1", "cpu"),
        ("cpu", 1, None, "cpu"),
        ("cuda", 2, None, "cuda:1"),
        ("cuda", 1, None, "cuda"),
    ],
)
def test_processes_share_the_cores_and_have_a_gpu_each(
    monkeypatch: pytest.MonkeyPatch, device: str, parts: int, threads: str | None, used: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    machine(monkeypatch, None, 0, cores=8)
    child = Scoring()
    run_part(monkeypatch, child, request(device, parts))
    assert child.environment.get("OMP_NUM_THREADS") == threads
    assert child.request is not None
    assert (child.request.part, child.request.parts, child.request.device) == (1, parts, used)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    run_part(monkeypatch, child, request(device, parts))
    assert child.environment["OMP_NUM_THREADS"] == "5", "the user's"


def test_scores_of_a_process_are_added_to_their_set(monkeypatch: pytest.MonkeyPatch) -> None:
    added = list[object]()
    scored = {"sums": SimpleNamespace(add=lambda model, rows: added.append((model, rows)))}
    lines = [
        {"set": "sums", "model": 0, "rows": [{"index": 3, "total": 1.5, "count": 2.0}]},
        {"set": "sums", "model": 1, "rows": [{"index": 4, "ids": [1, 2]}, {"index": 5, "ids": []}]},
    ]
    assert run_part(monkeypatch, Scoring(*lines), request("cpu", 1), scored=scored) == [1, 2]
    assert added == [
        (0, [RowScore(3, 1.5, 2.0)]),
        (1, [RowScore(4, ids=[1, 2]), RowScore(5, ids=[])]),
    ]


def test_process_that_dies_is_an_error_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FsdpTuneError, match="could not be run: its process was killed by SIGKILL") as caught:
        run_part(monkeypatch, Scoring(code=-9), request("cpu", 1))
    assert caught.value.exit_code == ExitCode.FAILED
    assert caught.value.problems[0].code == "evaluation-failed"


def test_problems_of_a_process_are_raised_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"code": "not-finite", "message": "row 3 has a score that is NaN"}
    child = Scoring({"problems": [problem], "exit_code": 4}, {"set": "never", "model": 0, "rows": []})
    with pytest.raises(FsdpTuneError) as caught:
        run_part(monkeypatch, child, request("cpu", 1))
    assert caught.value.exit_code == ExitCode.NON_FINITE
    assert [each.code for each in caught.value.problems] == ["not-finite"]


@pytest.mark.parametrize(("rows", "parts"), [(1, 1), (3, 2), (9, 4)])
def test_no_process_is_started_without_a_batch(
    monkeypatch: pytest.MonkeyPatch, rows: int, parts: int
) -> None:
    """It would load the models for nothing."""
    ran = list[int]()
    monkeypatch.setattr(job, "_run_part", lambda _request, part, *_: ran.append(part))
    asked = request("cpu", 4)
    scored: Any = {"a": SimpleNamespace(examples=[0] * rows), "b": SimpleNamespace(examples=[0])}
    job._run(asked, scored, Observer())
    assert (sorted(ran), asked.parts) == (list(range(parts)), parts)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a merged model and its card."""
    run = RunDir(tmp_path / "run")
    for folder in (run.model, run.merged):
        folder.mkdir(parents=True)
    run.recipe_json.write_text("{}")
    (run.merged / "README.md").write_text("# Model\n")
    return run


RESULT = SetResult(9, 0, 90, Estimate(0.5, 0.25, 0.75), base=Estimate(0.4, 0.1, 0.6))


def put_on_card(model: Path, observer: Observer, **options: Any) -> str | None:
    recipe = Recipe.model_validate({"data": {"train": [{"path": "org/sums", "split": "test"}]}})
    given = EvaluateOptions(metric="exact_match", data="org/sums", **options)
    model_of = ModelToEvaluate("m", str(model))
    return job._put_on_card(model_of, given, recipe, {"test": RESULT}, observer)


@pytest.mark.parametrize(("base", "row"), [(None, None), ("org/base", ("org/base", 0.4))])
def test_result_of_a_runs_model_is_put_on_its_card(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, base: str | None, row: object
) -> None:
    written = list[tuple[Path, list[CardResult]]]()
    monkeypatch.setattr(job, "add_results", lambda path, rows: written.append((path, rows)))
    assert put_on_card(run.merged, Observer(), base=base) == str(run.merged / "README.md")
    ((path, (result,)),) = written
    assert path == run.merged / "README.md"
    assert (result.name, result.data, result.split, result.metric) == (
        "org/sums",
        "org/sums",
        "test",
        "exact_match",
    )
    assert (result.value, result.interval, result.rows, result.base) == (0.5, (0.25, 0.75), 9, row)


def test_model_that_is_not_of_a_run_or_has_no_card_gets_none(run: RunDir, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("# Model\n")
    assert put_on_card(other, Observer()) is None
    assert (other / "README.md").read_text() == "# Model\n"
    (run.merged / "README.md").unlink()
    assert put_on_card(run.merged, Observer()) is None


def test_card_that_cannot_be_written_is_a_notice(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("its metadata is not YAML\nat line 3")

    monkeypatch.setattr(job, "add_results", refuse)
    seen = Seen()
    assert put_on_card(run.merged, seen) is None
    (notice,) = seen.found
    assert notice.code == "card-not-written"
    assert notice.message == "the result is not in the model card: its metadata is not YAML"
    assert notice.where.source == str(run.merged / "README.md")


def vocabulary(**ids: int) -> Any:
    return SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: ids))


@pytest.mark.parametrize(
    ("other", "is_refused"),
    [
        ({"a": 0, "b": 1, "c": 2, "pad": 9}, False),
        ({"a": 0, "b": 1, "c": 9, "d": 8}, False),
        ({"a": 7, "b": 8, "c": 2}, True),
        ({"x": 1}, False),
        (None, False),
    ],
    ids=["equal", "half", "renumbered", "nothing shared", "no tokenizer"],
)
def test_model_of_another_tokenizer_is_refused(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, int] | None, is_refused: bool
) -> None:
    """The ids of the rows would be other words for it."""

    def open_tokenizer(_recipe: object) -> Any:
        if other is None:
            raise usage_error("no-tokenizer", "it has none")
        return vocabulary(**other)

    monkeypatch.setattr(job, "open_tokenizer", open_tokenizer)
    monkeypatch.setattr(job, "recipe_of_model", lambda *_: None)
    own = vocabulary(a=0, b=1, c=2, d=3)
    arguments = ([ModelToEvaluate("m", "nowhere")], own, EvaluateOptions(), Observer())
    if is_refused:
        assert code_of(job._check_models, *arguments)[0] == "tokenizer-differs"
    else:
        job._check_models(*arguments)


def test_merged_model_that_is_older_than_its_run_is_a_notice(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices = [Notice("old-merge", "it is of step 5"), Notice("rounded", "it is rounded")]
    monkeypatch.setattr(job, "newer_checkpoint", lambda of, folder: notices[:1] * (folder == run.merged))
    monkeypatch.setattr(job, "rounding_notices", lambda recipe, *_: notices[1:] * (recipe == "recipe"))
    monkeypatch.setattr(job, "read_resolved", lambda of: "recipe" if of == run else None)
    monkeypatch.setattr(job, "recipe_of_model", lambda *_: None)
    monkeypatch.setattr(job, "open_tokenizer", lambda _: vocabulary(a=0))
    seen = Seen()
    job._check_models([ModelToEvaluate("m", str(run.merged))], vocabulary(a=0), EvaluateOptions(), seen)
    assert seen.found == notices


def test_model_of_a_checkpoint_is_loaded_once_for_all_sets(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, ran = ByteEncoder(), list[Request]()

    def prepare_set(_recipe: object, options: EvaluateOptions, label: str, *_: object) -> PreparedSet:
        file = write_jsonl(tmp_path / f"{label}.jsonl", [{"text": "x" * 100}] * int(str(options.max_rows)))
        return PreparedSet(label, prepared(tmp_path, file).store(), options, AnswerReader(encoder, None))

    def score(asked: Request, scored: dict[str, PreparedSet], _observer: Observer) -> None:
        ran.append(asked)
        for each in scored.values():
            each.add(0, [RowScore(index, 10.0, 10.0) for index in range(len(each.examples))])

    for name, value in (
        ("recipe_of_run", lambda _run: Recipe()),
        ("find_model", lambda name: ModelToEvaluate(name, name)),
        ("load_encoder", lambda _recipe: encoder),
        ("_check_models", lambda *_: None),
        ("prepare_set", prepare_set),
        ("_run", score),
    ):
        monkeypatch.setattr(job, name, value)
    machine(monkeypatch, None, 0)
    options = EvaluateOptions(max_rows=3, batch_size=2)
    sets = {"few": options, "many": replace(options, max_rows=12)}
    found = job.evaluate_checkpoint(run, run.merged, sets)
    (asked,) = ran
    assert (asked.is_of_run, list(asked.sets), asked.batch_size) == (True, ["few", "many"], 2)
    assert [each.weights for each in asked.models] == [str(run.merged)]
    assert {label: each.rows for label, each in found.sets.items()} == {"few": 3, "many": 12}
    assert found.rows["few"] != found.rows["many"]
    assert [notice.message.partition(" is ")[0] for notice in found.notices] == ["the interval of `few`"]
