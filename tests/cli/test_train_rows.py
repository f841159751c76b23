"""Which rows a run trains that is resumed with another global batch: each row of an epoch exactly once."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.data.preparation import rows_of_step
from fsdp_tune.launch.command.resume import read_resolved
from fsdp_tune.recipe.schedule import schedule_of
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
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
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
        self.cli, self.folder, self.run = cli, folder, RunDir(folder / "run")
        write_rows(
            folder / "rows.jsonl",
            [{"text": f"{number} plus {number * number}. " * (1 + number % 3)} for number in range(ROWS)],
        )
        (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
        self.path = os.pathsep.join(
            [install_recorder(folder / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )

    def __call__(self, *keys: str, resume: str | None = "auto", code: int = 0) -> str:
        words = [word for key in keys for word in ("--set", key)] + (["--resume", resume] if resume else [])
        done = self.cli(
            "train", "--config", "recipe.yaml", "--allow-extensions", *words, PYTHONPATH=self.path
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr


def epochs_of(run: RunDir) -> list[float]:
    return [line["epoch"] for line in training_lines(run.path)]


def check_named_rows(run: RunDir, seen: dict[int, list[int]]) -> None:
    recipe = read_resolved(run)
    for step, rows in seen.items():
        named = (rows_of_step(run.data_json, recipe, step) or "").partition(" and ")[0].split(", ")
        assert {int(each.partition(" ")[0]) for each in named} <= set(rows)


@pytest.mark.parametrize("change", CHANGES)
def test_each_row_is_trained_once_after_a_change_of_the_global_batch(
    cli: Cli, tmp_path: Path, change: str
) -> None:
    before, after = CHANGES[change]
    train = Trained(cli, tmp_path)
    train(*before, "training.max_steps=4", resume=None)
    printed = train(*after)
    assert "from step 4 on `training.global_batch_size`" in printed
    seen = rows_seen(train.run)
    assert sorted(row for each in seen.values() for row in each) == list(range(ROWS))
    epochs = epochs_of(train.run)
    assert epochs == sorted(set(epochs))
    assert epochs[-1] == 1.0
    check_named_rows(train.run, seen)
    rate = schedule_of(read_resolved(train.run), len(seen))
    assert rate is not None
    used = [line["learning_rate"] for line in training_lines(train.run.path)][4:]
    assert used == pytest.approx([1e-3 * rate(step) for step in range(4, len(seen))]), (
        "the schedule of the new number of steps"
    )
    assert "finished" in train(*before), "another global batch makes a finished run no longer"


def test_attempts_with_other_batches_continue_the_checkpoint_and_not_the_directory(
    cli: Cli, tmp_path: Path
) -> None:
    """Two epochs: 4 steps of 8 rows, then of 12 across the epoch; a branch from step 4 by 5 rows, and a copy
    of its step 6."""
    train = Trained(cli, tmp_path)
    size, epochs = "training.global_batch_size={}", "training.num_train_epochs=2"
    single = "training.per_device_train_batch_size=1"
    train(size.format(8), epochs, "training.max_steps=4", resume=None)
    train(size.format(12), epochs, "training.max_steps=8")
    found = rows_seen(train.run)
    [*first, border] = [found[step] for step in range(1, 7)]
    assert sorted(row for rows in [*first, border] for row in rows) == list(range(ROWS))
    assert [len(found[step]) for step in (5, 6, 7)] == [12, 6, 12]
    branch = RunDir(tmp_path / "branch")
    train(
        "output_dir=branch",
        size.format(5),
        single,
        "launch.num_processes=1",
        epochs,
        resume="run/checkpoint-4",
    )
    seen = {step: rows for step, rows in found.items() if step <= 4} | rows_seen(branch)
    trained = [row for step in sorted(seen) for row in seen[step]]
    assert sorted(trained[:ROWS]) == sorted(trained[ROWS:]) == list(range(ROWS))
    assert (len(seen), epochs_of(branch)[-1]) == (4 + 4 + 10, 2.0)
    check_named_rows(branch, seen)

    # A checkpoint that was copied without its run knows what it has trained.
    copied = tmp_path / "copied" / "checkpoint-6"
    shutil.copytree(branch.checkpoint(6), copied)
    printed = train("output_dir=other", epochs, "data.shuffle=false", resume=str(copied), code=2)
    assert "`data.shuffle`: true → false cannot change on resume" in printed
    printed = train("output_dir=other", epochs, "data.max_length=8", resume=str(copied), code=2)
    assert "the training data are not those that the run started with" in printed
    train("output_dir=other", epochs, size.format(10), resume=str(copied))
    seen = {step: rows for step, rows in seen.items() if step <= 6} | rows_seen(RunDir(tmp_path / "other"))
    trained = [row for step in sorted(seen) for row in seen[step]]
    assert sorted(trained[:ROWS]) == sorted(trained[ROWS:]) == list(range(ROWS))
