"""A sweep as a user starts it, twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_tune.core.errors import ExitReason
from fsdp_tune.jobs import sweep
from fsdp_tune.jobs.observer import TrainResult
from fsdp_tune.jobs.options import TrainOptions
from fsdp_tune.recipe.read.loader import LoadedRecipe
from tests.cli.conftest import Cli, document
from tests.cli.in_process import answer
from tests.cli.small_runs import MODEL
from tests.pages.written import training_line, written

RECIPE = {
    "model": {"from_config": MODEL, "tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 32},
    "training": {
        "global_batch_size": 8,
        "max_steps": 3,
        "logging_steps": 1,
        "lr_scheduler_type": "constant",
        "report_to": [],
    },
    "merge": {"at_end": False},
    "launch": {"device": "cpu", "num_processes": 1},
    "output_dir": "runs",
}
COMMAND = ("train", "--config", "recipe.yaml", "--sweep", "training.learning_rate=1e-5,1e-2")


def test_sweep_is_one_document_with_the_best_run_and_the_command_of_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The larger learning rate has the lower loss."""

    def train(loaded: LoadedRecipe, options: TrainOptions, **_: object) -> TrainResult:
        assert options.resume == "auto"
        rate = float(loaded.recipe.training.learning_rate)
        run = written(
            Path(loaded.recipe.output_dir),
            [training_line(3, 1.0 if rate == 1e-2 else 2.0)],
            learning_rate=rate,
        )
        return TrainResult(run, loaded.recipe, ExitReason.FINISHED)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "train", train)
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    found = answer(*COMMAND)
    first, second = found["runs"]
    assert (first["steps"], first["loss"], second["values"]) == (3, 2.0, {"training.learning_rate": "1e-2"})
    assert (found["best"], found["metric"]) == (str(tmp_path / "runs" / "learning_rate=1e-2"), "loss")
    compared = answer(*found["report"].split()[1:], "--output", "page.html")["runs"]
    assert [run["loss"]["last"] for run in compared] == [2.0, 1.0]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.ranks
def test_sweep_trains_each_value_marks_the_best_and_skips_finished_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(RECIPE))
    done = cli(*COMMAND)
    assert done.returncode == 0, done.stderr
    assert "lowest loss" in done.stdout + done.stderr
    log = (tmp_path / "runs" / "learning_rate=1e-2" / "logs" / "train.log").read_text()
    assert "run 2 of 2" in log
    assert "run 1 of 2" not in log
    again = cli(*COMMAND, "--json")
    assert again.returncode == 0, again.stderr
    assert "starting rank" not in again.stderr
    found = document(again)
    first, second = found["runs"]
    assert (first["steps"], first["state"], second["values"]) == (
        3,
        "finished",
        {"training.learning_rate": "1e-2"},
    )
    assert second["loss"] < first["loss"]
    assert (found["best"], found["metric"]) == (str(tmp_path / "runs" / "learning_rate=1e-2"), "loss")
    assert cli(*found["report"].split()[1:], "--output", "page.html").returncode == 0
