"""The copy of a background save on a device: page-locked, exact, and faster than one into fresh memory."""

from __future__ import annotations

import time

import pytest
import torch

from fsdp_tune.worker.checkpoint.snapshot import HostArena, Snapshot
from tests.gpu.conftest import DEVICE, IS_EMULATED, IS_SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU"),
]


def test_later_copies_are_exact_and_at_the_speed_of_the_link() -> None:
    tensors = {
        str(number): torch.randn(64 << (10 if IS_EMULATED else 20), device=DEVICE)
        for number in range(1 if IS_SMALL else 4)
    }
    snapshot = Snapshot(1, tensors, {}, {}, "", {})
    arena = HostArena()
    arena.copy(snapshot)
    for tensor in tensors.values():
        tensor.add_(1)
    began = time.monotonic()
    copied = arena.copy(snapshot).model
    seconds = time.monotonic() - began
    assert all(torch.equal(copied[name], tensor.cpu()) for name, tensor in tensors.items())
    began = time.monotonic()
    fresh = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    fresh_seconds = time.monotonic() - began
    size_gb = sum(tensor.nbytes for tensor in fresh.values()) / 1e9
    print(
        f"\ncopy to the host: {size_gb / seconds:.1f} GB/s into the arena, "
        f"{size_gb / fresh_seconds:.1f} GB/s into fresh memory"
    )
    if not IS_SMALL:
        assert all(tensor.is_pinned() for tensor in copied.values())
        assert seconds < fresh_seconds
