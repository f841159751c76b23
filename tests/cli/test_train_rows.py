"""Which rows a run trains that is resumed with another global batch: each row of an epoch exactly once."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir
from tests.cli.conftest import Cli
from tests.cli.rows_seen import install_recorder, rows_seen
from tests.cli.small_runs import MODEL, training_lines, write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]
ROWS = 50
RECIPE: dict[str, Any] = {
    "model": {"from_config": MODEL, "tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "rows.jsonl"}], "max_length": 64},
    "training": {
        "num_train_epochs": 1,
        "save_steps": 2,
        "save_total_limit": None,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "report_to": [],
    },
    "extensions": {"callbacks": ["recorder"]},
    "checkpoint": {"probe": False},
    "merge": {"at_end": False},
    "launch": {"device": "cpu", "num_processes": 2},
    "output_dir": "run",
}
HALF = ["training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2"]
"""On two ranks a global batch of 8, which no key sets."""
CHANGES = {
    "4 to 8": (["training.global_batch_size=4"], ["training.global_batch_size=8"]),
    "8 to 4": (["training.global_batch_size=8"], ["training.global_batch_size=4"]),
    "half the ranks": (HALF, [*HALF, "launch.num_processes=1"]),
    "per device": (["training.per_device_train_batch_size=2"], ["training.per_device_train_batch_size=4"]),
}


class Trained:
    """A run in a directory, which is started again and again."""

    def __init__(self, cli: Cli, folder: Path) -> None:
        self.cli, self.run = cli, RunDir(folder / "run")
        write_rows(folder / "rows.jsonl", [{"text": f"{number} plus {number * number}. " * (1 + number % 3)} for number in range(ROWS)])
        (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
        self.path = os.pathsep.join([install_recorder(folder / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])])

    def __call__(self, *keys: str, resume: str | None = "auto", code: int = 0) -> str:
        words = [word for key in keys for word in ("--set", key)] + (["--resume", resume] if resume else [])
        done = self.cli("train", "--config", "recipe.yaml", "--allow-extensions", *words, PYTHONPATH=self.path)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def check_each_row_once(self, rows: int = ROWS) -> None:
        seen = rows_seen(self.run)
        assert sorted(row for each in seen.values() for row in each) == list(range(rows))
        epochs = [line["epoch"] for line in training_lines(self.run.path)]
        assert epochs == sorted(set(epochs))
        assert epochs[-1] == 1.0


@pytest.mark.parametrize("change", CHANGES)
def test_each_row_is_trained_once_after_a_change_of_the_global_batch(cli: Cli, tmp_path: Path, change: str) -> None:
    before, after = CHANGES[change]
    train = Trained(cli, tmp_path)
    train(*before, "training.max_steps=4", resume=None)
    printed = train(*after)
    assert "from step 4 on `training.global_batch_size`" in printed
    train.check_each_row_once()
