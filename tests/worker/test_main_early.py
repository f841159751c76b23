"""What a rank does before its run directory exists, in a process of its own as torchrun starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fsdp_tune.jobs.inspection import INSPECT
from fsdp_tune.recipe.schema.recipe import Recipe
from fsdp_tune.run.early_start import EarlyStart
from tests.model.recipes import recipe_of

pytestmark = pytest.mark.ranks


@contextmanager
def early_rank(
    folder: Path, recipe: Recipe, rank: int = 0
) -> Iterator[tuple[EarlyStart, subprocess.Popen[str]]]:
    files = EarlyStart(folder)
    files.recipe_json.write_text(recipe.model_dump_json(by_alias=True))
    command = [sys.executable, "-m", "fsdp_tune.worker", "--early", str(folder), str(folder / "run")]
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "FSDP_OFFLOAD_PARAMS": "stale",
    }
    child = subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield files, child
    finally:
        child.kill()
        child.communicate()


def answer(files: EarlyStart, child: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + 120
    while not files.inspection_json.exists():
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return files.inspection_json.read_text()


@pytest.mark.slow
def test_first_rank_inspects_the_model_as_the_inspection_of_a_command_does(tmp_path: Path) -> None:
    recipe = recipe_of(ranks=2)
    alone = subprocess.run(
        INSPECT, input=recipe.model_dump_json(by_alias=True), capture_output=True, text=True, check=True
    )
    with early_rank(tmp_path, recipe) as (files, child):
        assert json.loads(answer(files, child)) == json.loads(alone.stdout)
        deadline = time.monotonic() + 20
        while psutil.Process(child.pid).children() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert psutil.Process(child.pid).children() == [], "the forked process is reaped"
        assert not (tmp_path / "run").exists()
        assert child.poll() is None
        files.opened.mkdir()
        output, _ = child.communicate(timeout=60)
    assert "run/recipe.json" in output, "then it reads the run directory, which this test does not write"


PROGRAM = """
import os, pathlib, signal, sys, time
from fsdp_tune.run.early_start import EarlyStart
import fsdp_tune.worker.__main__ as early
files = EarlyStart(pathlib.Path(sys.argv[1]))
for failure in sys.argv[2:]:
    early._inspect = lambda files, recipe: exec(failure)
    inspector = early._Inspector(files, None)
    while not files.inspection_json.exists():
        inspector.poll()
        time.sleep(0.02)
    print(repr(files.inspection_json.read_text()), flush=True)
    files.inspection_json.unlink()
"""


def test_inspection_that_ends_without_a_document_has_an_empty_answer(tmp_path: Path) -> None:
    failures = ["os.kill(os.getpid(), signal.SIGKILL)", "raise SystemExit(3)", "raise ValueError('broken')"]
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), *failures]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "''\n" * 3
    assert done.stderr.count("ValueError: broken") == 1


def test_opened_rank_writes_to_the_run_directory_and_not_to_the_temporary_one(tmp_path: Path) -> None:
    with early_rank(tmp_path, recipe_of(ranks=2), rank=1) as (files, child):
        (tmp_path / "run/logs").mkdir(parents=True)
        files.opened.mkdir()
        output, _ = child.communicate(timeout=120)
    log = tmp_path / "run/logs/launcher.log"
    assert "run/recipe.json" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
    assert "run/recipe.json" not in output


@pytest.mark.slow
def test_other_ranks_inspect_nothing(tmp_path: Path) -> None:
    with early_rank(tmp_path, recipe_of(ranks=2), rank=1) as (files, child):
        files.opened.mkdir()
        child.communicate(timeout=120)
    assert not files.inspection_json.exists()
