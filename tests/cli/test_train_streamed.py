"""A run on a stream as users start it: stopped and continued on other ranks, and ended by its data."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, document
from tests.cli.small_runs import lines_of, losses, training_lines, write_stream

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]


def test_stopped_run_continues_on_other_ranks_until_its_file_changes(cli: Cli, tmp_path: Path) -> None:
    write_stream(tmp_path, lines_of(600))
    stopped = cli(
        "train",
        "--config",
        "recipe.yaml",
        "--set",
        "output_dir=run",
        "--set",
        "training.max_steps=3",
        "--json",
    )
    assert stopped.returncode == 0, stopped.stderr
    resumed = ("train", "--config", "recipe.yaml", "--set", "output_dir=run", "--resume", "auto", "--json")
    done = cli(*resumed, "--set", "launch.num_processes=1", "--set", "training.dataloader_num_workers=3")
    assert done.returncode == 0, done.stderr
    assert len(set(losses(tmp_path / "run"))) == 6
    (tmp_path / "rows.jsonl").write_text("\n".join(lines_of(601)) + "\n")
    changed = cli(*resumed, "--set", "training.max_steps=9")
    assert (changed.returncode, document(changed)["errors"][0]["code"]) == (2, "data-changed")


def test_stopped_run_has_the_losses_of_one_that_is_not(cli: Cli, tmp_path: Path) -> None:
    write_stream(tmp_path, lines_of(600))
    for name, *others in (("whole",), ("part", "--set", "training.max_steps=3")):
        done = cli("train", "--config", "recipe.yaml", "--set", f"output_dir={name}", *others, "--json")
        assert done.returncode == 0, done.stderr
    resumed = ("train", "--config", "recipe.yaml", "--set", "output_dir=part", "--resume", "auto", "--json")
    done = cli(*resumed, "--set", "launch.num_processes=1", "--set", "training.dataloader_num_workers=3")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "part") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_bad_row_far_into_the_stream_ends_the_run_with_its_line(cli: Cli, tmp_path: Path) -> None:
    write_stream(
        tmp_path, [*lines_of(1200), "{broken", *lines_of(100)], packing=False, shuffle_buffer_size=16
    )
    ended = cli(
        "train",
        "--config",
        "recipe.yaml",
        "--set",
        "output_dir=run",
        "--set",
        "training.max_steps=400",
        "--json",
    )
    problem = document(ended)["errors"][0]
    assert (ended.returncode, problem["code"]) == (2, "bad-row")
    assert (Path(problem["file"]).name, problem["line"]) == ("rows.jsonl", 1201)


def test_packed_stream_ends_after_its_last_row(cli: Cli, tmp_path: Path) -> None:
    """Lanes pack as many rows of the files into different numbers of rows; those that end first wait for the
    others."""
    write_stream(tmp_path, lines_of(700), train=[{"path": "rows.jsonl", "repeats": 1}], max_length=96)
    ended = cli(
        "train",
        "--config",
        "recipe.yaml",
        "--set",
        "output_dir=run",
        "--set",
        "training.max_steps=40",
        "--json",
    )
    problem = document(ended)["errors"][0]
    assert (ended.returncode, problem["code"]) == (2, "stream-ended")
    step = int(re.search(r"for step (\d+): 700 of 700 rows of ", problem["message"])[1])  # type: ignore[index]
    lines = training_lines(tmp_path / "run")
    assert lines[-1]["step"] == step - 1
    prepared = tmp_path / "one.yaml"
    prepared.write_text(
        (tmp_path / "recipe.yaml")
        .read_text()
        .replace('"streaming": true', '"streaming": false')
        .replace(', "repeats": 1', "")
    )
    whole = cli("prepare", "--config", "one.yaml", "--json")
    assert lines[-1]["source_0_tokens"] == document(whole)["report"]["sets"]["train"]["tokens"]


def test_stream_that_ends_is_one_line_with_the_step(cli: Cli, tmp_path: Path) -> None:
    write_stream(tmp_path, lines_of(120), train=[{"path": "rows.jsonl", "repeats": 1}], packing=False)
    ended = cli(
        "train",
        "--config",
        "recipe.yaml",
        "--set",
        "output_dir=run",
        "--set",
        "training.max_steps=40",
        "--json",
    )
    problem = document(ended)["errors"][0]
    assert problem["code"] == "stream-ended"
    assert re.search("for step 16: 120 of 120 rows of `.*` were read \\(`repeats: 1`\\)$", problem["message"])
    assert "repeats" in problem["hint"]
    assert 13 <= len(losses(tmp_path / "run")) <= 15
