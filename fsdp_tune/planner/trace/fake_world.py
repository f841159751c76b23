"""A fake process group of any size in one process, which is its rank 0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fsdp_tune.model.internals.torch_internals import CHUNKS, FAKE_STORE
from fsdp_tune.planner.trace import cuda_kernels, fake_gpu
from fsdp_tune.planner.trace.fake_gpu import replaced


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Initialise the default process group; its collectives return immediately and leave their buffers
    unchanged."""
    assert not dist.is_initialized(), "a trace needs a separate process"
    fake_gpu.install()
    fake_gpu.install_autocast()
    cuda_kernels.install()
    dist.init_process_group(
        f"cpu:fake,{fake_gpu.DEVICE}:fake", store=FAKE_STORE.get()(), rank=0, world_size=size
    )
    try:
        # FSDP2 waits on this stream for units that were gathered but not used, such as frozen ones below the
        # last gradient.
        on_accelerator = replaced(torch.accelerator, "current_stream", fake_gpu.current_stream)
        with on_accelerator, CHUNKS.replaced(_Chunks):
            yield
    finally:
        dist.destroy_process_group()


class _Chunks(Sequence[torch.Tensor]):
    """The result of `torch.chunk`, padded with empty chunks, created lazily: FSDP2 uses only two of the
    chunks of all ranks."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.chunks, self.dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self.chunks

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        length = self.tensor.shape[self.dim]
        size = -(-length // self.chunks)
        begin = index * size
        return (
            self.tensor.narrow(self.dim, begin, min(size, length - begin))
            if begin < length
            else self.tensor.new_empty(0)
        )
