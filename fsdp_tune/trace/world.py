"""A process group of any size in one process: rank 0 of a world whose other ranks do not exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
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
        # FSDP2 waits there for units that were gathered and not needed, such as frozen ones below the last gradient.
        on_accelerator = mock.patch.object(torch.accelerator, "current_stream", device.current_stream)
        with on_accelerator, mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks):
            yield
    finally:
        dist.destroy_process_group()


class _Chunks(Sequence[torch.Tensor]):
    """What `torch.chunk` would give, empty chunks behind it, made when asked for: FSDP2 asks for two of as many as there are ranks."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.chunks, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        length = self.tensor.shape[self.dim]
        size = -(-length // self.chunks)
        begin = index * size
        return self.tensor.narrow(self.dim, begin, min(size, length - begin)) if begin < length else self.tensor.new_empty(0)
