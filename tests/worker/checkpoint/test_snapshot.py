"""Saves in the background: their copy, their thread, and which step counts as saved."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_tune.worker.checkpoint.save import Checkpointer, Saved, Snapshot, in_host_memory
from tests.merge.ranks import run_ranks

WHOLE = torch.arange(5 * 3, dtype=torch.float32).reshape(5, 3)


def snapshot_of(model: dict[str, Any]) -> Snapshot:
    return Snapshot(1, model, {}, {}, "", {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the reading below is a single process
def test_shards_of_a_device_are_saved_from_the_host_without_groups_of_their_own(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("dp_shard",), _init_backend=False)
        local = WHOLE.chunk(2)[rank].clone()
        spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta(WHOLE.shape, WHOLE.stride(), WHOLE.dtype))
        live = DTensor(local, spec, requires_grad=False)
        groups = dist.get_pg_count()
        copy = in_host_memory(snapshot_of({"weight": live})).model["weight"]
        assert dist.get_pg_count() == groups
        assert copy.device_mesh.device_type == "cpu"
        local.zero_()
        assert torch.equal(copy.to_local(), WHOLE.chunk(2)[rank])
        dcp.save({"weight": copy}, checkpoint_id=tmp_path)

    run_ranks(2, rank_main)
    read = {"weight": torch.zeros_like(WHOLE)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["weight"], WHOLE)


def test_background_thread_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []
    device = SimpleNamespace(current_device=lambda: 3, set_device=lambda index: chosen.append((threading.current_thread().name, index)))
    monkeypatch.setattr(torch, "npu", device, raising=False)
    saver = Checkpointer.__new__(Checkpointer)
    saver.device_type = "npu"
    monkeypatch.setattr(Checkpointer, "_write_reporting", lambda *_: chosen.append((threading.current_thread().name, -1)))
    saver._write_in_background(snapshot_of({}), Saved(1, 0.0))
    assert saver._thread is not None
    saver._thread.join()
    assert chosen == [("save-1", 3), ("save-1", -1)]


def test_step_counts_as_saved_during_write() -> None:
    """The end of an epoch requests the checkpoint of the last step again, which must not be written twice."""
    saver = Checkpointer.__new__(Checkpointer)
    saver.last_step, saver._pending = 10, None
    assert saver.newest_step == 10
    saver._pending = Saved(20, 0.0)
    assert saver.newest_step == 20
