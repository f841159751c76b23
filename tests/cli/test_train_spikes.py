"""A planted row with a huge loss: the event names it, and `--skip-rows` leaves exactly it out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli, document
from tests.cli.in_process import settings
from tests.cli.small_runs import MODEL, losses, write_rows

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]
ROWS, BAD, BATCH = 560, 499, 8
RECIPE: dict[str, Any] = {
    "model": {"from_config": MODEL, "tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "rows.jsonl"}], "max_length": 128, "shuffle": False},
    "training": {
        "global_batch_size": BATCH,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "save_steps": 35,
        "logging_steps": 1,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "report_to": [],
    },
    "merge": {"at_end": False},
    "launch": {"device": "cpu", "num_processes": 2},
}
"""The rows are the same but for one, and are known by heart when it comes."""


def write(folder: Path, copies: int = 1, **data: Any) -> None:
    rows = [{"text": "1 plus 2 is 3. " * 4} for _ in range(ROWS * copies)]
    rows[BAD - ROWS - 1] = {"text": "Zq@#%^&*~ {}[]<>|\\ " * 4}
    write_rows(folder / "rows.jsonl", rows)
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE | {"data": RECIPE["data"] | data}))


def train(cli: Cli, output: str, *arguments: str) -> None:
    done = cli("train", "--config", "recipe.yaml", "--set", f"output_dir={output}", *arguments)
    assert done.returncode == 0, done.stderr


def spike_of(cli: Cli, run: str) -> dict[str, Any]:
    return document(cli("status", run, "--json"))["spike"]


def test_planted_row_is_named_and_left_out(cli: Cli, tmp_path: Path) -> None:
    write(tmp_path)
    train(cli, "run")
    spike = spike_of(cli, "run")
    assert (spike["event"], spike["step"], spike["rows_total"], len(spike["rows"])) == (
        "loss_spike",
        -(-BAD // BATCH),
        BATCH,
        BATCH,
    )
    worst, *others = spike["rows"]
    assert (worst["file"], worst["row"]) == (str(tmp_path / "rows.jsonl"), BAD)
    assert all(row["loss"] < worst["loss"] / 100 for row in others)
    (tmp_path / "bad.jsonl").write_text(json.dumps(worst))
    # Another number of ranks, from a checkpoint before the row.
    train(
        cli,
        "again",
        "--resume",
        "run/checkpoint-35",
        "--set",
        "launch.num_processes=1",
        "--skip-rows",
        "bad.jsonl",
    )
    assert len(losses(tmp_path / "again")) == 35
    assert max(losses(tmp_path / "again")[10:]) < worst["loss"] / 100, "no step has the row"
    assert json.loads((tmp_path / "again" / "data.json").read_text())["skipped"] == [
        {"file": worst["file"], "row": BAD, "step": 35}
    ]
    assert spike_of(cli, "again") is None


@pytest.mark.parametrize(("ranks", "packing"), [(1, False), (1, True), (2, True)])
def test_planted_row_is_named_on_any_ranks_packed_or_not(
    cli: Cli, tmp_path: Path, ranks: int, packing: bool
) -> None:
    write(tmp_path, copies=2 if packing else 1, packing=packing, packing_strategy="wrapped")
    train(
        cli,
        "run",
        "--set",
        f"launch.num_processes={ranks}",
        "--set",
        f"training.global_batch_size={4 if packing else BATCH}",
    )
    rows = spike_of(cli, "run")["rows"]
    together = [row["row"] for row in rows if row["sequence"] == rows[0]["sequence"]]
    bad = BAD + ROWS if packing else BAD
    assert bad in together
    assert together == list(range(together[0], together[0] + len(together)))
    assert len(together) > 1 if packing else together == [bad]


def test_skipped_rows_are_remembered_across_resumes_with_the_losses_of_a_file_without_them(
    cli: Cli, tmp_path: Path
) -> None:
    write(tmp_path, shuffle=True)
    kept = [{"text": f"{number} plus 2 is {number + 2}. " * (1 + number % 3)} for number in range(60)]
    write_rows(tmp_path / "rows.jsonl", kept)
    write_rows(tmp_path / "fewer.jsonl", [row for at, row in enumerate(kept, 1) if at not in (7, 33)])
    (tmp_path / "skip").write_text(f"rows.jsonl:7\n{tmp_path}/rows.jsonl:33\n")
    length = settings("training.num_train_epochs=2", "training.learning_rate=1e-3")
    train(cli, "fewer", "--set", "data.train=[{path: fewer.jsonl}]", *length)
    train(cli, "part", "--skip-rows", "skip", *length, "--set", "training.max_steps=10")
    train(cli, "part", *length, "--resume", "auto", "--set", "launch.num_processes=1")
    assert losses(tmp_path / "part") == pytest.approx(losses(tmp_path / "fewer"), rel=1e-4)
    assert len(losses(tmp_path / "part")) == 16
