"""The runs of a sweep: their values, names, commands and order; which one is best, and what ends the
sweep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, failed_error
from fsdp_tune.core.signals import StoppedBySignal
from fsdp_tune.jobs import sweep
from fsdp_tune.jobs.observer import TrainResult
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.jobs.sweep import (
    PlannedRun,
    SweepPoint,
    answer_of,
    parse_sweep,
    plan_sweep,
    run_sweep,
    sweep_points,
)
from fsdp_tune.launch.command.resume import RunRevision, Start
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.run.directory import RunDir
from tests.model.recipes import recipe_of
from tests.run.test_checkpoint_scores import recipe_by, save, score, write_recipe


def names(*texts: str) -> list[str]:
    return [point.name for point in sweep_points(parse_sweep(texts))]


def test_points_are_all_combinations_with_names_of_their_values() -> None:
    points = sweep_points(parse_sweep(["training.learning_rate=1e-5,2e-5", "lora.r = 8, 16"]))
    assert [point.name for point in points] == [
        "learning_rate=1e-5,r=8",
        "learning_rate=1e-5,r=16",
        "learning_rate=2e-5,r=8",
        "learning_rate=2e-5,r=16",
    ]
    assert points[1].values == {"training.learning_rate": "1e-5", "lora.r": "16"}


def test_names_are_those_of_directories_and_unlike_each_other() -> None:
    assert names("a.r=1", "b.r=2") == ["a.r=1,b.r=2"]
    assert names('data.train=[{path: a},{path: b}],"c,d"') == ["train=-path-a-path-b-", "train=-c-d-"]
    assert len(set(names("a.b=x/y,x y,x-y"))) == 3
    assert len({name.casefold() for name in names("a.b=Ab,aB")}) == 2
    assert all(len(name) < 120 and "/" not in name for name in names(f"a.b={'x' * 300},../..,{'x' * 301}"))


def test_every_wrong_option_is_reported() -> None:
    wrong = ["training.seed", "a.b=1,,2", "output_dir=a,b", "a.c=1", "a.c=2", "a.d=1,1", "=1"]
    with pytest.raises(FsdpTuneError) as raised:
        parse_sweep(wrong)
    assert [problem.message.split("`")[1] for problem in raised.value.problems] == [
        f"--sweep {text}" for text in wrong if text != "a.c=1"
    ]


RECIPE: dict[str, Any] = {
    "name": "small",
    "model": {"from_config": {"model_type": "gpt2"}, "tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 32},
    "training": {"global_batch_size": 8, "max_steps": 4, "report_to": []},
    "launch": {"num_processes": 2, "device": "cpu"},
    "output_dir": "runs/{name}",
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    return "recipe.yaml"


def planned(recipe: str, *texts: str, **options: Any) -> list[PlannedRun]:
    return plan_sweep(recipe, ["training.weight_decay=0.5"], texts, TrainOptions(**options))


def test_each_run_has_its_recipe_directory_and_command(recipe: str, tmp_path: Path) -> None:
    command = (
        "train",
        "--config",
        recipe,
        "--sweep",
        "training.seed=1,2",
        "--sweep=training.max_steps=4",
        "--",
        "--debug",
    )
    first, second = planned(recipe, "training.seed=1,2", "training.max_steps=4", command=command)
    assert [each.loaded.recipe.training.seed for each in (first, second)] == [1, 2]
    assert first.run.path == tmp_path / "runs" / "small" / "seed=1,max_steps=4"
    assert (first.loaded.recipe.name, first.options.resume) == ("small-seed-1-max_steps-4", "auto")
    settings = ["training.seed=1", "training.max_steps=4", f"output_dir={first.run.path}"]
    assert first.loaded.overrides == ("training.weight_decay=0.5", *settings)
    assert first.options.command == (
        "train",
        "--config",
        recipe,
        *(part for each in settings for part in ("--set", each)),
        "--",
        "--debug",
    )
    assert planned(recipe, "training.seed=1", overwrite=True)[0].options.resume is None


def test_all_points_are_checked_before_the_first(recipe: str) -> None:
    with pytest.raises(FsdpTuneError) as raised:
        planned(recipe, "training.learning_rate=fast,1e-3", "training.seed=1,-,2", "training.max_steps=5")
    sources = [str(problem.where.source) for problem in raised.value.problems]
    assert sources == ["--sweep training.learning_rate=fast", "--sweep training.seed=-"], "each once"
    with pytest.raises(FsdpTuneError) as raised:
        planned(recipe, "training.global_batch_size=7,8,9")
    sources = [str(problem.where.source) for problem in raised.value.problems]
    assert sources == ["--sweep training.global_batch_size=7", "--sweep training.global_batch_size=9"]
    with pytest.raises(FsdpTuneError) as raised:
        plan_sweep(recipe, ["training.no_such=1"], ["training.seed=1,2,3"], TrainOptions())
    assert len(raised.value.problems) == 1
    assert "seed" not in raised.value.problems[0].message, "it is of the recipe, and not of a value"
    with pytest.raises(FsdpTuneError, match="starts all runs over"):
        planned(recipe, "training.seed=1", overwrite=True, resume="auto")
    for key, options in (
        ("launch.num_machines=2", {}),
        ("training.push_to_hub=true", {}),
        ("training.seed=1", {"resume": "a/checkpoint-1"}),
    ):
        with pytest.raises(FsdpTuneError) as raised:
            planned(recipe, key, **options)
        assert raised.value.problems[0].code == "bad-sweep"


def test_failed_run_does_not_end_the_sweep_and_a_stopped_one_does(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(recipe, "training.seed=1,2,3,4,5")
    trained: list[int] = []
    ends = [ExitReason.FINISHED, failed_error("x", "it broke"), ExitReason.FINISHED, ExitReason.INTERRUPTED]
    losses = [2.0, None, 1.0, 0.5]

    def train(loaded: LoadedRecipe, options: TrainOptions, observer: Any) -> TrainResult:
        at = len(trained)
        trained.append(loaded.recipe.training.seed)
        run = plan[at].run
        run.path.mkdir(parents=True)
        run.recipe_json.write_text("{}")
        lines = [
            {"step": 1, "loss": 9.0, "step_seconds": 0.5},
            {"step": 2, "loss": losses[at], "step_seconds": 1.5},
        ]
        run.metrics_jsonl.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        end = ends[at]
        if isinstance(end, FsdpTuneError):
            raise end
        return TrainResult(run, loaded.recipe, end)

    monkeypatch.setattr(sweep, "train", train)
    found = run_sweep(plan)
    assert trained == [1, 2, 3, 4]
    assert [(run.state, run.exit_code, run.loss, run.seconds) for run in found.runs] == [
        ("finished", 0, 2.0, 2.0),
        ("failed", 1, None, 2.0),
        ("finished", 0, 1.0, 2.0),
        ("interrupted", 130, 0.5, 2.0),
        ("not started", None, None, 0.0),
    ]
    assert (found.runs[1].problem, found.exit_code) == ("it broke", ExitCode.INTERRUPTED)
    assert found.best == str(plan[2].run.path), "of those that finished"
    assert answer_of(found.runs[:3]).exit_code == ExitCode.FAILED
    assert answer_of([found.runs[0]]).exit_code == ExitCode.OK


def test_signal_in_the_last_step_of_a_run_ends_the_sweep(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run finishes all the same; the signal was forgotten, and the next run started."""
    plan = planned(recipe, "training.seed=1,2,3")
    trained: list[int] = []

    def train(loaded: LoadedRecipe, options: TrainOptions, observer: Any) -> TrainResult:
        trained.append(loaded.recipe.training.seed)
        return TrainResult(plan[len(trained) - 1].run, loaded.recipe, ExitReason.FINISHED, signal=SIGTERM)

    monkeypatch.setattr(sweep, "train", train)
    found = run_sweep(plan)
    assert trained == [1]
    assert [run.state for run in found.runs] == ["finished", "not started", "not started"]
    assert found.exit_code == ExitCode.PREEMPTED
    trained.clear()
    assert run_sweep(plan[:1]).exit_code == ExitCode.OK, "nothing was left to start"


