"""Waiting for a rank that downloads, reads or writes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def patient_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks whose collectives may wait for days. Collective.

    A rank that waits for a slow disk does not hang. The supervisor sees the bytes that the other rank moves; NCCL's watchdog and the
    default group's limit see nothing but time.
    """
    world = dist.group.WORLD
    assert world is not None, "the default group exists before any other"
    bound = world.bound_device_id
    # torch requires a backend for the device that the default group is bound to, and gives "gloo" one for CPU and CUDA only.
    backend = "gloo" if bound is None or bound.type == "cuda" else f"cpu:gloo,{bound.type}:gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def leave(group: dist.ProcessGroup) -> None:
    """Collective. Who destroys a group closes its connections, and another rank may still be in the last collective: all are out first."""
    dist.all_reduce(torch.zeros(()))
    dist.destroy_process_group(group)
