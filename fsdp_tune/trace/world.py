"""A process group of any size in one process: rank 0 of a world whose other ranks do not exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_tune.trace import autocast, device


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """The default group; collectives return at once and leave their buffers as they are."""
    assert not dist.is_initialized(), "a trace runs in a process of its own"
    device.install()
    autocast.install()
    dist.init_process_group(f"cpu:fake,{device.DEVICE}:fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