def test_signal_before_the_ranks_ends_the_sweep_and_not_its_run(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as while the data is tokenised, or the recipes of the runs are checked."""

    def stop(*_args: object, **_options: object) -> None:
        raise StoppedBySignal(SIGTERM)

    plan = planned(recipe, "training.seed=1,2")
    monkeypatch.setattr(sweep, "train", stop)
    found = run_sweep(plan)
    assert [run.state for run in found.runs] == ["preempted", "not started"]
    assert found.exit_code == ExitCode.PREEMPTED
    monkeypatch.setattr(sweep, "preview", stop)
    with pytest.raises(StoppedBySignal):
        planned(recipe, "training.seed=1,2")


def test_command_of_a_run_has_its_own_directory_in_place_of_that_of_the_sweep() -> None:
    words = (
        *("train", "output_dir", "--set", "output_dir=a", "--set=output_dir=b"),
        *("--set=training.seed=1", "--sweep", "lora.r=8,16"),
    )
    assert sweep._command(words, ["lora.r=8", "output_dir=a/r8"]) == (
        *("train", "output_dir", "--set=training.seed=1"),
        *("--set", "lora.r=8", "--set", "output_dir=a/r8"),
    )


def test_run_that_has_not_replaced_an_earlier_one_has_none_of_its_figures(recipe: str) -> None:
    """With `--overwrite`; the directory is moved aside only when the new run starts."""
    (plan,) = planned(recipe, "training.seed=1")
    run = plan.run
    run.path.mkdir(parents=True)
    run.recipe_json.write_text("{}")
    run.metrics_jsonl.write_text('{"step": 7, "loss": 1.0, "step_seconds": 1.0}\n')
    replaced = Start(is_new=False, revision=RunRevision(None, frozenset()))
    plan = replace(plan, preview=replace(plan.preview, start=replaced))
    found = sweep.waiting(plan)
    assert (found.state, found.steps, found.loss, found.seconds) == ("not started", 0, None, 0.0)
    (run.path / "checkpoint-7").mkdir()
    assert sweep.waiting(plan).loss == 1.0, "a command has used it since"


def test_evaluations_decide_if_all_finished_runs_have_them(recipe: str) -> None:
    (plan,) = planned(recipe, "training.seed=1")
    run = replace(sweep.waiting(plan), state="finished")
    runs = [
        replace(run, run_dir="a", loss=1.0, eval_loss=3.0),
        replace(run, run_dir="b", loss=2.0, eval_loss=2.0),
    ]
    assert (answer_of(runs).best, answer_of(runs).metric) == ("b", "eval_loss")
    assert (answer_of([*runs, replace(run, run_dir="c", loss=1.5)]).best, answer_of([run]).best) == (
        "a",
        None,
    )
    assert SweepPoint("seed=1", {"training.seed": "1"}) == plan.point


@pytest.mark.parametrize(
    ("takes_best", "values", "expected"),
    [
        (True, [2.0, 1.5, 1.75], 1.5),
        (False, [2.0, 1.5, 1.75], 1.75),
        (True, [float("nan"), 2.0, "NaN"], 2.0),
        (False, [2.0, float("nan")], None),
    ],
)
def test_evaluation_loss_of_a_run_is_that_of_the_model_it_keeps(
    takes_best: bool, values: list[Any], expected: float | None
) -> None:
    recipe = recipe_of(
        training={
            "load_best_model_at_end": takes_best,
            "eval_strategy": "steps",
            "eval_steps": 10,
            "save_steps": 10,
        }
    )
    planned = SimpleNamespace(loaded=SimpleNamespace(recipe=recipe))
    lines = [{"step": 10 * number, "eval_loss": value} for number, value in enumerate(values, 1)]
    assert sweep._eval_loss(planned, lines) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("scored", "expected"), [({10: 3.0, 20: 2.0}, 1.75), ({}, None)])
def test_evaluation_loss_of_a_run_is_of_the_checkpoint_that_a_score_chose(
    tmp_path: Path, scored: dict[int, float], expected: float | None
) -> None:
    run, recipe = RunDir(tmp_path), recipe_by("text/perplexity", is_greater=False)
    write_recipe(run, recipe)
    for step in (10, 20):
        save(run, step)
    for step, value in scored.items():
        score(run, step, text__perplexity=value)
    lines = [{"step": step, "eval_loss": value} for step, value in ((10, 1.5), (20, 1.75))]
    planned = SimpleNamespace(loaded=SimpleNamespace(recipe=recipe), run=run)
    assert sweep._eval_loss(planned, lines) == expected  # type: ignore[arg-type]
