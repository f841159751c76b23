"""The process groups of a run, from its topology."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_tune.recipe.schema import Recipe


def make_mesh(recipe: Recipe, device_type: str) -> DeviceMesh | None:
    """Return the mesh that parameters shard over: [copy], or [replicate, copy] for the hybrid strategies; None for plain DDP.

    `copy` is the dimensions shard × sequence, flattened: ranks that share rows hold different shards.
    """
    if not recipe.is_sharded:
        return None
    topology = recipe.topology
    if recipe.is_hybrid:
        return init_device_mesh(device_type, (topology.replicate, topology.copy_size), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(device_type, (topology.copy_size,), mesh_dim_names=("dp_shard",))


def make_sequence_group(recipe: Recipe, device_type: str) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share this rank's rows; None if each rank has its own. Collective."""
    topology = recipe.topology
    if topology.sequence == 1:
        return None
    mesh = init_device_mesh(device_type, (topology.data_size, topology.sequence), mesh_dim_names=("data", "sequence"))
    return mesh.get_group("sequence")
