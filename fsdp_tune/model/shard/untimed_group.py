"""Process groups without a practical timeout, to wait for a rank that downloads, reads or writes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def untimed_group() -> dist.ProcessGroup:
    """Create a gloo group of all ranks whose collectives may wait for days. Collective.

    Waiting for a slow disk is not a hang. The supervisor detects the I/O of the other rank; NCCL's watchdog and the timeout of the
    default group only measure time.
    """
    world = dist.group.WORLD
    assert world is not None, "the default group exists before any other"
    bound = world.bound_device_id
    # torch requires a backend for the device that the default group is bound to; "gloo" alone covers only CPU and CUDA.
    backend = "gloo" if bound is None or bound.type == "cuda" else f"cpu:gloo,{bound.type}:gloo"
    group = dist.new_group(backend=backend, timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a group after all ranks have left its last collective, since destroying closes connections. Collective."""
    dist.all_reduce(torch.zeros(()))
    dist.destroy_process_group(group)
