"""Saved checkpoints are evaluated next to the run: the run is bit for bit the same, and no evaluation is lost
or counted twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fsdp_tune.run.directory import RunDir, complete_checkpoints
from fsdp_tune.run.metrics_file import read_metrics
from tests.cli.conftest import Cli
from tests.cli.small_runs import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

RECIPE: dict[str, Any] = {
    "model": {"from_config": MODEL, "tokenizer": "builtin:arithmetic"},
    "data": {"train": [{"path": "builtin:arithmetic", "max_rows": 64}], "max_length": 64},
    "training": {
        "global_batch_size": 8,
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 3e-3,
        "report_to": [],
    },
    "precision": {"mixed_precision": "no"},
    "launch": {"device": "cpu", "num_processes": 2},
}
BEST = {
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "rows/perplexity",
    "greater_is_better": None,
}
EVALUATION = {
    "sets": [
        {"path": "builtin:arithmetic", "split": "test", "label": "rows", "max_rows": 12},
        {
            "path": "builtin:arithmetic",
            "split": "test",
            "label": "sums",
            "metric": "exact_match",
            "max_new_tokens": 4,
            "max_rows": 4,
        },
    ]
}


def write(folder: Path, name: str, sets: int = 2, when: str = "alongside", **training: Any) -> str:
    """Write a recipe that evaluates the first of the sets if its best model is by their scores."""
    evaluation = {"evaluation": {"sets": EVALUATION["sets"][:sets], "when": when}} if training else {}
    document = RECIPE | {"training": RECIPE["training"] | training, "output_dir": name} | evaluation
    (folder / f"{name}.yaml").write_text(json.dumps(document))
    return f"{name}.yaml"


def lines(run: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in read_metrics(RunDir(run)) if line.get("event") == event]


def steps(run: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(RunDir(run)) if "loss" in line]


@pytest.mark.parametrize("when", ["alongside", "between_steps"])
def test_run_is_bitwise_the_same_and_its_scores_are_those_of_evaluate(
    tmp_path: Path, cli: Cli, when: str
) -> None:
    for name in ("alone", "evaluated"):
        done = cli(
            "train", "--config", write(tmp_path, name, when=when, **(BEST if name == "evaluated" else {}))
        )
        assert done.returncode == 0, done.stderr
    alone, evaluated = tmp_path / "alone", tmp_path / "evaluated"
    assert steps(alone) == steps(evaluated)
    assert (alone / "merged/model.safetensors").read_bytes() == (
        evaluated / "merged/model.safetensors"
    ).read_bytes()
    found = lines(evaluated, "checkpoint_evaluated")
    assert [line["step"] for line in found] == [3, 6]
    assert found[1]["scores"]["rows/perplexity"]["value"] < found[0]["scores"]["rows/perplexity"]["value"]
    assert [each.step for each in complete_checkpoints(RunDir(evaluated))[0]] == [6]
    assert "the lowest rows/perplexity" in json.loads((evaluated / "merged/merge.json").read_text())["reason"]
    same = cli(
        "evaluate",
        "evaluated",
        "--data",
        "builtin:arithmetic",
        "--split",
        "test",
        "--max-rows",
        "12",
        "--device",
        "cpu",
        "--json",
    )
    (result,) = json.loads(same.stdout)["sets"].values()
    assert result["metric"]["value"] == found[1]["scores"]["rows/perplexity"]["value"]


@pytest.mark.parametrize("when", ["alongside", "between_steps"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_evaluation_that_was_killed_is_done_once_after_a_resume(
    tmp_path: Path, cli: Cli, number: signal.Signals, when: str
) -> None:
    recipe, run = write(tmp_path, "run", sets=1, when=when, **BEST), tmp_path / "run"
    command = subprocess.Popen(
        [sys.executable, "-m", "fsdp_tune", "train", "--config", recipe], cwd=tmp_path, stderr=subprocess.PIPE
    )
    while not (run / ".evaluation").exists():
        assert command.poll() is None, command.stderr and command.stderr.read()
        time.sleep(0.05)
    family = psutil.Process(command.pid).children(recursive=True)
    os.kill(command.pid, number)
    assert command.wait(timeout=240) == (143 if number == signal.SIGTERM else -number)
    assert command.stderr is not None
    command.stderr.close()
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert lines(run, "checkpoint_evaluated") == []
    done = cli("train", "--config", recipe, "--resume", "auto")
    assert done.returncode == 0, done.stderr
    found = [line["step"] for line in lines(run, "checkpoint_evaluated")]
    assert found == sorted(set(found))
    assert {3, 6} <= set(found)
    assert (run / "merged/merge.json").is_file()
    assert not (run / ".evaluation").exists()
