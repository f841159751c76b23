"""The first moments of a resumed run: what it owes to the step at which it stopped, and what it must not do again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_tune.run.directory import RunDir
from fsdp_tune.run.manifest import digest
from tests.parity import runs
from tests.parity.bench import Bench
from tests.session import made_once

pytestmark = pytest.mark.ranks

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
DONOR_STEPS = 4


def new_run(bench: Bench, training: dict[str, Any], folder: Path | None = None) -> RunDir:
    training = {"max_steps": 8, "save_steps": 2, "eval_steps": 2, "warmup_steps": 0, "witness": "off", "global_batch_size": 16} | training
    changes = {"model": {"from_config": GPT2}, "training": training, "launch": {"num_processes": 1}}
    return bench.written_run(changes, vocabulary=384, folder=folder)


def donor(bench: Bench, **training: Any) -> RunDir:
    """A run that has finished after `DONOR_STEPS`, with a checkpoint and an evaluation at each second step."""

    def make(folder: Path) -> None:
        runs.train(bench.on_ranks, new_run(bench, {"max_steps": DONOR_STEPS, "lr_scheduler_type": "constant"} | training, folder), 1)

    return RunDir(made_once(f"{bench.folder.name}/resume-{digest(repr(sorted(training.items())))}", make))


def resumed(bench: Bench, source: RunDir, step: int, **training: Any) -> RunDir:
    """A run that has continued from a checkpoint of `source`."""
    run = new_run(bench, {"lr_scheduler_type": "constant"} | training)
    runs.resume_from(run, source, step)
    runs.train(bench.on_ranks, run, 1)
    return run


def steps(run: RunDir, kind: str) -> list[int]:
    return [line["step"] for line in runs.lines(run) if kind in line]


@pytest.mark.parametrize("length", [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 0.6}], ids=["steps", "epochs"])
def test_checkpoint_of_the_last_step_is_trained_no_further(bench: Bench, length: dict[str, Any]) -> None:
    run = resumed(bench, donor(bench), 4, **length)
    assert steps(run, "loss") == [1, 2, 3, 4]
    assert [path.name for path in run.path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert [line["step"] for line in runs.lines(run) if line.get("event") == "train_finished"][-1] == 4


def test_run_in_another_directory_that_ends_where_it_starts_has_a_checkpoint(bench: Bench) -> None:
    source = donor(bench)
    run = new_run(bench, {"max_steps": 4})
    (run.path / "resume.json").write_text(f'{{"resume_from": "{source.checkpoint(4)}"}}')
    runs.train(bench.on_ranks, run, 1)
    one, other = (runs.saved_parameters(each, 4) for each in (run, source))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    generators = [torch.load(each.checkpoint(4) / "rng_state_0.pth", weights_only=True)["rng"]["torch"] for each in (run, source)]
    assert torch.equal(*generators)
