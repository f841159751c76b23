"""Kills and full disks at the save of an adapter: the previous checkpoint is kept, and the run continues bit
for bit."""

from __future__ import annotations

import errno
import functools
import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_tune.core.errors import FsdpTuneError
from fsdp_tune.merge.merge_options import MergeOptions
from fsdp_tune.merge.merging import merge_checkpoint
from fsdp_tune.run.directory import RunDir
from tests.cuda.devices import on_devices
from tests.faults.checks import stages, verified_steps
from tests.faults.conftest import Count
from tests.faults.disk import Fault, injected
from tests.faults.training import CASE, Training, outcomes
from tests.merge.checkpoints import make_run, merged_tensors, same_bits
from tests.merge.peft import write_config
from tests.parity import runs
from tests.ranks import KILLED, shared_ranks

LORA: dict[str, Any] = {
    "lora": {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1},
    "training": {"max_steps": 6, "save_steps": 2, "eval_strategy": "no"},
}
SECOND_SAVE = ".checkpoint-4."


@functools.cache
def adapted(device: str) -> Training:
    return Training(shared_ranks(device), CASE, LORA)


@pytest.mark.slow
@pytest.mark.ranks
@on_devices
@pytest.mark.parametrize("number", [5, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 13))])
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rank_killed_while_it_saves_an_adapter_leaves_the_previous_checkpoint_and_the_run_resumes(
    rank: int, number: int, device: str
) -> None:
    training = adapted(device)
    run = training.new()
    ends = training.attempt(run, faults=[(rank, Fault(number, "torn", inside=SECOND_SAVE))])
    assert ends[rank].code == KILLED
    assert verified_steps(run) == [2]
    assert all(".lora_" in name for name in runs.saved_parameters(run, 2)), "nothing of the base is saved"
    training.finish(run)
    training.is_whole(run)


@pytest.mark.slow  # of whole models: test_save.py
@pytest.mark.ranks
@on_devices
@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_at_the_save_of_an_adapter_leaves_the_previous_checkpoint_and_the_next_save_succeeds(
    rank: int, device: str
) -> None:
    training = adapted(device)
    run = training.new()
    ends = training.attempt(
        run, faults=[(rank, Fault(5, "error", errno.ENOSPC, sticky=True, inside=SECOND_SAVE))]
    )
    assert outcomes(ends) == [(0, "finished")] * 2
    assert verified_steps(run) == [2, 6]
    assert stages(run.path) == []
    training.is_whole(run)


def export_on_full_disk(run: RunDir, operation: int) -> FsdpTuneError | None:
    """Export the adapter of a run whose disk is full from an operation on, and return the error."""
    try:
        with injected(Fault(operation, "error", errno.ENOSPC, sticky=True, inside=str(run.path))):
            merge_checkpoint(run.path, MergeOptions(adapter=True, dtype="keep"))
    except FsdpTuneError as error:
        return error
    return None


def test_full_disk_at_any_operation_of_an_export_leaves_no_adapter_or_a_complete_one(
    tmp_path: Path, count: Count
) -> None:
    layers = {
        f"layer.{index}.lora_{part}": shape
        for index in range(2)
        for part, shape in (("A", (4, 20)), ("B", (30, 4)))
    }
    state = {f"{name}.default.weight": torch.randn(shape) for name, shape in layers.items()}
    source = make_run(tmp_path / "source", {1: state})
    write_config(source / "model")
    for number in itertools.count(1):
        run = RunDir(shutil.copytree(source, tmp_path / str(number)))
        error = export_on_full_disk(run, number)
        assert error is None or "No space left" in str(error)
        if error is None or run.adapter.exists():
            exported = merged_tensors(run.adapter)
            assert all(
                same_bits(exported[f"base_model.model.{name}.weight"], state[f"{name}.default.weight"])
                for name in layers
            )
        if error is None:
            break
    assert number > 20
    count(refused_operations_of_an_export=number - 1)
