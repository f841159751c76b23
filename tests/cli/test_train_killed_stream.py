"""A run on a stream that is killed again and again, continued on other numbers of ranks and loader processes:
which rows it trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.small_runs import lines_of, write_stream

pytestmark = [pytest.mark.e2e, pytest.mark.ranks, pytest.mark.slow]
STEPS, BATCH = 120, 8
ATTEMPTS = [(ranks, workers) for workers in (0, 1, 3) for ranks in (1, 2, 4)]
RECORDING = """
import sys

if "fsdp_tune.worker" in sys.orig_argv:
    import json, os
    from fsdp_tune.worker.rows.streamed_rows import StreamedRows

    take = StreamedRows.take

    def recorded(self, row):
        line = json.dumps([row.row_id, row.origins])
        with open(os.environ["RECORDED_ROWS"] + f"-{self.data_rank}", "a") as file:
            file.write(line + "\\n")
        return take(self, row)

    StreamedRows.take = recorded
"""
"""Runs in each rank before the stack is imported; writes the rows that its trainer is given."""


def start(folder: Path, name: str, attempt: str, *others: str) -> subprocess.Popen[bytes]:
    (folder / "sitecustomize.py").write_text(RECORDING)
    environment = os.environ | {"PYTHONPATH": str(folder), "RECORDED_ROWS": str(folder / f"{name}.{attempt}")}
    command = [
        sys.executable,
        "-m",
        "fsdp_tune",
        "train",
        "--config",
        "recipe.yaml",
        "--set",
        f"output_dir={name}",
        *others,
    ]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def rows_of(folder: Path, name: str, attempt: str) -> dict[int, list[str]]:
    """Return the examples of each row that the ranks were given in one attempt, by the number of the row in
    the run."""
    rows: list[Any] = []
    for file in folder.glob(f"{name}.{attempt}-*"):
        # A rank may have been killed within its last line.
        rows += [
            json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")
        ]
    assert len({number for number, _ in rows}) == len(rows)
    return dict(rows)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command, its launcher and all ranks and loader processes by SIGKILL."""
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for each in everyone:
        each.kill()
    process.wait()
    psutil.wait_procs(everyone, timeout=30)


def test_killed_run_trains_the_rows_of_one_that_is_not(tmp_path: Path) -> None:
    write_stream(tmp_path, lines_of(20_000))
    keys = ("--set", f"training.max_steps={STEPS}", "--set", "training.save_steps=3", "--resume", "auto")
    with start(tmp_path, "whole", "0", *keys) as whole:
        assert whole.wait(300) == 0, whole.stderr and whole.stderr.read()
    expected = rows_of(tmp_path, "whole", "0")
    assert sorted(expected) == list(range(len(expected)))
    assert len(expected) >= STEPS * BATCH

    given: list[dict[int, list[str]]] = []
    for attempt, (ranks, workers) in enumerate(ATTEMPTS):
        is_last = attempt == len(ATTEMPTS) - 1
        shape = (
            "--set",
            f"launch.num_processes={ranks}",
            "--set",
            f"training.dataloader_num_workers={workers}",
        )
        enough = (attempt + 1) * (STEPS // len(ATTEMPTS)) * BATCH
        with start(tmp_path, "killed", str(attempt), *keys, *shape) as process:
            while process.poll() is None and (
                is_last or max(rows_of(tmp_path, "killed", str(attempt)), default=0) < enough
            ):
                time.sleep(0.05)
            if not is_last:
                assert process.poll() is None, process.stderr and process.stderr.read()
                kill(process)
            assert not is_last or process.returncode == 0, process.stderr and process.stderr.read()
        given.append(rows_of(tmp_path, "killed", str(attempt)))

    for before, after in pairwise(given):
        assert 0 < min(after) <= max(before) + 1  # it went on from a checkpoint, and left no row out
        assert min(after) % BATCH == 0
    every = {number: origins for rows in given for number, origins in rows.items()}
    assert all(
        expected[number] == origins
        for rows in given
        for number, origins in rows.items()
        if number < STEPS * BATCH
    )
    assert sorted(number for number in every if number < STEPS * BATCH) == list(range(STEPS * BATCH))
    counted = Counter(origin for number in range(STEPS * BATCH) for origin in every[number])
    assert set(counted.values()) == {1}  # no row of the file twice: it has more than all windows hold
