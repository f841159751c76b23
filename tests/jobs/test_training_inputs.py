"""The checks of a training's inputs: which problems are reported together, and what an option leaves out."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, FsdpTuneError, Notice, Problem, usage_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.data.preparation import Prepared
from fsdp_tune.jobs import training_inputs as inputs
from fsdp_tune.jobs.inspection import Inspection
from fsdp_tune.jobs.machine_plan import MachinePlan
from fsdp_tune.jobs.observer import Observer
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.training_inputs import Found, InputChecks, _required
from fsdp_tune.launch.command.resume import Start
from fsdp_tune.planner.search.auto_recomputation import Decided
from fsdp_tune.recipe.read.loader import parse_recipe
from fsdp_tune.recipe.resolve import Resolution
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.directory import RunDir
from tests.launch.recipes import BASE, resolved


class Seen(Observer):
    def __init__(self) -> None:
        self.codes: list[str] = []

    def notices(self, notices: Any) -> None:
        self.codes += [notice.code for notice in notices]


def checks(
    tmp_path: Path,
    *,
    text: str = BASE,
    is_adapter: bool = False,
    observer: Observer | None = None,
    **options: Any,
) -> InputChecks:
    recipe = resolved(tmp_path, text=text)
    if is_adapter:
        recipe = recipe.model_copy(update={"lora": Recipe.model_validate({"lora": {}}).lora})
    return InputChecks(
        parse_recipe(text, tmp_path / "base.yaml"),
        Resolution(recipe, {}, ()),
        RunDir(tmp_path / "run"),
        TrainOptions(**options),
        observer or Observer(),
        (),
        lambda _: None,
    )


def resumed(tmp_path: Path, step: int = 5) -> Start:
    folder = tmp_path / "earlier" / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    checkpoint: Any = SimpleNamespace(path=folder, step=step)
    return Start(checkpoint, is_new=False)


MODEL: Any = SimpleNamespace(packaged=False, parameters=10, trained_parameters=5)


@pytest.mark.parametrize(
    ("inspection", "codes", "words"),
    [
        (Inspection(MODEL), [], ""),
        (Inspection(None, problems=[Problem("no-model", "it is gone")]), ["no-model"], "it is gone"),
        (Inspection(MODEL, problems=[Problem("lora-target", "none")]), ["lora-target"], "none"),
        (Inspection(MODEL, unchecked=["the hub is away"]), ["model-unreachable"], "the hub is away"),
        (Inspection(None, unchecked=["a", "b"]), ["model-unreachable"] * 2, "a; b"),
        (
            Inspection(SimpleNamespace(packaged=True)),  # type: ignore[arg-type]
            ["model-unreachable"],
            "`org/model` cannot be reached, and is not in the cache",
        ),
    ],
    ids=["complete", "gone", "problem", "unchecked", "both", "packaged"],
)
def test_model_that_could_not_be_inspected_in_full_is_not_trained(
    inspection: Inspection, codes: list[str], words: str
) -> None:
    """The shapes of well-known models in this package are enough for a plan."""
    recipe: Any = SimpleNamespace(model=SimpleNamespace(name_or_path="org/model"))
    if not codes:
        assert inputs._required(inspection, recipe) is MODEL
        return
    with pytest.raises(FsdpTuneError) as caught:
        inputs._required(inspection, recipe)
    assert [problem.code for problem in caught.value.problems] == codes
    assert str(caught.value) == words


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace what reads the inputs; the values are returned, or called."""
    inspection = Inspection(MODEL, problems=[Problem("no-model", "it is gone")])
    values: dict[str, Any] = {
        "inspect_model": inspection,
        "plan_here": "plan",
        "load_encoder": SimpleNamespace(notices=[]),
        "sample_prompts": None,
        "prepare_data": "data",
        "check_evaluation": "evaluation",
        "with_tensors": "model",
    }

    def replaced(name: str) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> Any:
            if isinstance(values[name], BaseException):
                raise values[name]
            return values[name]

        return call

    for name in values:
        monkeypatch.setattr(inputs, name, replaced(name))
    return values


@pytest.mark.parametrize("name", ["load_encoder", "sample_prompts", "prepare_data", "check_evaluation"])
def test_problems_of_model_and_data_are_reported_together(
    tmp_path: Path, reading: dict[str, Any], name: str
) -> None:
    found = checks(tmp_path)._read(resolved(tmp_path), None)
    assert found == Found("model", reading["load_encoder"], "data", "plan", "evaluation")  # type: ignore[arg-type]
    reading[name] = usage_error("bad-rows", "row 3 is torn")
    with pytest.raises(FsdpTuneError) as caught:
        checks(tmp_path)._read(resolved(tmp_path), None)
    assert [problem.code for problem in caught.value.problems] == ["no-model", "bad-rows"]
    assert caught.value.exit_code == ExitCode.USAGE


def test_signal_waits_for_no_other_problems(tmp_path: Path, reading: dict[str, Any]) -> None:
    reading["prepare_data"] = StoppedBySignal(signal.SIGTERM)
    with pytest.raises(StoppedBySignal) as caught:
        checks(tmp_path)._read(resolved(tmp_path), None)
    assert caught.value is reading["prepare_data"]


