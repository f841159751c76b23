"""Runs of the real command on one accelerator.

`GPU_TEST_DEVICE=cpu` and an emulated GPU (`python -m tests.cuda`) run small versions, to check that the tests
work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_tune.core.parent_death import ends_with_parent
from fsdp_tune.run.directory import RunDir

DEVICE = os.environ.get("GPU_TEST_DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"
IS_EMULATED = "EMULATED_CUDA" in os.environ
IS_SMALL = ON_CPU or IS_EMULATED

Train = Callable[..., RunDir]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """`fsdp-tune train` with some keys over a base of one rank; returns the finished run."""
    count = 0

    def run(**sections: Any) -> RunDir:
        nonlocal count
        count += 1
        recipe: dict[str, Any] = {
            "output_dir": str(tmp_path / f"run-{count}"),
            "model": {"tokenizer": "builtin:arithmetic"},
            "data": {"train": [{"path": "builtin:arithmetic"}], "max_length": 64, "loss_on": "all"},
            "precision": {"mixed_precision": "no"},
            "training": {
                "max_steps": 4,
                "learning_rate": 1e-3,
                "logging_steps": 1,
                "report_to": [],
                "save_steps": 1000,
            },
            "checkpoint": {"probe": False},
            "merge": {"at_end": False},
            "launch": {"device": DEVICE, "num_processes": 1},
        }
        for name, keys in sections.items():
            recipe[name] = recipe[name] | keys if name in recipe else keys
        file = tmp_path / f"run-{count}.json"
        file.write_text(json.dumps(recipe))
        command = [sys.executable, "-m", "fsdp_tune", "train", "--config", str(file), "--json"]
        # A run that outlived the tests would take the GPU from whatever is run next.
        done = subprocess.run(ends_with_parent(command), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return RunDir(Path(recipe["output_dir"]))

    return run


def loss_lines(run: RunDir) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in run.metrics_jsonl.read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def readback(run: RunDir) -> dict[str, Any]:
    return json.loads(run.readback_json.read_text())
