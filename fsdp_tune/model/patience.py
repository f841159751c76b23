"""Waiting for a rank that downloads, reads or writes."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def patient_group() -> dist.ProcessGroup:
    """All ranks, by gloo, with no limit of its own to speak of. Collective.

    Who waits for a slow disk does not hang. The supervisor sees the bytes that the other rank moves; NCCL's watchdog and the default
    group's limit see nothing but time.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    assert isinstance(group, dist.ProcessGroup), "every rank is in it"
    return group


def leave(group: dist.ProcessGroup) -> None:
    """Collective. Who destroys a group closes its connections, and another rank may still be in the last collective: all are out first."""
    dist.all_reduce(torch.zeros(()))
    dist.destroy_process_group(group)
