"""FULL_STATE_DICT read back: one tensor after the other, each rank its part, and nothing of another model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_tune.core.errors import FailedError
from fsdp_tune.run.directory import FULL_MODEL_FILE
from fsdp_tune.worker.checkpoint.state import Live, load_model
from tests.merge.ranks import run_ranks

OTHER = "checkpoint-of-another-model"
WEIGHT, BIAS = torch.randn(5, 3), torch.randn(5)


def test_each_rank_gets_its_shard(tmp_path: Path) -> None:
    save_file({"weight": WEIGHT, "bias": BIAS}, tmp_path / FULL_MODEL_FILE)

    def rank_main(rank: int) -> None:
        model = nn.Linear(3, 5)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        load_model(Live(model, None, full=True), tmp_path)
        for parameter, whole in ((model.weight, WEIGHT), (model.bias, BIAS)):
            assert torch.equal(parameter.to_local(), whole.chunk(2)[rank])  # type: ignore[operator]

    run_ranks(2, rank_main)


@pytest.mark.parametrize(
    ("stored", "code", "told"),
    [
        (
            {"weight": WEIGHT},
            "checkpoint-lacks-tensors",
            "1 tensors of the model are missing, the first is `bias`",
        ),
        (
            {"weight": torch.randn(1, 3), "bias": BIAS},
            OTHER,
            "`weight` is (1, 3) torch.float32, the model has (5, 3) torch.float32",
        ),
        (
            {"weight": WEIGHT.bfloat16(), "bias": BIAS},
            OTHER,
            "`weight` is (5, 3) torch.bfloat16, the model has (5, 3) torch.float32",
        ),
        (
            {"weight": WEIGHT, "bias": BIAS, "gate": BIAS.clone(), "head": WEIGHT.clone()},
            OTHER,
            "`gate` is not in the model (and 1 more)",
        ),
    ],
)
def test_file_of_another_model_is_refused(
    stored: dict[str, torch.Tensor], code: str, told: str, tmp_path: Path
) -> None:
    """A row that is one would be copied to all rows, another dtype cast."""
    save_file(stored, tmp_path / FULL_MODEL_FILE)
    with pytest.raises(FailedError, match=re.escape(told)) as caught:
        load_model(Live(nn.Linear(3, 5), None, full=True), tmp_path)
    assert [problem.code for problem in caught.value.problems] == [code]


def test_frozen_parameter_may_be_stored_in_another_dtype(tmp_path: Path) -> None:
    save_file({"weight": WEIGHT, "bias": BIAS}, tmp_path / FULL_MODEL_FILE)
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16), requires_grad=False)
    load_model(Live(model, None, full=True), tmp_path)
    assert torch.equal(model.weight, WEIGHT.bfloat16())