@pytest.mark.parametrize(
    ("before", "now", "is_refused"),
    [
        ({"a.jsonl": "1:x"}, {"a.jsonl": "1:x"}, False),
        ({"a.jsonl": "1:x"}, {"a.jsonl": "2:y"}, True),
        (None, {"a.jsonl": "2:y"}, False),
    ],
)
def test_streamed_files_are_those_of_the_earlier_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: dict[str, str] | None,
    now: dict[str, str],
    is_refused: bool,
) -> None:
    read = list[Path]()

    def earlier(path: Path) -> Any:
        read.append(path)
        return None if before is None else SimpleNamespace(stamps=before)

    monkeypatch.setattr(Prepared, "read", earlier)
    monkeypatch.setattr(inputs, "continued_data", lambda *_, **__: "continued")
    data: Any = SimpleNamespace(stamps=now)
    start = resumed(tmp_path)
    if is_refused:
        with pytest.raises(FsdpTuneError) as caught:
            checks(tmp_path)._continued(start, data)
        assert [str(problem.where) for problem in caught.value.problems] == ["a.jsonl"]
    else:
        assert checks(tmp_path)._continued(start, data) == "continued"
    assert read == [tmp_path / "earlier" / "data.json"]
    assert checks(tmp_path)._continued(Start(), data) == "continued", "a new run has no earlier files"


def test_schedule_that_is_longer_than_the_run_has_the_line_of_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of epochs are known once the rows are."""
    steps: list[int | None] = [10]
    monkeypatch.setattr(inputs, "steps_of_run", lambda *_: steps[0])
    training = "training: {num_train_epochs: 1, lr_scheduler_type: linear, warmup_steps: 50}"
    made = checks(tmp_path, text=BASE.replace("training: {max_steps: 100}", training))
    data: Any = None
    with pytest.raises(FsdpTuneError) as caught:
        made._steps(Start(), data)
    (problem,) = caught.value.problems
    assert (problem.where.key, problem.where.line) == ("training.lr_scheduler_type", 4)
    assert caught.value.exit_code == ExitCode.USAGE
    steps[0] = 100
    assert made._steps(Start(), data) == 100
    with pytest.raises(FsdpTuneError, match="step"):
        made._steps(resumed(tmp_path, 200), data)
    steps[0] = None
    assert made._steps(Start(), data) is None


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Replace the single checks. The list has those that were made."""
    called = list[str]()
    decided = Decided(
        resolved(tmp_path, "fsdp.reshard_after_backward=false"), {"fsdp.reshard_after_backward": "it fits"}
    )
    plan = MachinePlan(decided, None, [Notice("not-planned", "it is a CPU")])
    data: Any = SimpleNamespace(as_notices=lambda: [Notice("long-rows", "one")], vocabulary_size=10)
    inspection = Inspection(MODEL, notices=[Notice("of-model", "one")])
    read = Found(inspection, "encoder", data, plan, "evaluation")  # type: ignore[arg-type]

    def made(name: str, value: object) -> Callable[..., object]:
        def call(*_: object, **__: object) -> object:
            called.append(name)
            return value

        return call

    monkeypatch.setattr(InputChecks, "_read", lambda *_: read)
    monkeypatch.setattr(InputChecks, "_continued", lambda *_: "continued")
    monkeypatch.setattr(InputChecks, "_steps", lambda *_: 9)
    for name, value in (
        ("check_vocabulary", [Notice("small-vocabulary", "one")]),
        ("notices_of_evaluation", []),
        ("base_of", "base"),
        ("refuse_other_base", None),
        ("refuse_what_cannot_fit", None),
        ("refuse_scores_without_room", None),
        ("check_space", [Notice("little-space", "one")]),
    ):
        monkeypatch.setattr(inputs, name, made(name, value))
    return called


ALL = ["check_vocabulary", "notices_of_evaluation"]
FITS = ["refuse_what_cannot_fit", "refuse_scores_without_room"]


@pytest.mark.parametrize(
    ("options", "made"),
    [
        ({}, [*ALL, *FITS, "check_space"]),
        ({"ignore_plan": True}, [*ALL, "check_space"]),
        ({"ignore_plan": True, "saves": False}, ALL),
        ({"is_adapter": True}, [*ALL, "base_of", *FITS, "check_space"]),
    ],
    ids=["all", "without a plan", "trial", "adapter"],
)
def test_options_leave_out_their_own_checks_only(
    tmp_path: Path, found: list[str], options: dict[str, Any], made: list[str]
) -> None:
    seen = Seen()
    result = checks(tmp_path, observer=seen, **options).check(Start(), None)
    assert found == made
    codes = ["of-model", "long-rows", "not-planned", "small-vocabulary"]
    assert seen.codes == [*codes, *["little-space"] * ("check_space" in made)]
    assert (result.steps, result.data, result.base) == (
        9,
        "continued",
        "base" if "is_adapter" in options else None,
    )
    assert result.decided == {"fsdp.reshard_after_backward": "false (it fits)"}
    assert result.resolution.recipe.fsdp.reshard_after_backward is False, "as the plan decided"
    assert result.resolution.reasons["fsdp.reshard_after_backward"] == "it fits"


def test_adapter_continues_on_the_base_of_its_earlier_steps(
    tmp_path: Path, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = list[tuple[Path, str]]()
    monkeypatch.setattr(inputs, "refuse_other_base", lambda path, base: compared.append((path, base)))
    checks(tmp_path, is_adapter=True).check(resumed(tmp_path), None)
    assert compared == [(tmp_path / "earlier" / "model" / "base.json", "base")]
    checks(tmp_path, is_adapter=True).check(Start(), None)
    assert len(compared) == 1


def test_what_a_problem_of_the_model_keeps_from_being_checked_is_no_second_problem() -> None:
    problem = Problem("model-config", "the model has no configuration")
    found = Inspection(problems=[problem], unchecked=["checks that need the complete model"])
    with pytest.raises(FsdpTuneError) as raised:
        _required(found, Recipe())
    assert raised.value.problems == (problem,)
    found.problems.clear()
    with pytest.raises(FsdpTuneError) as raised:
        _required(found, Recipe())
    assert [each.code for each in raised.value.problems] == ["model-unreachable"]
