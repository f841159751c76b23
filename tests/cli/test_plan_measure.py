"""`plan --measure`: what is trained, what is shown, and what is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fsdp_tune.core.errors import ExitCode, ExitReason, FsdpTuneError, Problem, failed_error
from fsdp_tune.jobs import measure, trial
from fsdp_tune.jobs.observer import TrainResult
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.recipe.read.loader import LoadedRecipe
from fsdp_tune.recipe.schema.recipe import Recipe
from tests.cli.conftest import Cli
from tests.cli.fake_tracing import FakeTracing, replaced_tracing  # noqa: F401  a fixture
from tests.cli.in_process import answer, errors, invoke, settings
from tests.pages.written import training_line, written

TOKENS = 600
"""Of a step, fewer than full rows have."""
UNCOUNTED = [training_line(1, 1.0, step_seconds=90.0), training_line(2, 1.0, step_seconds=80.0)]


@pytest.fixture
def recipe(tmp_path: Path, fake: type[FakeTracing], monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a model whose state takes 1 GiB, so that it fits any machine."""
    monkeypatch.setattr(fake, "state_gib", 1)
    data: dict[str, Any] = {
        "model": {"from_config": {"model_type": "llama"}, "tokenizer": "builtin:arithmetic"},
        "data": {
            "train": [{"path": "builtin:arithmetic"}],
            "eval": {"rows": 10},
            "max_length": 128,
            "cache_dir": str(tmp_path / "cache"),
        },
        "training": {
            "global_batch_size": 8,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 3,
            "warmup_steps": 100,
            "save_steps": 2,
        },
        "launch": {"device": "cpu", "num_processes": 1},
        "output_dir": str(tmp_path / "runs" / "one"),
    }
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(data))
    return str(file)


Ends = Callable[[Recipe], float | Exception | ExitReason]
"""Seconds of a step by recipe, or how its run ends instead."""


@pytest.fixture
def train_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[Ends], list[Recipe]]:
    """Replace `train`. The list gets the recipes that were trained."""

    def replaced(ends: Ends) -> list[Recipe]:
        trained: list[Recipe] = []

        def train(loaded: LoadedRecipe, options: TrainOptions, **_: object) -> TrainResult:
            assert not options.saves
            trained.append(loaded.recipe)
            end = ends(loaded.recipe)
            if isinstance(end, Exception):
                raise end
            seconds = end if isinstance(end, float) else 1.0
            counted = [
                training_line(
                    step,
                    1.0,
                    step_seconds=seconds * step / 5,
                    tokens_per_second_per_device=TOKENS / (seconds * step / 5),
                )
                for step in (3, 4, 5, 6, 7)
            ]
            lines = [*UNCOUNTED, *counted]
            run = written(Path(str(loaded.recipe.output_dir)), lines)
            return TrainResult(
                run, loaded.recipe, end if isinstance(end, ExitReason) else ExitReason.FINISHED
            )

        monkeypatch.setattr(trial, "train", train)
        return trained

    return replaced


def micro_batch(recipe: Recipe) -> int:
    return recipe.training.per_device_train_batch_size


def test_fastest_of_the_best_is_first_and_written_and_no_run_is_left(
    recipe: str, train_as: Any, tmp_path: Path
) -> None:
    """Seconds grow with the micro-batch, against the order in which recipes are tried where no time is
    predicted."""
    trained = train_as(lambda recipe: float(micro_batch(recipe)))
    best = tmp_path / "best.yaml"
    found = answer("plan", recipe, "--measure", "2", "--write", best)
    measured = found["measured"]
    assert [each["step_seconds"] for each in measured] == sorted(each["step_seconds"] for each in measured)
    assert len(trained) == len(measured) >= 2
    assert any(each["recipe_changes"] == {} for each in measured), "the requested recipe is measured too"
    fastest = min(map(micro_batch, trained))
    assert measured[0]["step_seconds"] == fastest, "the median of the steps after the first two"
    assert measured[0]["tokens_per_second_per_device"] == pytest.approx(TOKENS / fastest), (
        "those that were computed"
    )
    text = best.read_text()
    assert "# Measured: " in text
    assert yaml.safe_load(text)["training"]["per_device_train_batch_size"] == fastest
    for each in trained:
        assert (each.training.max_steps, each.training.eval_strategy, each.merge.at_end) == (7, "no", False)
        assert each.training.global_batch_size == 8, "the same training"
    assert {path.name for path in tmp_path.iterdir()} <= {"recipe.json", "best.yaml", "cache"}


def test_recipe_out_of_memory_or_broken_is_last_and_the_others_are_measured(
    recipe: str, train_as: Any
) -> None:
    out_of_memory = FsdpTuneError(
        Problem("out-of-memory", "rank 0 is out of memory"), exit_code=ExitCode.OUT_OF_MEMORY
    )
    ends = iter([out_of_memory, failed_error("broken", "it broke"), 2.0, 1.0])
    train_as(lambda _: next(ends))
    found = answer("plan", recipe, "--measure", "4")["measured"]
    assert [(each["outcome"], each["step_seconds"]) for each in found] == [
        ("measured", 1.0),
        ("measured", 2.0),
        ("out of memory", None),
        ("failed", None),
    ]
    assert "rank 0 is out of memory" in {each["problem"] for each in found}


