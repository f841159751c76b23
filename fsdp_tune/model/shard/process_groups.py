"""The device mesh and the process groups of a run, from its topology.

`untimed_group` has no practical timeout: its members wait for a rank that downloads, reads or writes.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_tune.core.topology import DIMENSIONS
from fsdp_tune.model.shard.local import bare_model
from fsdp_tune.recipe.schema.recipe import Recipe


def make_mesh(recipe: Recipe, device_type: str) -> DeviceMesh | None:
    """Return the mesh that parameters shard over: [copy], or [replicate, copy] for the hybrid strategies;
    None for plain DDP.

    `copy` is the dimensions that have shards of their own, flattened: ranks that share rows hold different
    shards.
    """
    if not recipe.is_sharded:
        return None
    topology = recipe.topology
    if recipe.is_hybrid:
        return init_device_mesh(
            device_type, (topology.replicate, topology.copy_size), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    return init_device_mesh(device_type, (topology.copy_size,), mesh_dim_names=("dp_shard",))


def make_groups(recipe: Recipe, device_type: str) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group along each dimension whose ranks share rows, by its name; none of a single
    rank. Collective."""
    found: dict[str, dist.ProcessGroup] = {}
    for name, dimension in DIMENSIONS.items():
        outside, ranks, inside = recipe.topology.split(name)
        if not dimension.has_own_rows and ranks > 1:
            names, sizes = ("outside", name, "inside"), (outside, ranks, inside)
            kept = 2 if inside == 1 else 3
            found[name] = init_device_mesh(device_type, sizes[:kept], mesh_dim_names=names[:kept]).get_group(
                name
            )
    return found


def join_groups(model: nn.Module, groups: dict[str, dist.ProcessGroup]) -> None:
    """Let the model's forwards and backwards run over `groups`, by the name of the dimension."""
    model.rank_groups = groups  # type: ignore[assignment]  # nn.Module declares its attributes as tensors and modules


def groups_of(wrapped: nn.Module) -> dict[str, dist.ProcessGroup]:
    """Return the groups of a (wrapped) model by the name of the dimension; none if each rank has rows of its
    own."""
    found: dict[str, dist.ProcessGroup] = vars(bare_model(wrapped)).get("rank_groups", {})
    return found


def untimed_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks whose collectives may wait for days. Collective.

    Waiting for a slow disk is not a hang. The supervisor detects the I/O of the other rank; NCCL's watchdog
    and the timeout of the default group only measure time.
    """
    world = dist.group.WORLD
    assert world is not None, "the default group exists before any other"
    bound = world.bound_device_id
    # torch requires a backend for the device that the default group is bound to; "gloo" alone covers only CPU
    # and CUDA.
    backend = "gloo" if bound is None or bound.type == "cuda" else f"cpu:gloo,{bound.type}:gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group after all ranks have left its last collective, since destroying closes connections.
    Collective."""
    dist.all_reduce(torch.zeros(()))
    dist.destroy_process_group(group)
