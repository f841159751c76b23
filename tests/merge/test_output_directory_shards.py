"""Sharded safetensors of torch's HuggingFaceStorageWriter are merged by the offsets in their headers; files
of verl are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from fsdp_tune.core.errors import FsdpTuneError
from tests.merge.test_reader import assert_weights

STATE = {
    "embed.weight": torch.randn(10, 4),
    "norm.weight": torch.randn(4).bfloat16(),
    "scale": torch.tensor(2.5),
    "experts": torch.randn(4, 6, 2),
}
GRIDS: dict[str, Any] = {
    "rows": lambda value: [(index, part) for index, part in enumerate(value.tensor_split(3))],
    "columns": lambda value: (
        [(index, part) for index, part in enumerate(value.tensor_split(2, dim=1))]
        if value.ndim > 1
        else [(0, value)]
    ),
    "replicas": lambda value: [(0, value), (1, value)],
}


def save_shards(folder: Path, kind: str, ranks: int = 3) -> Path:
    """Write slices of STATE as torch 2.13 does (`distributed/checkpoint/hf_storage.py`)."""
    folder.mkdir()
    tensors: list[dict[str, torch.Tensor]] = [{} for _ in range(ranks)]
    offsets: list[dict[str, Any]] = [{} for _ in range(ranks)]
    for name, value in STATE.items():
        parts = GRIDS[kind](value) if value.ndim else [(0, value)]
        position, dimension = 0, 1 if kind == "columns" and value.ndim > 1 else 0
        for rank, part in parts:
            at = [0] * value.ndim
            if value.ndim and kind != "replicas":
                at[dimension] = position
                position += part.shape[dimension]
            if part.numel():
                tensors[rank][name], offsets[rank][name] = part.contiguous(), {"saved_offsets": at}
    for rank in range(ranks):
        if tensors[rank]:
            metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets[rank])}
            save_file(
                tensors[rank],
                folder / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors",
                metadata=metadata,
            )
    return folder


@pytest.mark.parametrize("kind", GRIDS)
def test_slices_are_merged_by_their_offsets(kind, tmp_path, merge):
    assert_weights(merge(save_shards(tmp_path / "c", kind)).output, STATE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_files_of_torch_are_merged(tmp_path, merge):
    folder = tmp_path / "epoch_0_step_4" / "model"
    dcp.save(
        dict(STATE),
        storage_writer=HuggingFaceStorageWriter(path=str(folder), save_distributed=True),
        no_dist=True,
    )
    assert [path.name for path in folder.iterdir() if path.suffix == ".safetensors"] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]
    assert_weights(merge(folder.parent).output, STATE)


def test_missing_shard_is_reported(tmp_path, merge):
    folder = save_shards(tmp_path / "c", "rows")
    (folder / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(FsdpTuneError, match="the file of shard 2 is missing"):
        merge(folder)


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (None, "no usable DCP_SHARDING_INFO"),
        ("[", "no usable DCP_SHARDING_INFO"),
        ("[]", "is not an object"),
        ("{}", "has no position of `w`"),
        ('{"w": {"saved_offsets": [0]}}', "has no position of `w`"),
        ('{"w": {"saved_offsets": [0, -1]}}', "has no position of `w`"),
        ('{"w": {"saved_offsets": [0, true]}}', "has no position of `w`"),
        ('{"w": {"saved_offsets": [2, 0]}}', "the chunks cover 4 of 8 elements"),
    ],
)
def test_wrong_offsets_are_damage(info, reason, tmp_path, merge):
    (tmp_path / "c").mkdir()
    metadata = {"format": "pt"} | ({"DCP_SHARDING_INFO": info} if info is not None else {})
    save_file(
        {"w": torch.zeros(2, 2)},
        tmp_path / "c" / "shard-00001-model-00001-of-00001.safetensors",
        metadata=metadata,
    )
    with pytest.raises(FsdpTuneError) as caught:
        merge(tmp_path / "c")
    assert caught.value.problems[0].code == "merge-damaged-safetensors"
    assert reason in caught.value.problems[0].message


@pytest.mark.parametrize("place", [".", "actor", "actor/model_world_size_2_rank_0.pt"])
def test_parts_of_verl_are_refused_by_name(place, tmp_path, merge):
    actor = tmp_path / "global_step_4" / "actor"
    actor.mkdir(parents=True)
    for rank in range(2):
        torch.save({"w": torch.zeros(2)}, actor / f"model_world_size_2_rank_{rank}.pt")
        torch.save({}, actor / f"optim_world_size_2_rank_{rank}.pt")
    with pytest.raises(FsdpTuneError) as caught:
        merge(tmp_path / "global_step_4" / place)
    [problem] = caught.value.problems
    assert problem.code == "merge-local-state"
    assert "`model_world_size_2_rank_0.pt` is one rank's part of a model, as verl" in problem.message
    assert f"--local_dir {actor}" in str(problem.hint)
