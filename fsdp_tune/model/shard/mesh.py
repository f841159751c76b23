"""The DeviceMesh of a run, from its topology."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_tune.recipe.schema import Recipe


def make_mesh(recipe: Recipe, device_type: str) -> DeviceMesh | None:
    """Return the mesh that parameters shard over: [shard], or [replicate, shard] for the hybrid strategies; None for plain DDP."""
    if not recipe.is_sharded:
        return None
    topology = recipe.topology
    if recipe.is_hybrid:
        return init_device_mesh(device_type, (topology.replicate, topology.shard), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh(device_type, (topology.shard,), mesh_dim_names=("dp_shard",))