def test_no_measurement_begins_that_would_exceed_the_minutes(
    recipe: str, train_as: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])

    def ends(_: Recipe) -> float:
        now[0] += 50.0
        return 1.0

    trained = train_as(ends)
    found = answer("plan", recipe, "--measure", "5", "--minutes", "2")["measured"]
    assert len(trained) == 2
    assert [each["outcome"] for each in found] == ["measured"] * 2 + ["not started"] * (len(found) - 2)


def test_signal_ends_the_measurement_with_its_exit_code(recipe: str, train_as: Any, tmp_path: Path) -> None:
    trained = train_as(lambda _: ExitReason.INTERRUPTED)
    assert invoke("plan", recipe, "--measure", "3").exit_code == ExitCode.INTERRUPTED
    assert len(trained) == 1
    assert not list(tmp_path.glob("**/.fsdp-tune-measure-*"))


def test_what_was_measured_before_a_signal_is_shown_and_written(
    recipe: str, train_as: Any, tmp_path: Path
) -> None:
    ends = iter([2.0, ExitReason.PREEMPTED])
    train_as(lambda _: next(ends))
    done = invoke("plan", recipe, "--measure", "3", "--write", tmp_path / "best.yaml")
    assert done.exit_code == ExitCode.PREEMPTED
    assert "measured: 2 s a step" in done.output
    assert (tmp_path / "best.yaml").is_file()


def test_nothing_measured_is_an_error_with_the_first_reason(
    recipe: str, train_as: Any, tmp_path: Path
) -> None:
    """Else a script would go on with an older file of that name."""
    train_as(lambda _: failed_error("broken", "it broke"))
    done = invoke("plan", recipe, "--measure", "2", "--write", tmp_path / "best.yaml")
    assert done.exit_code == ExitCode.FAILED
    assert "error: none of 2 recipes was measured; the first: it broke" in done.output
    assert not (tmp_path / "best.yaml").exists()


def test_trial_saves_evaluates_and_restarts_nothing(recipe: str, train_as: Any) -> None:
    trained = train_as(lambda _: 1.0)
    keys = (
        "save_strategy=epoch",
        "eval_on_start=true",
        "eval_strategy=epoch",
        "sample={every: 2, prompts: [a]}",
    )
    words = [word for key in keys for word in ("--set", f"training.{key}")]
    answer("plan", recipe, "--measure", "1", "--minutes", "5", "--set", "launch.max_restarts=3", *words)
    for each in trained:
        assert (each.training.save_strategy, each.training.eval_on_start, each.training.sample) == (
            "no",
            False,
            None,
        )
        assert (each.launch.max_restarts, each.launch.hang_timeout) == (0, "300s")


@pytest.mark.parametrize(
    "words",
    [
        ["--measure", "2", "--gpu", "H100-SXM"],
        ["--measure", "2", "--target", "cheapest"],
        ["--measure", "2", "--no-search"],
        ["--measure", "2", "--num-gpus", "4"],
        ["--minutes", "3"],
        ["--measure-steps", "20"],
        ["--machine-rank", "0"],
        ["--measure", "2", "--machine-rank", "1"],
    ],
)
def test_what_the_recipes_machines_cannot_measure_is_refused(words: list[str], recipe: str) -> None:
    assert [error["code"] for error in errors("plan", recipe, *words)] in (
        ["usage"],
        ["machine-rank-out-of-range"],
    )


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_measured_step_is_that_of_the_training(cli: Cli, tmp_path: Path) -> None:
    """On two real ranks, of the written recipe: the same step within what a busy machine adds."""
    done = cli(
        "plan",
        "--config",
        "gpt2_smoke",
        *settings("output_dir=run", "data.cache_dir=cache"),
        "--measure",
        "2",
        "--write",
        "best.yaml",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert all(each["outcome"] == "measured" for each in document["measured"]), document["measured"]
    assert not list(tmp_path.glob("**/checkpoint-*"))
    trained = cli(
        "train",
        "--config",
        "best.yaml",
        "--set",
        "training.max_steps=8",
        "--set",
        "training.warmup_steps=0",
        "--json",
    )
    assert trained.returncode == 0, trained.stderr
    seconds = sorted(json.loads(line)["step_seconds"] for line in _loss_lines(tmp_path))
    assert document["measured"][0]["step_seconds"] == pytest.approx(seconds[len(seconds) // 2], rel=1.0)


def _loss_lines(folder: Path) -> list[str]:
    [metrics] = folder.glob("**/metrics.jsonl")
    return [line for line in metrics.read_text().splitlines() if '"loss"' in line]
