"""Runs whose ranks share rows (`parallelism.sp_size`), as users start them: prepared rows, streams, and a
rehearsal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.metrics_file import read_metrics
from tests.cli.conftest import Cli, document
from tests.cli.small_runs import STREAM, lines_of

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]
SHARED = ("--set", "parallelism.sp_size=2")
PREPARED: dict[str, Any] = STREAM | {
    "precision": {"mixed_precision": "no"},
    "data": {
        "train": [{"path": "rows.jsonl"}],
        "eval": [
            {"path": "rows.jsonl", "max_rows": 40, "label": "few"},
            {"path": "rows.jsonl", "max_rows": 90, "label": "many"},
        ],
        "packing": True,
        "max_length": 128,
    },
    "training": STREAM["training"]
    | {"sample": {"every": 3, "prompts": ["1 plus 1 is"], "max_new_tokens": 4}},
}


def train(cli: Cli, folder: Path, recipe: dict[str, Any], name: str, *options: str) -> list[dict[str, Any]]:
    """Train, and return the lines of metrics.jsonl."""
    if not (folder / "rows.jsonl").exists():  # a stream is resumed only if its file is unchanged
        (folder / "rows.jsonl").write_text("\n".join(lines_of(600)) + "\n")
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    done = cli("train", "--config", "recipe.yaml", "--set", f"output_dir={name}", *options, "--json")
    assert done.returncode == 0, done.stderr
    return list(read_metrics(RunDir(folder / name)))


def values(lines: list[dict[str, Any]], *keys: str) -> dict[str, list[Any]]:
    return {key: [line[key] for line in lines if key in line] for key in keys}


def test_run_with_shared_rows_has_the_losses_of_one_without(cli: Cli, tmp_path: Path) -> None:
    alone, shared = train(cli, tmp_path, PREPARED, "alone"), train(cli, tmp_path, PREPARED, "shared", *SHARED)
    losses = ("loss", "eval_few_loss", "eval_many_loss", "grad_norm")
    for key, expected in values(alone, *losses).items():
        assert len(expected) >= 2
        assert values(shared, key)[key] == pytest.approx(expected, rel=1e-5), key
    counts = ("tokens", "supervised_tokens", "epoch", "samples")
    assert values(shared, *counts) == values(alone, *counts)
    report = json.loads((tmp_path / "shared/readback.json").read_text())
    assert report["sequence_group"] == 2


def test_stream_of_shared_rows_continues_with_rows_of_each_rank(cli: Cli, tmp_path: Path) -> None:
    recipe = STREAM | {"precision": {"mixed_precision": "no"}}
    alone = train(cli, tmp_path, recipe, "alone")
    train(
        cli,
        tmp_path,
        recipe,
        "shared",
        *SHARED,
        "--set",
        "launch.num_processes=4",
        "--set",
        "training.max_steps=3",
    )
    shared = train(cli, tmp_path, recipe, "shared", "--resume", "auto")
    counts = [key for key in alone[-1] if key.startswith("source_")]
    assert counts or any("source_0_tokens" in line for line in alone)
    expected, found = (values(lines, "loss", "tokens", "source_0_tokens") for lines in (alone, shared))
    assert found.pop("loss") == pytest.approx(expected.pop("loss"), rel=1e-5)
    assert found == expected


def test_recipe_with_shared_rows_is_rehearsed_on_four_ranks(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(PREPARED | {"parallelism": {"sp_size": 4}, "launch": {"num_processes": 8}})
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(lines_of(600)) + "\n")
    done = cli("rehearse", "--config", "recipe.yaml", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parallelism.sp_size: 2 instead of 4" in document(done)["changes"]
    assert "on 4 ranks" in document(done)["checks"][0]["detail"]
