"""A sweep as a user starts it, twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, document
from tests.cli.test_train_streamed import MODEL

pytestmark = [pytest.mark.e2e, pytest.mark.ranks]


def test_sweep_trains_each_value_marks_the_best_and_skips_finished_runs(cli: Cli, tmp_path: Path) -> None:
    recipe = {
        "model": {"from_config": MODEL | {"num_attention_heads": 4, "num_key_value_heads": 2}, "tokenizer": "builtin:arithmetic"},
        "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 32},
        "training": {"global_batch_size": 8, "max_steps": 3, "logging_steps": 1, "lr_scheduler_type": "constant", "report_to": []},
        "merge": {"at_end": False},
        "launch": {"device": "cpu", "num_processes": 1},
        "output_dir": "runs",
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = ("train", "--config", "recipe.yaml", "--sweep", "training.learning_rate=1e-5,1e-2")
    done = cli(*command)
    assert done.returncode == 0, done.stderr
    assert "lowest loss" in done.stdout + done.stderr
    log = (tmp_path / "runs" / "learning_rate=1e-2" / "logs" / "train.log").read_text()
    assert "run 2 of 2" in log
    assert "run 1 of 2" not in log
    again = cli(*command, "--json")
    assert again.returncode == 0, again.stderr
    assert "starting rank" not in again.stderr
    found = document(again)
    first, second = found["runs"]
    assert (first["steps"], first["state"], second["values"]) == (3, "finished", {"training.learning_rate": "1e-2"})
    assert second["loss"] < first["loss"]
    assert (found["best"], found["metric"]) == (str(tmp_path / "runs" / "learning_rate=1e-2"), "loss")
    assert cli(*found["report"].split()[1:], "--output", "page.html").returncode == 0
