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

from fsdp_tune.worker.checkpoint import snapshot as snapshot_module
from fsdp_tune.worker.checkpoint.save import Checkpointer, Saved
from fsdp_tune.worker.checkpoint.snapshot import HostArena, Snapshot
from tests.merge.ranks import run_ranks

WHOLE = torch.arange(5 * 3, dtype=torch.float32).reshape(5, 3)


def snapshot_of(model: dict[str, Any]) -> Snapshot:
    return Snapshot(1, model, {}, {}, "", {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # the reading below is a single process
def test_shards_of_a_device_are_saved_from_the_host_without_groups_of_their_own(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        mesh = DeviceMesh("cuda", torch.arange(2), mesh_dim_names=("dp_shard",), _init_backend=False)
        local = WHOLE.chunk(2)[rank].clone()
        spec = DTensorSpec(
            mesh, (Shard(0),), tensor_meta=TensorMeta(WHOLE.shape, WHOLE.stride(), WHOLE.dtype)
        )
        live = DTensor(local, spec, requires_grad=False)
        groups = dist.get_pg_count()
        copy = HostArena().copy(snapshot_of({"weight": live})).model["weight"]
        assert dist.get_pg_count() == groups
        assert copy.device_mesh.device_type == "cpu"
        local.zero_()
        assert torch.equal(copy.to_local(), WHOLE.chunk(2)[rank])
        dcp.save({"weight": copy}, checkpoint_id=tmp_path)

    run_ranks(2, rank_main)
    read = {"weight": torch.zeros_like(WHOLE)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(read["weight"], WHOLE)


def test_copy_that_is_not_waited_for_is_only_made_from_cuda() -> None:
    """On other accelerators, training would change tensors while they are still copied."""
    flags: list[bool] = []

    class Live(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_:
                flags.append((kwargs or {}).get("non_blocking", False))
            return super().__torch_function__(func, types, args, kwargs or {})

    HostArena().copy(snapshot_of({"weight": torch.ones(3).as_subclass(Live)}))
    assert flags == [False]


def test_one_arena_holds_each_snapshot_in_turn() -> None:
    arena = HostArena()
    live = {
        "odd": torch.arange(5, dtype=torch.int8),
        "scalar": torch.tensor(3.5),
        "wide": WHOLE.t(),
        "none": torch.empty(0, 4),
        "word": 7,
    }
    first = arena.copy(snapshot_of(live)).model
    assert first.pop("word") == live.pop("word")
    assert all(
        torch.equal(first[name], live[name]) and first[name].data_ptr() != live[name].data_ptr()
        for name in live
        if name != "none"
    )
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in first.values()), (
        "DCP would copy it again"
    )
    kept = {name: tensor.clone() for name, tensor in live.items()}
    for tensor in live.values():
        tensor += 1
    assert all(torch.equal(first[name], kept[name]) for name in kept), "training does not change the copy"
    second = arena.copy(snapshot_of(live)).model
    assert all(torch.equal(second[name], live[name]) for name in live)
    assert second["wide"].data_ptr() == first["wide"].data_ptr(), "the memory is used again"
    larger = arena.copy(snapshot_of({"weight": torch.ones(10_000)})).model["weight"]
    assert torch.equal(larger, torch.ones(10_000))


def test_memory_of_a_device_is_copied_to_page_locked_memory_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(snapshot_module, "pin_memory", lambda address, size: calls.append(("pin", size)))
    monkeypatch.setattr(snapshot_module, "unpin_memory", lambda address: calls.append(("unpin", 0)))
    stream = SimpleNamespace(synchronize=lambda: calls.append(("wait", 0)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    arena = HostArena()
    for elements in (64, 32, 640):
        arena.copy(snapshot_of({"weight": torch.ones(elements)}))
    assert calls == [("pin", 256), ("wait", 0), ("wait", 0), ("unpin", 0), ("pin", 2560), ("wait", 0)]
    del arena
    assert calls[-1] == ("unpin", 0), (
        "memory that is freed while locked counts as pinned when it is used again"
    )


def test_background_thread_works_on_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []
    device = SimpleNamespace(
        current_device=lambda: 3,
        set_device=lambda index: chosen.append((threading.current_thread().name, index)),
    )
    monkeypatch.setattr(torch, "npu", device, raising=False)
    saver = Checkpointer.__new__(Checkpointer)
    saver.device_type = "npu"
    monkeypatch.setattr(
        Checkpointer, "_write_reporting", lambda *_: chosen.append((threading.current_thread().name, -1))
    )
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
